"""Powers against simulation (within four standard errors) and published tables."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from minillama.ablation.power import (
    difference_power,
    equivalence_power,
    sd_interval,
    seeds_needed,
)
from minillama.ablation.statistics import t_test, tost

TRIALS = 20_000


def simulated(test: str, n: int, sd: float, difference: float, margin: float = 0.02) -> float:
    d = np.random.default_rng(n).normal(difference, sd, (TRIALS, n))
    return float(np.mean((t_test(d) if test == "t" else tost(d, margin)) < 0.05))


def tolerance(power: float) -> float:
    return 4 * math.sqrt(max(power * (1 - power), 1e-4) / TRIALS)


@pytest.mark.parametrize("n", [2, 5, 12, 24])
@pytest.mark.parametrize("difference", [0.0, -0.01, 0.03])
def test_power_of_the_t_test_is_that_of_a_simulation(n: int, difference: float) -> None:
    power = difference_power(n, 0.024, difference)
    assert power == pytest.approx(simulated("t", n, 0.024, difference), abs=tolerance(power))


@pytest.mark.parametrize("n", [2, 5, 12, 24])
@pytest.mark.parametrize("difference", [0.0, -0.005, 0.01, 0.02])
def test_power_of_tost_is_that_of_a_simulation(n: int, difference: float) -> None:
    power = equivalence_power(n, 0.024, 0.02, difference)
    assert power == pytest.approx(simulated("tost", n, 0.024, difference), abs=tolerance(power))


@pytest.mark.parametrize("n", [2, 3, 10, 100])
def test_power_of_the_t_test_equals_that_of_the_noncentral_t(n: int) -> None:
    critical, shift = stats.t.ppf(0.975, n - 1), 0.5 * math.sqrt(n)
    power = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
    assert difference_power(n, 0.04, 0.02) == pytest.approx(power, abs=1e-8)


def test_power_under_the_null_is_the_level() -> None:
    assert difference_power(7, 0.1, 0.0, alpha=0.01) == pytest.approx(0.01)
    # with many pairs only one of the two tests matters at the margin itself
    assert equivalence_power(200, 0.024, 0.02, 0.02) == pytest.approx(0.05, abs=1e-6)


def test_seeds_for_a_difference_equal_cohens_table() -> None:
    # G*Power and Cohen (1988): paired t, two-sided .05, d = 0.5: 34 pairs at 80 %, 44 at 90 %
    needed = partial(difference_power, sd=2.0, difference=1.0)
    assert [seeds_needed(needed, power) for power in (0.8, 0.9)] == [34, 44]


def test_seeds_for_equivalence_are_the_fewest_that_reach_the_power() -> None:
    def power_of(n: int) -> float:
        return equivalence_power(n, 0.024, 0.02, 0.005)

    n = seeds_needed(power_of, 0.8)
    assert n is not None
    assert power_of(n - 1) < 0.8 <= power_of(n)
    assert simulated("tost", n, 0.024, 0.005) == pytest.approx(power_of(n), abs=0.012)


def test_no_number_of_seeds_shows_equivalence_at_the_margin() -> None:
    assert seeds_needed(lambda n: equivalence_power(n, 0.02, 0.02, 0.02), 0.8) is None
    assert seeds_needed(lambda n: difference_power(n, 0.02, 0.0), 0.8) is None


@given(
    n=st.integers(2, 60),
    sd=st.floats(1e-4, 1.0),
    margin=st.floats(1e-3, 0.5),
    share=st.floats(0, 0.9),
)
def test_more_pairs_have_more_power_and_the_sign_does_not_matter(
    n: int, sd: float, margin: float, share: float
) -> None:
    power = equivalence_power(n, sd, margin, share * margin)
    assert -1e-9 <= power <= 1 + 1e-9
    assert power == pytest.approx(equivalence_power(n, sd, margin, -share * margin), abs=1e-9)
    if power > 0.3:  # TOST's falls with n where next to nothing can be shown
        assert equivalence_power(n + 1, sd, margin, share * margin) >= power - 1e-6
    assert difference_power(n + 1, sd, margin) >= difference_power(n, sd, margin) - 1e-6


def test_without_noise_the_truth_decides() -> None:
    assert equivalence_power(3, 0.0, 0.02, 0.01) == 1
    assert equivalence_power(3, 0.0, 0.02, 0.02) == 0
    assert difference_power(3, 0.0, 0.01) == 1
    assert math.isnan(difference_power(1, 0.1, 0.1))
    assert math.isnan(equivalence_power(1, 0.1, 0.1))


def test_the_interval_of_a_standard_deviation_covers_it() -> None:
    n, level = 6, 0.95
    sds = np.random.default_rng(0).normal(0, 0.03, (TRIALS, n)).std(-1, ddof=1)
    ends = np.array([sd_interval(float(sd), n, level) for sd in sds[:4000]])
    covered = np.mean((ends[:, 0] < 0.03) & (ends[:, 1] > 0.03))
    assert covered == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / 4000))
    assert math.isnan(sd_interval(0.1, 1)[0])
