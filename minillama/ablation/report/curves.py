"""Curves made ready for drawing: thinned, smoothed, and the range of loss to show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillama.ablation.measures import Floats
from minillama.ablation.results import Curves
from minillama.ablation.statistics import t_interval

SMOOTHED_SHARE = 50
"""A smoothed curve averages the last 1/50 of the run at each step."""


def thin(x: Floats, y: Floats, points: int) -> tuple[Floats, Floats]:
    """Keep about ``points`` of a curve: the minimum and the maximum of each stretch, and the ends.

    So no spike is lost.
    """
    if len(x) <= max(points, 4):
        return x, y
    edges = np.linspace(0, len(x), max(points // 2, 1) + 1).astype(int)
    keep = {0, len(x) - 1}
    for start, stop in itertools.pairwise(edges.tolist()):
        part = y[start:stop]
        if np.isfinite(part).any():
            keep |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    at = np.array(sorted(keep))
    return x[at], y[at]


def subsample(x: Floats, y: Floats, points: int) -> tuple[Floats, Floats]:
    """Keep about ``points`` of a smooth curve, evenly spaced, including both ends."""
    if len(x) <= points:
        return x, y
    at = np.unique(np.linspace(0, len(x) - 1, points).round().astype(int))
    return x[at], y[at]


def running_mean(y: Floats, window: int) -> Floats:
    """Return the mean of the last ``window`` values at each place (fewer at the start)."""
    total = np.cumsum(np.concatenate([[0.0], np.nan_to_num(y)]))
    seen = np.cumsum(np.concatenate([[0], np.isfinite(y)]))
    start = np.maximum(np.arange(1, len(y) + 1) - window, 0)
    n = seen[1:] - seen[start]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Floats = (total[1:] - total[start]) / n
    return np.where(np.isfinite(y), mean, np.nan)


def smoothed(loss: Floats) -> Floats:
    """Return the running mean that the report draws."""
    return running_mean(loss, max(1, len(loss) // SMOOTHED_SHARE))


@dataclass(frozen=True)
class Band:
    """The mean of several curves at each step, and the 95% t interval of it."""

    steps: Floats
    mean: Floats
    low: Floats
    high: Floats


def band(curves: Sequence[Curves], baselines: Sequence[Curves] = (), points: int = 400) -> Band:
    """Return the mean of smoothed training losses over seeds, at steps that all curves have.

    With ``baselines``, one for each curve, that of their differences; a step is left out where one
    is not finite.
    """
    steps = _common([curve.steps for curve in (*curves, *baselines)])
    values = np.array([_at(steps, curve) for curve in curves])
    if baselines:
        values = values - np.array([_at(steps, curve) for curve in baselines])
    at = np.flatnonzero(np.isfinite(values).all(axis=0))
    if len(at) > points:
        at = at[np.unique(np.linspace(0, len(at) - 1, points).round().astype(int))]
    values = values[:, at]
    low, high = t_interval(values.T)
    return Band(steps[at], values.mean(axis=0), low, high)


def _common(steps: Sequence[Floats]) -> Floats:
    shared = steps[0]
    for other in steps[1:]:
        shared = np.intersect1d(shared, other)
    return shared


def _at(steps: Floats, curve: Curves) -> Floats:
    return smoothed(curve.loss)[np.isin(curve.steps, steps)]


def loss_range(curves: Sequence[Curves]) -> tuple[float, float]:
    """Return the range of loss to show: that of each curve without its first tenth.

    The fall from the loss at init looks alike for all and would flatten what differs.
    """
    parts = [np.zeros(0)]
    for curve in curves:
        parts += [smoothed(curve.loss)[len(curve.loss) // 10 :], curve.val_loss[1:]]
    values = np.concatenate(parts)
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    pad = 0.06 * (high - low) or 0.1
    return low - pad, high + pad
