"""How many seeds a comparison needs: the power of the paired t test and of TOST.

Differences are paired by seed, independent and normal with mean δ (``difference``) and standard
deviation σ (``sd``), in nats per token.  Needs the ``report`` extra.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from minillama.ablation.statistics import ALPHA

Floats = NDArray[np.float64]

MAX_SEEDS = 10_000
"""Beyond this many seeds :func:`seeds_needed` gives up."""
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(200)


def difference_power(n: int, sd: float, difference: float, alpha: float = ALPHA) -> float:
    """Return the probability that the two-sided paired t test of ``n`` pairs finds ``difference``.

    NaN below two pairs.
    """
    if n < 2:
        return math.nan
    if sd == 0:
        return float(difference != 0)
    critical = float(stats.t.ppf(1 - alpha / 2, n - 1))
    return 1 - _probability_within(lambda s: critical * s, n, difference * math.sqrt(n) / sd)


def equivalence_power(
    n: int, sd: float, margin: float, difference: float = 0.0, alpha: float = ALPHA
) -> float:
    """Return the probability that TOST of ``n`` pairs shows the two equal within ±``margin``.

    NaN below two pairs.
    """
    if n < 2:
        return math.nan
    if sd == 0:
        return float(abs(difference) < margin)
    critical, root = float(stats.t.ppf(1 - alpha, n - 1)), math.sqrt(n) / sd
    return _probability_within(
        lambda s: margin * root - critical * s,
        n,
        difference * root,
        highest=margin * root / critical,
    )


def _probability_within(
    half_width: Callable[[Floats], Floats], n: int, centre: float, highest: float = math.inf
) -> float:
    """Return P(|z| < half_width(s)), z normal around ``centre`` with standard deviation 1.

    s is the sample's standard deviation over σ, with n − 1 degrees of freedom, and independent of
    the sample's mean, so one integral over s is exact (Phillips 1990, J. Pharmacokinet. Biopharm.
    18:137).  ``half_width`` is at least zero up to s = ``highest``, and z is never inside beyond.
    """
    root = math.sqrt(n - 1)
    low, high = stats.chi.ppf([1e-12, 1 - 1e-12], n - 1) / root  # the tails are left out
    high = min(high, highest)
    if low >= high:
        return 0.0
    s = low + (high - low) * (_NODES + 1) / 2
    density = stats.chi.pdf(s * root, n - 1) * root
    half = half_width(s)
    inside = stats.norm.cdf(half - centre) - stats.norm.cdf(-half - centre)
    return float(np.sum(_WEIGHTS * density * inside) * (high - low) / 2)


def seeds_needed(power_of: Callable[[int], float], power: float) -> int | None:
    """Return the fewest pairs, at least two, with which ``power_of(pairs)`` reaches ``power``.

    ``power_of`` must not fall as the pairs grow, once it is near ``power``.  None:
    :data:`MAX_SEEDS` are not enough, as for an equivalence test whose true difference is the
    margin.
    """
    high = 2
    while power_of(high) < power:
        high *= 2
        if high > MAX_SEEDS:
            return None
    low = max(2, high // 2)
    while low < high:
        middle = (low + high) // 2
        if power_of(middle) < power:
            low = middle + 1
        else:
            high = middle
    return high


def sd_interval(sd: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return the χ² interval of the standard deviation that ``n`` pairs estimate as ``sd``.

    The number of seeds needed grows with its square, so a pilot of few pairs leaves it vague.  NaN
    below two pairs.
    """
    if n < 2:
        return math.nan, math.nan
    high, low = stats.chi2.ppf([(1 - level) / 2, (1 + level) / 2], n - 1)
    return sd * math.sqrt((n - 1) / low), sd * math.sqrt((n - 1) / high)
