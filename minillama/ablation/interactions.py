"""Whether a difference between arms depends on an axis: differences of differences.

An arm may be better at one value of an axis and not shown to be at another; that alone does not
show that the axis matters.  What does is the difference of the two differences, paired by seed
(Gelman and Stern 2006, The American Statistician 60:328).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from minillama.ablation.analysis import ArmResult, Interval
from minillama.ablation.statistics import holm, t_interval, t_test


@dataclass(frozen=True)
class Interaction:
    """(arm − baseline) at one value of an axis, minus the same at the axis's first value.

    Below zero the arm does better, against its baseline, at ``value`` than at ``reference``.  Each
    of the four arms counts at its own best learning rate.  ``elsewhere`` holds the values of the
    other axes; ``p_holm`` is adjusted for all interactions of the report.
    """

    arm: str
    baseline: str
    axis: str
    value: str
    reference: str
    elsewhere: str
    seeds: tuple[int, ...]
    mean: float
    t95: Interval
    p_t: float
    p_holm: float


def compare_over_axes(arms: Sequence[ArmResult]) -> list[Interaction]:
    """Return the interactions of each arm with each axis, where four arms share two seeds."""
    named = {arm.name: arm for arm in arms}
    out = []
    for arm in arms:
        for axis, value in arm.point.items():
            first = _at_first_value(arms, arm, axis)
            corners = (arm, named.get(arm.baseline), first, named.get(first.baseline))
            four = [each for each in corners if each is not None]
            shared = set.intersection(*(set(each.best_seeds) for each in four))
            if len({each.name for each in four}) < 4 or len(shared) < 2:
                continue
            seeds = tuple(sorted(shared))
            at = [np.array([each.losses[each.best_lr, seed] for seed in seeds]) for each in four]
            d = (at[0] - at[1]) - (at[2] - at[3])
            out.append(
                Interaction(
                    arm=arm.config_arm,
                    baseline=four[1].config_arm,
                    axis=axis,
                    value=value,
                    reference=first.point[axis],
                    elsewhere=", ".join(
                        f"{key}={at}" for key, at in arm.point.items() if key != axis
                    ),
                    seeds=seeds,
                    mean=float(d.mean()),
                    t95=Interval.of(t_interval(d)),
                    p_t=float(t_test(d)),
                    p_holm=math.nan,
                )
            )
    adjusted = holm([each.p_t for each in out])
    return [replace(each, p_holm=p) for each, p in zip(out, adjusted, strict=True)]


def _at_first_value(arms: Sequence[ArmResult], arm: ArmResult, axis: str) -> ArmResult:
    """Return the arm that differs from ``arm`` in ``axis`` alone, at the axis's first value."""
    wanted = {**arm.point, axis: ""}
    return next(
        each
        for each in arms
        if each.config_arm == arm.config_arm and {**each.point, axis: ""} == wanted
    )
