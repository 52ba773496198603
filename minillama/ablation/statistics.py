"""Inference on differences paired by seed.

Most functions take differences (arm − baseline, in nats per token; below zero the arm is better),
one for each seed, along the last axis; leading axes are independent data sets.  Needs the
``report`` extra.

With few seeds these show little: a t interval is wide, a bootstrap interval is too narrow, and the
sign-flip test cannot reach p < .05 below six pairs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]

ALPHA = 0.05
"""The level at which a difference or an equivalence counts as shown."""

MIN_PAIRS_FOR_SIGN_FLIP = 6
"""The fewest pairs with which a two-sided sign-flip test can give p < .05: 2 / 2⁶ = .031."""
_EXACT_PAIRS = 13  # 2^13 sign patterns are enumerated; beyond, as many are drawn
_RESAMPLES = 9999


def t_interval(differences: ArrayLike, level: float = 0.95) -> tuple[Floats, Floats]:
    """Return Student's interval (low, high) for the mean difference; NaN below two pairs."""
    d = np.asarray(differences, dtype=np.float64)
    n = d.shape[-1]
    if n < 2:
        nothing = np.full(d.shape[:-1], math.nan)
        return nothing, nothing
    with _ignore_degenerate():
        interval = stats.ttest_1samp(d, 0.0, axis=-1).confidence_interval(level)
    return _if_equal(d, d[..., 0], interval.low), _if_equal(d, d[..., 0], interval.high)


def t_test(differences: ArrayLike) -> Floats:
    """Return the two-sided p of the paired t test of no difference; NaN below two pairs."""
    d = np.asarray(differences, dtype=np.float64)
    return _t_test(d, 0.0, "two-sided")


def bca_interval(
    differences: ArrayLike, level: float = 0.95, *, resamples: int = _RESAMPLES, seed: int = 0
) -> tuple[Floats, Floats]:
    """Return the bias-corrected, accelerated bootstrap interval of the mean (Efron 1987).

    NaN below three pairs.  Differences that are all equal give an interval of no width.
    """
    d = np.asarray(differences, dtype=np.float64)
    if d.shape[-1] < 3:
        nothing = np.full(d.shape[:-1], math.nan)
        return nothing, nothing
    with _ignore_degenerate():
        interval = stats.bootstrap(
            (d,),
            np.mean,
            axis=-1,
            method="BCa",
            confidence_level=level,
            n_resamples=resamples,
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return _if_equal(d, d[..., 0], interval.low), _if_equal(d, d[..., 0], interval.high)


def sign_flip_test(differences: ArrayLike, *, seed: int = 0) -> Floats:
    """Return the two-sided p of the sign-flip test: under the null, each sign is random.

    Exact up to 13 pairs, by enumeration of all sign patterns; beyond, from a random sample of
    them.  It assumes only symmetry, and cannot go below 2/2ⁿ: see
    :data:`MIN_PAIRS_FOR_SIGN_FLIP`.  NaN without a pair.
    """
    d = np.asarray(differences, dtype=np.float64)
    if d.shape[-1] < 2:  # both patterns of one pair are equally extreme
        return np.full(d.shape[:-1], 1.0 if d.shape[-1] else math.nan)
    result: Any = stats.permutation_test(
        (d,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        axis=-1,
        n_resamples=2**_EXACT_PAIRS,
        rng=np.random.default_rng(seed),
    )
    return np.asarray(result.pvalue, dtype=np.float64)


def tost(differences: ArrayLike, margin: float) -> Floats:
    """Return the p of "the mean difference is not within ±margin" (two one-sided t tests).

    Below .05 the two are equivalent within the margin (Schuirmann 1987).  NaN below two pairs.
    """
    d = np.asarray(differences, dtype=np.float64)
    above = _t_test(d, -margin, "greater")
    below = _t_test(d, margin, "less")
    return np.maximum(above, below)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values for their number (Holm 1979); NaN stays NaN and does not count."""
    counted = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    out = [math.nan] * len(p_values)
    running = 0.0
    for rank, i in enumerate(sorted(counted, key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(counted) - rank) * p_values[i]))
        out[i] = running
    return out


def rate_difference_interval(
    both: int, first: int, second: int, neither: int, level: float = 0.95
) -> tuple[float, float]:
    """Return an interval for the difference of two rates of failure, paired by seed.

    Newcombe's square-and-add of Wilson intervals (1998, Statistics in Medicine 17:2635, method 10),
    which holds near 0 and 1 and with few pairs.

    Args:
        both, first, second, neither: the pairs in which both runs failed, the first alone, the
            second alone, or neither.
        level: of the interval.

    Returns:
        The ends of the interval of (rate of the first − rate of the second); NaN without a pair.
    """
    n = both + first + second + neither
    if not n:
        return math.nan, math.nan
    failed = (both + first, both + second)
    p, q = failed[0] / n, failed[1] / n
    ends = [stats.binomtest(k, n).proportion_ci(level, method="wilson") for k in failed]
    phi = 0.0
    spread = math.prod((failed[0], n - failed[0], failed[1], n - failed[1]))
    if spread:
        covariance: float = both * neither - first * second
        if covariance > 0:
            covariance = max(covariance - n / 2, 0.0)
        phi = covariance / math.sqrt(spread)

    def add(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    low = p - q - add(p - float(ends[0].low), float(ends[1].high) - q)
    high = p - q + add(float(ends[0].high) - p, q - float(ends[1].low))
    return low, high


def mcnemar_test(first: int, second: int) -> float:
    """Return the two-sided exact p of "both fail equally often" from the pairs that disagree.

    ``first`` and ``second`` are the pairs in which only that run failed (McNemar 1947).  It cannot
    go below 2/2ⁿ for n such pairs.
    """
    n = first + second
    return float(stats.binomtest(first, n).pvalue) if n else 1.0


def _t_test(d: Floats, mean: float, alternative: Literal["two-sided", "less", "greater"]) -> Floats:
    """Return the p of the one-sample t test; its limit where all differences are equal."""
    if d.shape[-1] < 2:
        return np.full(d.shape[:-1], math.nan)
    with _ignore_degenerate():
        p = stats.ttest_1samp(d, mean, axis=-1, alternative=alternative).pvalue
    sign = np.sign(d[..., 0] - mean)
    limits = {"two-sided": 1 - np.abs(sign), "greater": (1 - sign) / 2, "less": (1 + sign) / 2}
    return _if_equal(d, limits[alternative], p)


def _if_equal(d: Floats, value: ArrayLike, otherwise: ArrayLike) -> Floats:
    """Return ``value`` where all differences of a data set are equal, else ``otherwise``."""
    return np.asarray(np.where(np.ptp(d, axis=-1) == 0, value, otherwise), dtype=np.float64)


@contextmanager
def _ignore_degenerate() -> Iterator[None]:
    """Silence scipy's warnings about equal differences, which :func:`_if_equal` handles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
