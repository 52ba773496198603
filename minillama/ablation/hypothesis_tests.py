"""Tests the recorded hypotheses of an ablation against its runs.

Those that were planned are a family of their own: Holm's adjustment counts them alone.  Those that
were written down later form another one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from minillama.ablation.analysis import ArmResult, Interval
from minillama.ablation.failures import failures_by_place
from minillama.ablation.hypotheses import RecordedHypothesis
from minillama.ablation.measures import Floats
from minillama.ablation.results import Results
from minillama.ablation.sequential import (
    repeated_interval,
    repeated_less,
    repeated_p,
    repeated_tost,
)
from minillama.ablation.statistics import ALPHA, holm, mcnemar_test, rate_difference_interval


@dataclass(frozen=True)
class HypothesisResult:
    """The test of one hypothesis: arm minus baseline, paired by seed.

    ``mean`` and its 95 % ``interval`` are in nats per token, or a difference of rates of failure.
    ``p`` is that of the claim's opposite; ``p_holm`` is adjusted within the planned hypotheses, or
    within those that came later.  ``refuted``: the interval lies wholly where the claim is wrong.
    All are NaN or false with fewer than two pairs.
    """

    recorded: RecordedHypothesis
    in_config: bool
    n_pairs: int
    mean: float
    interval: Interval
    p: float
    p_holm: float
    refuted: bool

    @property
    def is_shown(self) -> bool:
        """Whether the claim is shown, adjusted for the number of hypotheses."""
        return self.p_holm < ALPHA


def check_hypotheses(results: Results, arms: Sequence[ArmResult]) -> list[HypothesisResult]:
    """Return the result of each recorded hypothesis, those first that were planned."""
    named = {arm.name: arm for arm in arms}
    out = []
    for planned in (True, False):
        family = [
            _check(each, named, each.hypothesis.name in results.hypothesis_names)
            for each in results.hypotheses
            if each.is_planned == planned
        ]
        adjusted = holm([each.p for each in family])
        out += [replace(each, p_holm=p) for each, p in zip(family, adjusted, strict=True)]
    return out


def _check(
    recorded: RecordedHypothesis, arms: dict[str, ArmResult], in_config: bool
) -> HypothesisResult:
    h = recorded.hypothesis
    pair = [arms[name] for name in (h.arm, h.baseline or "") if name in arms]
    nothing = HypothesisResult(
        recorded, in_config, 0, math.nan, Interval(math.nan, math.nan), math.nan, math.nan, False
    )
    if len(pair) < 2:  # the config has the arm no more
        return nothing
    arm, baseline = pair
    if h.measure == "failures":
        return _check_failures(nothing, arm, baseline)
    if h.measure == "S":
        values = [{seed: s.plain for seed, s in each.sensitivity.items()} for each in pair]
    else:
        values = [_losses(each, h.rate) for each in pair]
    shared = sorted(values[0].keys() & values[1].keys())
    d: Floats = np.array([values[0][seed] - values[1][seed] for seed in shared])
    if len(d) < 2:
        return replace(nothing, n_pairs=len(d))
    grows = h.measure == "loss" and h.rate == "best"
    looks, look = (arm.looks, arm.look) if grows else ((), 0)
    interval = Interval.of(repeated_interval(d, looks, look))
    margin = h.margin or 0.0
    p, refuted = {
        "same": (
            repeated_tost(d, looks, look, margin),
            interval.low > margin or interval.high < -margin,
        ),
        "lower": (repeated_less(d, looks, look), interval.low > 0),
        "higher": (repeated_less(-d, looks, look), interval.high < 0),
        "different": (repeated_p(d, looks, look), False),
    }[h.claim]
    return replace(
        nothing, n_pairs=len(d), mean=float(d.mean()), interval=interval, p=p, refuted=refuted
    )


def _losses(arm: ArmResult, rate: float | str) -> dict[int, float]:
    """Return the losses by seed: at the best rate of the compared seeds, else of all there."""
    if rate == "best":
        return {seed: arm.losses[arm.best_lr, seed] for seed in arm.best_seeds}
    return {seed: loss for (lr, seed), loss in arm.losses.items() if lr == rate}


def _check_failures(
    nothing: HypothesisResult, arm: ArmResult, baseline: ArmResult
) -> HypothesisResult:
    """Compare rates of failure by McNemar's exact test, one-sided for a one-sided claim."""
    h = nothing.recorded.hypothesis
    failed = []
    for each in (arm, baseline):
        rate = each.best_lr if h.rate == "best" else h.rate
        seeds = set(each.best_seeds) if h.rate == "best" else {run.seed for run in each.runs}
        at_rate = failures_by_place(each).items()
        failed.append({s: bad for (lr, s), bad in at_rate if lr == rate and s in seeds})
    pairs = [(failed[0][seed], failed[1][seed]) for seed in failed[0].keys() & failed[1].keys()]
    if len(pairs) < 2:
        return replace(nothing, n_pairs=len(pairs))
    both, first = pairs.count((True, True)), pairs.count((True, False))
    second, neither = pairs.count((False, True)), pairs.count((False, False))
    low, high = rate_difference_interval(both, first, second, neither)
    p = mcnemar_test(first, second)
    if h.claim != "different":
        side = "less" if h.claim == "lower" else "greater"
        n = first + second
        p = float(stats.binomtest(first, n, alternative=side).pvalue) if n else 1.0
    return replace(
        nothing,
        n_pairs=len(pairs),
        mean=(first - second) / len(pairs),
        interval=Interval(low, high),
        p=p,
        refuted=(h.claim == "lower" and low > 0) or (h.claim == "higher" and high < 0),
    )
