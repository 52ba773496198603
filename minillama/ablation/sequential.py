"""Inference that may be looked at while the seeds grow: group-sequential boundaries.

A comparison is looked at after numbers of pairs that were fixed beforehand, and may stop after any
look, for any reason.  The error probability α is spent over the looks as Lan and DeMets (1983,
Biometrika 70:659) propose, like O'Brien and Fleming: little at first, nearly all of it at the last.
The boundary of each look is found for normal data of known variance (Armitage, McPherson and Rowe
1969), and its nominal p is then asked of the t test, since the variance is unknown (Jennison and
Turnbull 2000, "Group Sequential Methods", sections 4.4 and 9.1: the error is close to α down to a
few degrees of freedom; the tests here simulate it).

Differences are arm − baseline, paired by seed, in nats per token.  Needs the ``report`` extra.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from minillama.ablation.statistics import t_interval, t_test, tost

Floats = NDArray[np.float64]

_POINTS = 201
"""Points over which the density of the statistic that has not crossed is integrated."""
_NORMAL_QUANTILES = np.linspace(0.02, 8.0, 81)
"""Of the errors α = 2 − 2Φ(z) between which a repeated p value is interpolated."""


@lru_cache(maxsize=4096)
def nominal_levels(looks: tuple[int, ...], alpha: float = 0.05) -> tuple[float, ...]:
    """Return the two-sided p that a test must reach at each look for an error of ``alpha`` in all.

    Args:
        looks: rising numbers of pairs; the last is the most there can be.
        alpha: two-sided; up to a share t of the last look 4 − 4Φ(z / √t) is spent, Φ(z) = 1 − α/4.

    Raises:
        ValueError: the looks do not rise from two pairs or more.
    """
    if not looks or looks[0] < 2 or any(b <= a for a, b in pairwise(looks)):
        raise ValueError(f"looks must rise from 2 pairs or more, not {looks}")
    shares = np.array(looks) / looks[-1]
    spent = 4 * stats.norm.sf(stats.norm.isf(alpha / 4) / np.sqrt(shares))
    steps = np.diff(spent, prepend=0.0)
    # The sum of the first differences, in units of its standard deviation at the last look; after
    # each look only what lies within the boundary goes on.
    bound = float(stats.norm.isf(steps[0] / 2))
    levels = [float(steps[0])]
    half = bound * math.sqrt(shares[0])
    x = np.linspace(-half, half, _POINTS)
    density = stats.norm.pdf(x, scale=math.sqrt(shares[0]))
    for before, share, step in zip(shares, shares[1:], steps[1:], strict=False):
        spread, weight = math.sqrt(share - before), density * _simpson(x)
        half = float(
            optimize.brentq(_excess_error, 0.0, 40.0, (x, weight, spread, step), xtol=1e-10)
        )
        levels.append(float(2 * stats.norm.sf(half / math.sqrt(share))))
        after = np.linspace(-half, half, _POINTS)
        density = stats.norm.pdf((after[:, None] - x) / spread) @ weight / spread
        x = after
    return tuple(levels)


def _excess_error(limit: float, x: Floats, weight: Floats, spread: float, wanted: float) -> float:
    """Return the probability to cross ±``limit`` at the next look, minus the one wanted."""
    beyond = stats.norm.sf((limit - x) / spread) + stats.norm.cdf((-limit - x) / spread)
    return float(np.sum(weight * beyond)) - wanted


def repeated_interval(
    differences: ArrayLike, looks: Sequence[int], look: int, level: float = 0.95
) -> tuple[Floats, Floats]:
    """Return the repeated confidence interval of the mean after look number ``look``, from 0.

    Whatever the rule by which the looks end, the intervals of all looks cover the true mean
    together with probability ``level`` (Jennison and Turnbull 1989, J. R. Stat. Soc. B 51:305).
    With one look or none it is Student's interval.

    Args:
        differences: of the pairs so far, along the last axis; ``looks[look]`` of them.
        looks: as in :func:`nominal_levels`.
        look: which of them this is.
        level: of all intervals together.
    """
    if len(looks) < 2:
        return t_interval(differences, level)
    alpha = nominal_levels(tuple(looks), 1 - level)[look]
    return t_interval(differences, 1 - alpha)


def repeated_p(differences: ArrayLike, looks: Sequence[int], look: int, mean: float = 0.0) -> float:
    """Return the repeated two-sided p of "the mean is ``mean``" after look number ``look``.

    It is the smallest α with which a boundary was crossed at this look or before: below α with
    probability α at most, whatever the rule by which the looks end.  With one look or none it is
    that of the t test.  NaN below two pairs.

    Args:
        differences: of one comparison, in the order in which its pairs were added.
        looks, look: as for :func:`repeated_interval`.
        mean: the mean to be refuted.
    """
    d = np.asarray(differences, dtype=np.float64)
    if len(d) < 2:
        return math.nan
    if len(looks) < 2:
        return float(t_test(d - mean))
    found = 1.0
    for k in range(look + 1):
        so_far = d if k == look else d[: looks[k]]
        if len(so_far) > 1:
            found = min(found, _overall_p(float(t_test(so_far - mean)), tuple(looks), k))
    return found


def repeated_tost(differences: ArrayLike, looks: Sequence[int], look: int, margin: float) -> float:
    """Return the repeated p of "the mean is not within ±margin": two one-sided tests.

    With one look or none it is that of TOST.  NaN below two pairs.
    """
    d = np.asarray(differences, dtype=np.float64)
    if len(looks) < 2 or len(d) < 2:
        return float(tost(d, margin))
    return max(repeated_less(side, looks, look, margin) for side in (d, -d))


def repeated_less(
    differences: ArrayLike, looks: Sequence[int], look: int, bound: float = 0.0
) -> float:
    """Return the repeated one-sided p of "the mean is not below ``bound``".

    Half the two-sided :func:`repeated_p` where the sample lies below the bound; with one look or
    none that of the one-sided t test.  NaN below two pairs.
    """
    d = np.asarray(differences, dtype=np.float64) - bound
    if len(d) < 2:
        return math.nan
    found = 1.0
    for k in range(look + 1):
        so_far = d if k >= look else d[: looks[k]]
        if len(so_far) > 1:
            two_sided = float(t_test(so_far))
            if len(looks) > 1:
                two_sided = _overall_p(two_sided, tuple(looks), k)
            found = min(found, two_sided / 2 if so_far.mean() < 0 else 1 - two_sided / 2)
    return found


def _overall_p(p: float, looks: tuple[int, ...], look: int) -> float:
    """Return the error α of all looks with which the boundary of this look is ``p``."""
    z = stats.norm.isf(p / 2)
    return float(2 * stats.norm.sf(np.interp(z, _boundaries(looks)[:, look], _NORMAL_QUANTILES)))


@lru_cache(maxsize=64)
def _boundaries(looks: tuple[int, ...]) -> Floats:
    """Return the boundary z of each look for each of the errors at ``_NORMAL_QUANTILES``."""
    alphas = 2 * stats.norm.sf(_NORMAL_QUANTILES)
    levels = np.array([nominal_levels(looks, float(alpha)) for alpha in alphas])
    return np.asarray(stats.norm.isf(levels / 2), dtype=np.float64)


def _simpson(x: Floats) -> Floats:
    """Return the weights of Simpson's rule at equally spaced points, an odd number of them."""
    weight = np.full(len(x), 2.0)
    weight[1::2] = 4.0
    weight[[0, -1]] = 1.0
    weight *= (x[1] - x[0]) / 3
    return weight
