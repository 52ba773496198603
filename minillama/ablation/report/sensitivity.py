"""What LR sensitivity S rests on: its highest rate, its seeds, and the arms it can rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillama.ablation.analysis import ArmResult, Interval
from minillama.ablation.measures import lr_sensitivity
from minillama.ablation.statistics import t_interval

RANK_DEPTH = 0.1
"""Nats per token: an arm whose best loss is further above the best one's is not ranked by S."""


@dataclass(frozen=True)
class SensitivityRow:
    """S of one arm, in nats per token, as means over the grid's seeds that have all its rates.

    ``trimmed`` is the plain S without the grid's highest rate; ``trimmed_difference`` that minus
    the baseline's, with ``trimmed_t95`` its 95% t interval over ``n_pairs`` shared seeds.
    ``behind`` is the arm's best loss in the grid minus the lowest one among the arms with its
    baseline, and ``left_out`` are the seeds that lack a rate.
    """

    arm: str
    plain: float
    trapezoid: float
    trimmed: float
    trimmed_difference: float
    trimmed_t95: Interval
    n_pairs: int
    behind: float
    left_out: tuple[int, ...]

    @property
    def is_ranked(self) -> bool:
        """Whether S says anything about it: one that trains nowhere has a low S as well."""
        return self.behind <= RANK_DEPTH


def sensitivity_rows(arms: Sequence[ArmResult]) -> list[SensitivityRow]:
    """Return a row for each arm with an S, in the order of the config."""
    trimmed = {arm.name: _trimmed(arm) for arm in arms}
    out = []
    for arm in arms:
        if not arm.sensitivity:
            continue
        rivals = [other.grid_loss for other in arms if other.baseline == arm.baseline]
        own, base = trimmed[arm.name], trimmed.get(arm.baseline, {})
        shared = [s for s in own if s in base] if arm.name != arm.baseline else []
        d = np.array([own[s] - base[s] for s in shared])
        plain, trapezoid = arm.mean_sensitivity()
        out.append(
            SensitivityRow(
                arm=arm.name,
                plain=plain,
                trapezoid=trapezoid,
                trimmed=float(np.mean(list(own.values()))) if own else math.nan,
                trimmed_difference=float(d.mean()) if shared else math.nan,
                trimmed_t95=Interval.of(t_interval(d)),
                n_pairs=len(shared),
                behind=arm.grid_loss - min(loss for loss in rivals if math.isfinite(loss)),
                left_out=tuple(sorted({run.seed for run in arm.grid_runs} - set(arm.sensitivity))),
            )
        )
    return out


def _trimmed(arm: ArmResult) -> dict[int, float]:
    """Return each full seed's plain S without the highest rate; nothing below two other rates."""
    lrs = sorted({lr for lr, _ in arm.losses})[:-1]
    if len(lrs) < 2:
        return {}
    return {
        seed: lr_sensitivity(lrs, [arm.losses[lr, seed] for lr in lrs], math.inf).plain
        for seed in arm.sensitivity
    }
