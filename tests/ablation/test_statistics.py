"""Against simulated data of known truth: rates within four standard errors of their nominals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from minillama.ablation.statistics import (
    MIN_PAIRS_FOR_SIGN_FLIP,
    bca_interval,
    holm,
    mcnemar_test,
    rate_difference_interval,
    sign_flip_test,
    t_interval,
    t_test,
    tost,
)

MARGIN = 0.02


def normal(mean: float, n: int, trials: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, 0.02, (trials, n))


def within_error(rate: float, nominal: float, trials: int) -> bool:
    return abs(rate - nominal) < 4 * math.sqrt(nominal * (1 - nominal) / trials)


@pytest.mark.parametrize("n", [2, 3, 5, 12])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_t_intervals_cover_the_truth_at_their_level(n: int, level: float) -> None:
    trials = 10_000
    low, high = t_interval(normal(0.01, n, trials), level)
    assert within_error(float(np.mean((low < 0.01) & (high > 0.01))), level, trials)


def test_t_test_holds_its_level_and_equals_scipy() -> None:
    d = normal(0.0, 5, 10_000)
    p = t_test(d)
    assert within_error(float(np.mean(p < 0.05)), 0.05, len(d))
    np.testing.assert_allclose(p, stats.ttest_1samp(d, 0.0, axis=-1).pvalue, rtol=1e-9)


def test_bca_intervals_cover_the_truth_about_at_their_level() -> None:
    trials, n = 600, 30
    skewed = np.random.default_rng(1).exponential(0.02, (trials, n))
    low, high = bca_interval(skewed, resamples=999)
    coverage = float(np.mean((low < 0.02) & (high > 0.02)))
    # a bootstrap of 30 covers a little less than it says; 0.90 is within known behaviour
    assert 0.90 < coverage < 0.975
    plain = skewed.mean(-1) + np.outer([-1, 1], 1.96 * skewed.std(-1) / math.sqrt(n))
    misses = np.mean(plain[1] < 0.02)
    assert np.mean(high < 0.02) < misses  # BCa leans the way the skew does; a plain one does not


def test_bca_equals_its_formula() -> None:
    d = np.random.default_rng(3).exponential(0.02, 15)
    means = d[np.random.default_rng(4).integers(0, 15, (100_000, 15))].mean(-1)
    left_out = np.array([np.delete(d, i).mean() for i in range(15)])
    away = left_out.mean() - left_out
    a = (away**3).sum() / (6 * (away**2).sum() ** 1.5)
    z0 = stats.norm.ppf(np.mean(means < d.mean()))
    shares = [
        stats.norm.cdf(z0 + (z0 + z) / (1 - a * (z0 + z))) for z in stats.norm.ppf([0.025, 0.975])
    ]
    low, high = bca_interval(d, resamples=99_999)
    assert (low, high) == pytest.approx(tuple(np.quantile(means, shares)), abs=2e-4)
    assert not math.isclose(high, np.quantile(means, 0.975), abs_tol=5e-4)  # a plain one is not it


def test_bca_of_few_seeds_is_too_narrow() -> None:
    d = normal(0.0, 4, 400)
    low, high = bca_interval(d, resamples=499)
    assert np.mean((low < 0) & (high > 0)) < 0.9


def test_bca_of_one_set_equals_that_of_a_batch_of_one() -> None:
    d = normal(0.0, 6, 1)
    low, high = bca_interval(d[0])
    assert low < d.mean() < high
    assert float(low) == pytest.approx(float(bca_interval(d)[0][0]))


def test_sign_flip_is_exact_and_holds_its_level() -> None:
    d = normal(0.0, 7, 3_000)
    p = sign_flip_test(d)
    signs = np.array(np.meshgrid(*[[1, -1]] * 7)).reshape(7, -1).T
    by_hand = np.mean(np.abs(d[0] @ signs.T) >= abs(d[0].sum()) - 1e-12)
    assert p[0] == pytest.approx(by_hand)
    steps = 1 / 2**6  # two-sided p values come in these steps, so the level is 3/64
    assert within_error(float(np.mean(p < 0.05)), 3 * steps, len(d))


def test_sign_flip_cannot_reach_p_05_below_six_pairs() -> None:
    for n in range(1, 9):
        p = float(sign_flip_test(np.full(n, 5.0) + np.arange(n)))
        assert p == pytest.approx(min(1.0, 2 / 2**n))
        assert (p < 0.05) == (n >= MIN_PAIRS_FOR_SIGN_FLIP)


def test_sign_flip_of_many_pairs_samples_the_patterns() -> None:
    d = normal(0.008, 25, 1)[0]
    assert float(sign_flip_test(d)) == pytest.approx(float(t_test(d)), abs=0.02)


@pytest.mark.parametrize("n", [3, 5, 10])
def test_equivalence_holds_its_level_at_the_margin(n: int) -> None:
    trials = 10_000
    for truth in (-MARGIN, MARGIN):
        rate = float(np.mean(tost(normal(truth, n, trials), MARGIN) < 0.05))
        bound = 0.05 + 4 * math.sqrt(0.05 * 0.95 / trials)
        assert rate < bound
    # with enough pairs the level is used up, and an equal pair is found equivalent
    assert np.mean(tost(normal(MARGIN, 60, trials), MARGIN) < 0.05) > 0.04
    assert np.mean(tost(normal(0.0, 60, trials), MARGIN) < 0.05) > 0.99


def test_equivalence_means_90_percent_interval_inside_margin() -> None:
    d = normal(0.005, 8, 500)
    low, high = t_interval(d, 0.90)
    inside = (low > -MARGIN) & (high < MARGIN)
    assert ((tost(d, MARGIN) < 0.05) == inside).all()
    assert 0 < inside.mean() < 1


def test_no_difference_at_all() -> None:
    zeros = np.zeros(5)
    assert t_test(zeros) == 1
    assert sign_flip_test(zeros) == 1
    assert tost(zeros, MARGIN) == 0
    assert tuple(map(float, bca_interval(zeros))) == (0, 0)
    assert tuple(map(float, t_interval(zeros))) == (0, 0)


def test_too_few_pairs_give_nan_instead_of_a_number() -> None:
    one = np.array([0.3])
    for value in (t_test(one), tost(one, MARGIN), *t_interval(one), *bca_interval(one)):
        assert math.isnan(value)
    assert math.isnan(bca_interval(np.array([0.1, 0.2]))[0])
    assert math.isnan(sign_flip_test(np.array([])))


def test_holm_of_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    adjusted = holm([0.01, math.nan, 0.5])
    assert adjusted[0] == pytest.approx(0.02)
    assert math.isnan(adjusted[1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_between_uncorrected_and_bonferroni_and_ordered(
    p: list[float],
) -> None:
    adjusted = holm(p)
    for a, b in zip(p, adjusted, strict=True):
        assert a <= b <= min(1, len(p) * a) or b == pytest.approx(min(1, len(p) * a)) or b < 1
        assert b <= min(1.0, len(p) * max(p)) + 1e-12
    assert [adjusted[i] for i in np.argsort(p, kind="stable")] == sorted(adjusted)


def test_holm_holds_the_familywise_level() -> None:
    p = np.random.default_rng(2).uniform(size=(2_000, 4))
    wrong = np.mean([min(holm(row)) < 0.05 for row in p.tolist()])
    assert within_error(float(wrong), 1 - (1 - 0.05 / 4) ** 4, len(p))


def test_rate_intervals_equal_those_of_independent_samples_without_correlation() -> None:
    # no pair fails twice: φ ≤ 0.  With φ = 0 the method is Newcombe's for independent samples,
    # whose published example 56/70 − 48/80 gives 0.0524 to 0.3339; here equal numbers of pairs
    both, first, second, neither = 24, 24, 12, 12  # ad = bc, so φ = 0
    low, high = rate_difference_interval(both, first, second, neither)
    p, q = 48 / 72, 36 / 72
    wilson = [stats.binomtest(k, 72).proportion_ci(method="wilson") for k in (48, 36)]
    assert low == pytest.approx(p - q - math.hypot(p - wilson[0].low, wilson[1].high - q))
    assert high == pytest.approx(p - q + math.hypot(wilson[0].high - p, q - wilson[1].low))


@pytest.mark.parametrize("n", [6, 24])
@pytest.mark.parametrize("rates", [(0.0, 0.14, 0.0), (0.05, 0.3, 0.1), (0.3, 0.1, 0.1)])
def test_intervals_of_rates_cover_the_true_difference(
    n: int, rates: tuple[float, float, float]
) -> None:
    shares = [*rates, 1 - sum(rates)]
    tables, counts = np.unique(
        np.random.default_rng(3).multinomial(n, shares, 5000), axis=0, return_counts=True
    )
    truth, covered = rates[1] - rates[2], 0
    for table, count in zip(tables, counts, strict=True):
        low, high = rate_difference_interval(*map(int, table))
        covered += int(count) * (low <= truth <= high)
    assert covered / 5000 > 0.93


@given(st.lists(st.integers(0, 30), min_size=4, max_size=4).filter(any))
def test_rate_intervals_mirror_and_stay_within_one(table: list[int]) -> None:
    both, first, second, neither = table
    low, high = rate_difference_interval(both, first, second, neither)
    difference = (first - second) / sum(table)
    assert -1 - 1e-9 <= low <= difference + 1e-9
    assert difference - 1e-9 <= high <= 1 + 1e-9
    assert rate_difference_interval(both, second, first, neither) == pytest.approx((-high, -low))


def test_mcnemar_is_the_binomial_test_of_the_pairs_that_disagree() -> None:
    assert mcnemar_test(5, 0) == pytest.approx(2 / 2**5)
    assert mcnemar_test(0, 0) == 1
    tables = np.random.default_rng(0).multinomial(24, [0.2, 0.15, 0.15, 0.5], 3000)
    errors = np.mean([mcnemar_test(int(t[1]), int(t[2])) < 0.05 for t in tables])
    assert errors < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 3000)
