"""Compares how often arms fail, at each learning rate, paired by seed.

A fate is a threshold on a loss, so a few runs near it can flip with any change of seed or machine:
a difference of rates is worth saying only with its interval, and the losses themselves say more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from minillama.ablation.analysis import ArmResult, Interval, with_baselines
from minillama.ablation.statistics import holm, mcnemar_test, rate_difference_interval

FAILED = ("diverged", "collapsed")
"""The fates of a run that failed; a crashed run has no result."""


@dataclass(frozen=True)
class FailureComparison:
    """The failures of an arm and its baseline at one learning rate, over the seeds of both.

    ``rate95`` is Newcombe's interval of (arm's rate − baseline's), from −1 to 1; ``p`` the exact
    McNemar test's, ``p_holm`` adjusted for all comparisons of failures in the report.
    """

    arm: str
    baseline: str
    lr: float
    n_seeds: int
    failed: int
    baseline_failed: int
    rate95: Interval
    p: float
    p_holm: float

    @property
    def difference(self) -> float:
        """The arm's rate of failure minus the baseline's."""
        return (self.failed - self.baseline_failed) / self.n_seeds


def compare_failures(arms: Sequence[ArmResult]) -> list[FailureComparison]:
    """Compare each arm with its baseline at each learning rate where a run of either failed."""
    out = []
    for arm, baseline in with_baselines(arms):
        ours, theirs = failures_by_place(arm), failures_by_place(baseline)
        shared = ours.keys() & theirs.keys()
        for lr in sorted({lr for lr, _ in shared}):
            pairs = [(ours[place], theirs[place]) for place in shared if place[0] == lr]
            both = pairs.count((True, True))
            first, second = pairs.count((True, False)), pairs.count((False, True))
            if not both + first + second:
                continue
            ends = rate_difference_interval(both, first, second, pairs.count((False, False)))
            out.append(
                FailureComparison(
                    arm=arm.name,
                    baseline=baseline.name,
                    lr=lr,
                    n_seeds=len(pairs),
                    failed=both + first,
                    baseline_failed=both + second,
                    rate95=Interval(*ends),
                    p=mcnemar_test(first, second),
                    p_holm=math.nan,
                )
            )
    adjusted = holm([each.p for each in out])
    return [replace(each, p_holm=p) for each, p in zip(out, adjusted, strict=True)]


def failures_by_place(arm: ArmResult) -> dict[tuple[float, int], bool]:
    """Return whether each ended run failed, by its learning rate and seed."""
    return {(run.lr, run.seed): run.fate in FAILED for run in arm.runs if run.ended}
