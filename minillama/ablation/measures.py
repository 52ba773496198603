"""Measures of stability, from the curves of one run or the learning rates of one arm.

Pure functions of arrays that need only numpy, so the runner works without the ``report`` extra.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from minillama.training.stability import SPIKE_SIGMAS, SPIKE_WINDOW

Floats = NDArray[np.float64]

BASIN_DEPTH = 0.1
"""Nats per token above the best loss that still count as inside the basin."""
_CHUNK = 4096  # windows that are reduced at once, to limit memory


@dataclass(frozen=True)
class Sensitivity:
    """LR sensitivity S in nats per token, as both means, and the loss ℓ* that it starts from."""

    plain: float
    trapezoid: float
    best_loss: float


@dataclass(frozen=True)
class Basin:
    """Width in decades of the learning rates with a loss near the best.

    A side is open if the basin reaches that edge of the grid.
    """

    width: float
    open_below: bool
    open_above: bool

    @property
    def is_open(self) -> bool:
        """Whether the width is only a lower bound."""
        return self.open_below or self.open_above


def capped(losses: ArrayLike, init_loss: float) -> Floats:
    """Return min(ℓ, ℓ₀), a non-finite ℓ counting as ℓ₀ (the loss at init)."""
    values = np.asarray(losses, dtype=np.float64)
    return np.where(np.isfinite(values), np.minimum(values, init_loss), init_loss)


def lr_sensitivity(lrs: ArrayLike, losses: ArrayLike, init_loss: float) -> Sensitivity:
    """S = mean over the grid of min(ℓ(η), ℓ₀), minus ℓ* (Wortsman et al. 2023, arXiv 2309.14322).

    ``plain`` averages the grid points; ``trapezoid`` integrates over log η and divides by the
    width of the grid, so that points close together do not count more.  Both depend on the grid:
    compare only arms that share one.  NaN with fewer than two learning rates.
    """
    log_lr = np.log10(np.asarray(lrs, dtype=np.float64))
    order = np.argsort(log_lr)
    log_lr, values = log_lr[order], capped(losses, init_loss)[order]
    best = float(values.min())
    if len(values) < 2:
        return Sensitivity(math.nan, math.nan, best)
    area = float(np.trapezoid(values, log_lr))
    mean = area / float(log_lr[-1] - log_lr[0])
    return Sensitivity(float(values.mean()) - best, mean - best, best)


def lr_basin(lrs: ArrayLike, losses: ArrayLike, init_loss: float) -> Basin:
    """Width in log₁₀ η of the interval around the best LR with loss ≤ ℓ* + ``BASIN_DEPTH``.

    The loss is linear in log η between grid points; an interval that reaches the edge of the grid
    is open there, and its width a lower bound.
    """
    log_lr = np.log10(np.asarray(lrs, dtype=np.float64))
    order = np.argsort(log_lr)
    log_lr, values = log_lr[order], capped(losses, init_loss)[order]
    best = int(np.argmin(values))
    level = float(values[best]) + BASIN_DEPTH

    def walk(step: int) -> tuple[float, bool]:
        here = best
        while 0 <= here + step < len(values):
            after = here + step
            if values[after] > level:
                share = (level - values[here]) / (values[after] - values[here])
                return float(log_lr[here] + share * (log_lr[after] - log_lr[here])), False
            here = after
        return float(log_lr[here]), True

    low, open_below = walk(-1)
    high, open_above = walk(+1)
    return Basin(high - low, open_below, open_above)


def spikes(
    values: ArrayLike, *, sigmas: float = SPIKE_SIGMAS, window: int = SPIKE_WINDOW
) -> NDArray[np.bool_]:
    """Mark the values above mean + kσ of the ``window`` finite values before them.

    σ is the population's.  Without a full window only non-finite values are marked; these always
    are, and are excluded from the windows after them (OLMo-core's stability monitor).
    """
    x = np.asarray(values, dtype=np.float64)
    marked = ~np.isfinite(x)
    finite = x[~marked]
    if len(finite) > window:
        above = np.zeros(len(finite), dtype=np.bool_)
        before = np.lib.stride_tricks.sliding_window_view(finite[:-1], window)
        for start in range(0, len(before), _CHUNK):
            rows = before[start : start + _CHUNK]
            limit = rows.mean(axis=1) + sigmas * rows.std(axis=1)
            at = slice(window + start, window + start + len(rows))
            above[at] = finite[at] > limit
        marked[~marked] = above
    return marked


def spike_score(
    loss: ArrayLike,
    grad_norm: ArrayLike,
    *,
    sigmas: float = SPIKE_SIGMAS,
    window: int = SPIKE_WINDOW,
) -> float:
    """Return the share of steps where the loss or the gradient norm spikes; see :func:`spikes`.

    NaN for a run no longer than one window with finite values, which cannot show a spike.
    """
    marked = spikes(loss, sigmas=sigmas, window=window)
    marked = marked | spikes(grad_norm, sigmas=sigmas, window=window)
    if len(marked) == 0 or (len(marked) <= window and not marked.any()):
        return math.nan
    return float(marked.mean())


@dataclass(frozen=True)
class GradientFigures:
    """Gradient norms before clipping over a run, and the share of steps that were clipped."""

    max: float
    p99: float
    clipped_share: float


def gradient_figures(grad_norm: ArrayLike, clipped: Sequence[bool]) -> GradientFigures:
    """Return figures of a run's gradient norms; a non-finite norm makes the maximum infinite."""
    norms = np.asarray(grad_norm, dtype=np.float64)
    if len(norms) == 0:
        return GradientFigures(math.nan, math.nan, math.nan)
    norms = np.where(np.isfinite(norms), norms, math.inf)
    p99 = float(np.quantile(norms, 0.99, method="inverted_cdf"))
    return GradientFigures(float(norms.max()), p99, float(np.mean(clipped)))
