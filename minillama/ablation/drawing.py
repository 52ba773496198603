"""What the interactive figures and the printed one share: colours, marks, thinning, smoothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillama.ablation.measures import Floats
from minillama.ablation.results import Curves

# Okabe and Ito's colours, told apart with every common kind of colour blindness; the second set has
# the same hues, lightened for a dark page.  Yellow is darkened: on white nobody can see it.
_LIGHT = ("#0072B2", "#D55E00", "#009E73", "#B4558D", "#B97F00", "#3A9BD9", "#333333", "#7F7400")
_DARK = ("#5AAEE8", "#FF8F55", "#33C79E", "#E59CC8", "#F0B640", "#A9D9F8", "#E4E4E4", "#DDD06A")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "star", "hexagon")


@dataclass(frozen=True)
class ArmStyle:
    """How an arm looks; no two of the first 40 share both colour and dash.

    ``width`` of its line and ``size`` of its marks shrink from arm to arm, so that where curves
    coincide the earlier one still shows beneath the later.
    """

    light: str
    dark: str
    dash: str
    symbol: str
    width: float
    size: float


def arm_styles(arms: Sequence[str]) -> dict[str, ArmStyle]:
    """Return each arm's style by its place in the config."""
    return {
        arm: ArmStyle(
            _LIGHT[i % len(_LIGHT)],
            _DARK[i % len(_DARK)],
            _DASHES[i % len(_DASHES)],
            _SYMBOLS[i % len(_SYMBOLS)],
            width=max(3.2 - 1.2 * i, 1.6),
            size=max(10.0 - 2.5 * i, 7.0),
        )
        for i, arm in enumerate(arms)
    }


def thin(x: Floats, y: Floats, points: int) -> tuple[Floats, Floats]:
    """Keep about ``points`` of a curve: the lowest and the highest of each stretch of it.

    Both ends stay, so the drawn curve spans the whole and no spike is lost.
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


def every(x: Floats, y: Floats, points: int) -> tuple[Floats, Floats]:
    """Keep about ``points`` of a smooth curve, evenly spread, both ends among them."""
    if len(x) <= points:
        return x, y
    at = np.unique(np.linspace(0, len(x) - 1, points).round().astype(int))
    return x[at], y[at]


def smoothing_window(steps: int) -> int:
    """Return how many steps a smoothed curve averages: a fiftieth of the run, one at least."""
    return max(1, steps // 50)


def running_mean(y: Floats, window: int) -> Floats:
    """Return the mean of the last ``window`` values at each place (fewer at the start)."""
    total = np.cumsum(np.concatenate([[0.0], np.nan_to_num(y)]))
    seen = np.cumsum(np.concatenate([[0], np.isfinite(y)]))
    start = np.maximum(np.arange(1, len(y) + 1) - window, 0)
    number = seen[1:] - seen[start]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Floats = (total[1:] - total[start]) / number
    return np.where(np.isfinite(y), mean, np.nan)


def loss_range(curves: Sequence[Curves]) -> tuple[float, float]:
    """Return the range of loss worth looking at: each curve from a tenth of its way on.

    The fall from the loss at init looks alike everywhere and would squeeze what differs.
    """
    parts = [np.zeros(0)]
    for curve in curves:
        smooth = running_mean(curve.loss, smoothing_window(len(curve.loss)))
        parts += [smooth[len(smooth) // 10 :], curve.val_loss[1:]]
    values = np.concatenate(parts)
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    pad = 0.06 * (high - low) or 0.1
    return low - pad, high + pad
