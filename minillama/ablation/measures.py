"""What one run's curves, or one arm's learning rates, say about stability.

Pure functions of arrays; losses and widths as the README's protocol defines them.  numpy only, so
that the runner can fill its table without the ``report`` extra.
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
"""Nats above the best loss that still count as inside the basin."""
_CHUNK = 4096  # rows of a window's view that are reduced at once: bounds memory, not the result


@dataclass(frozen=True)
class Sensitivity:
    """LR sensitivity S in nats, in both means, and the loss ℓ* that it is measured from."""

    plain: float
    trapezoid: float
    best_loss: float


@dataclass(frozen=True)
class Basin:
    """Decades of learning rate whose loss is near the best; a side is open at the grid's edge."""

    width: float
    open_below: bool
    open_above: bool


def capped(losses: ArrayLike, init_loss: float) -> Floats:
    """Return min(ℓ, ℓ₀), a non-finite ℓ counting as ℓ₀ (the loss at init)."""
    values = np.asarray(losses, dtype=np.float64)
    return np.where(np.isfinite(values), np.minimum(values, init_loss), init_loss)


def lr_sensitivity(lrs: ArrayLike, losses: ArrayLike, init_loss: float) -> Sensitivity:
    """S = mean over the grid of min(ℓ(η), ℓ₀), less ℓ* (Wortsman et al. 2023, arXiv 2309.14322).

    ``plain`` averages the grid's points; ``trapezoid`` integrates over log η and divides by the
    grid's width, so that an uneven grid does not weigh where it is dense.  Both depend on the grid:
    compare only arms that share one.  With fewer than two learning rates S says nothing: NaN.
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
    """Width in log₁₀ η of the unbroken stretch around the best LR with loss ≤ ℓ* + 0.1.

    Between grid points the loss is taken as linear in log η; a stretch that reaches the grid's edge
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

    σ is the population's; without a full window nothing is marked, but for a non-finite value,
    which always is, and which stays out of the windows after it (OLMo-core's stability monitor).
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

    A run no longer than one window, all of it finite, could not have shown a spike: NaN.
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
    """Summarise the gradient norms of a run; a non-finite norm makes the maximum infinite."""
    norms = np.asarray(grad_norm, dtype=np.float64)
    if len(norms) == 0:
        return GradientFigures(math.nan, math.nan, math.nan)
    norms = np.where(np.isfinite(norms), norms, math.inf)
    p99 = float(np.quantile(norms, 0.99, method="inverted_cdf"))
    return GradientFigures(float(norms.max()), p99, float(np.mean(clipped)))
