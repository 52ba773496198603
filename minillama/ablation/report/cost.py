"""Time per step of each arm beside its baseline's, from the cells of the grid itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillama.ablation.analysis import ArmResult, Interval
from minillama.ablation.results import Run
from minillama.ablation.statistics import t_interval


@dataclass(frozen=True)
class Cost:
    """An arm's seconds per training step, and their ratio to its baseline's.

    ``seconds`` is the median over the arm's runs.  ``ratio`` is the geometric mean over ``n_pairs``
    pairs of runs with equal learning rate, seed and threads, and ``t95`` its 95% interval, from a t
    interval of the logarithms; NaN for the baseline.
    """

    arm: str
    seconds: float
    ratio: float
    t95: Interval
    n_pairs: int


def costs(arms: Sequence[ArmResult]) -> dict[str, Cost]:
    """Return the cost of each arm with a timed run."""
    times = {arm.name: _times(arm.runs) for arm in arms}
    out = {}
    for arm in arms:
        own = times[arm.name]
        base = times.get(arm.baseline, {}) if arm.baseline != arm.name else {}
        logs = np.log([own[key] / base[key] for key in own if key in base])
        low, high = t_interval(logs)
        if own:
            out[arm.name] = Cost(
                arm=arm.name,
                seconds=float(np.median(list(own.values()))),
                ratio=float(np.exp(logs.mean())) if len(logs) else math.nan,
                t95=Interval(float(np.exp(low)), float(np.exp(high))),
                n_pairs=len(logs),
            )
    return out


def _times(runs: Sequence[Run]) -> dict[tuple[float, int, float], float]:
    """Return the seconds per step of each ended run, by learning rate, seed and threads."""
    return {
        (run.lr, run.seed, run.figure("threads")): seconds / steps
        for run in runs
        if run.ended
        and (seconds := run.figure("training_seconds")) > 0
        and (steps := run.figure("steps")) > 0
    }
