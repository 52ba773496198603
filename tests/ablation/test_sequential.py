"""Against published boundaries and simulated peeking: errors within four standard errors."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from minillama.ablation.sequential import (
    nominal_levels,
    repeated_interval,
    repeated_p,
    repeated_tost,
)
from minillama.ablation.statistics import t_interval, t_test, tost

LOOKS = (6, 12, 24, 36)
TRIALS = 20_000
EXCESS = 0.003
"""What the t approximation may add to an error of .05; simulated with 400,000 trials: .0005."""


def looked_at(mean: float, trials: int = TRIALS, sd: float = 0.024) -> np.ndarray:
    return np.random.default_rng(7).normal(mean, sd, (trials, LOOKS[-1]))


def allowed(level: float) -> float:
    return EXCESS + 4 * math.sqrt(level * (1 - level) / TRIALS)


def test_boundaries_equal_the_published_ones() -> None:
    # Jennison & Turnbull 2000 and gsDesign: O'Brien-Fleming-like spending, five equal looks, .05
    z = [stats.norm.isf(p / 2) for p in nominal_levels((10, 20, 30, 40, 50))]
    assert z == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=2e-4)


def test_a_single_look_is_the_ordinary_test() -> None:
    d = looked_at(0.01)[0, :9]
    assert nominal_levels((9,)) == pytest.approx((0.05,))
    assert np.array(repeated_interval(d, (9,), 0)) == pytest.approx(np.array(t_interval(d)))
    assert repeated_p(d, (9,), 0) == pytest.approx(float(t_test(d)))
    assert repeated_tost(d, (9,), 0, 0.02) == pytest.approx(float(tost(d, 0.02)))


def test_peeking_with_boundaries_keeps_the_error_and_without_does_not() -> None:
    d = looked_at(0.0)
    crossed, naive = np.zeros(TRIALS, bool), np.zeros(TRIALS, bool)
    for n, level in zip(LOOKS, nominal_levels(LOOKS), strict=True):
        p = t_test(d[:, :n])
        crossed |= p < level
        naive |= p < 0.05
    assert abs(float(crossed.mean()) - 0.05) < allowed(0.05)
    assert naive.mean() > 0.09


def test_intervals_of_all_looks_together_cover_the_truth() -> None:
    d = looked_at(0.01)
    covered = np.ones(TRIALS, bool)
    for look, n in enumerate(LOOKS):
        low, high = repeated_interval(d[:, :n], LOOKS, look)
        covered &= (low < 0.01) & (high > 0.01)
    assert abs(float(covered.mean()) - 0.95) < allowed(0.05)


def test_equivalence_at_the_margin_is_claimed_no_more_often_than_the_level() -> None:
    # the one-sided boundary of .05 is the two-sided one of .10
    d, claimed = looked_at(0.02), np.zeros(TRIALS, bool)
    for n, level in zip(LOOKS, nominal_levels(LOOKS, 0.10), strict=True):
        claimed |= tost(d[:, :n], 0.02) < level / 2
    assert 0.03 < claimed.mean() < 0.05 + allowed(0.05)


def test_the_repeated_p_is_below_alpha_just_when_a_boundary_was_crossed() -> None:
    for d in looked_at(0.008, 60):
        for look in range(len(LOOKS)):
            p = [float(t_test(d[:n])) for n in LOOKS[: look + 1]]
            for alpha in (0.05, 0.2):
                levels = nominal_levels(LOOKS, alpha)
                crossed = any(a < b for a, b in zip(p, levels, strict=False))
                found = repeated_p(d[: LOOKS[look]], LOOKS, look)
                assert abs(found - alpha) < 1e-3 * alpha or (found < alpha) == crossed


def test_repeated_equivalence_agrees_with_its_intervals() -> None:
    # TOST at .05 and a 90 % interval inside the margin are the same decision, also with looks
    decided = 0
    for d in looked_at(0.0, 40):
        inside = False
        for look, n in enumerate(LOOKS):
            low, high = map(float, repeated_interval(d[:n], LOOKS, look, 0.90))
            inside |= low > -0.02 and high < 0.02
        p = repeated_tost(d, LOOKS, len(LOOKS) - 1, 0.02)
        assert not inside or p < 0.05 + 1e-4  # the sides may pass at different looks
        decided += inside
    assert decided > 30


@settings(max_examples=30, deadline=None)
@given(
    looks=st.lists(st.integers(2, 60), min_size=2, max_size=6, unique=True).map(sorted),
    alpha=st.floats(0.001, 0.3),
)
def test_the_levels_spend_alpha_and_no_more(looks: list[int], alpha: float) -> None:
    levels = nominal_levels(tuple(looks), alpha)
    assert all(0 <= level <= alpha * (1 + 1e-5) for level in levels)
    assert sum(levels) >= alpha * (1 - 1e-5)  # Bonferroni: the union is no more than the sum


@pytest.mark.parametrize("looks", [(), (1, 5), (5, 5), (9, 4)])
def test_looks_that_do_not_rise_are_refused(looks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="looks must rise"):
        nominal_levels(looks)


def test_too_few_pairs_say_nothing() -> None:
    assert math.isnan(repeated_p([0.1], LOOKS, 0))
    assert math.isnan(repeated_tost([0.1], LOOKS, 0, 0.02))
