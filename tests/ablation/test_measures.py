import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillama.ablation.measures import (
    gradient_figures,
    lr_basin,
    lr_sensitivity,
    spike_score,
    spikes,
)

GRID = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]


@pytest.mark.parametrize(
    ("losses", "plain", "trapezoid"),
    [  # measured at 0.3 M parameters: pre layernorm, pre rmsnorm, post rmsnorm
        ([2.101, 1.737, 1.653, 1.969, 2.620, 2.931], 0.515, 0.442),
        ([2.094, 1.739, 1.641, 1.961, 2.461, 2.762], 0.468, 0.401),
        ([1.981, 1.682, 1.870, 3.169, 3.168, 3.172], 0.825, 0.810),
    ],
)
def test_sensitivity_of_known_losses(losses: list[float], plain: float, trapezoid: float) -> None:
    found = lr_sensitivity(GRID, losses, init_loss=4.6)
    assert found.plain == pytest.approx(plain, abs=1e-3)
    assert found.trapezoid == pytest.approx(trapezoid, abs=2e-3)
    assert found.best_loss == min(losses)


def test_a_diverged_run_counts_with_the_loss_at_init() -> None:
    expected = lr_sensitivity(GRID[:3], [2.0, 1.0, 4.0], 4.0)
    for bad in (math.nan, math.inf, 9.0):
        assert lr_sensitivity(GRID[:3], [2.0, 1.0, bad], 4.0) == expected
    assert expected.plain == pytest.approx(7 / 3 - 1)


def test_sensitivity_does_not_depend_on_order_and_needs_two_rates() -> None:
    ours = lr_sensitivity([1e-2, 1e-3, 1e-1], [1.0, 2.0, 3.0], 4.0)
    assert ours == lr_sensitivity([1e-3, 1e-2, 1e-1], [2.0, 1.0, 3.0], 4.0)
    assert ours.plain == pytest.approx(1.0)
    assert ours.trapezoid == pytest.approx(0.75)
    assert math.isnan(lr_sensitivity([1e-3], [1.0], 4.0).plain)


def test_the_trapezoid_ignores_how_densely_the_grid_is_set() -> None:
    even = lr_sensitivity([1e-3, 1e-2, 1e-1], [1.0, 2.0, 3.0], 9.0)
    dense = lr_sensitivity([1e-3, 1e-2, 10**-1.5, 10**-1.2, 1e-1], [1.0, 2.0, 2.5, 2.8, 3.0], 9.0)
    assert dense.trapezoid == pytest.approx(even.trapezoid)
    assert dense.plain > even.plain + 0.1


def test_basin_is_cut_where_the_loss_crosses_its_level() -> None:
    basin = lr_basin([1e-3, 1e-2, 1e-1], [1.2, 1.0, 1.4], 4.0)
    assert basin.width == pytest.approx(0.5 + 0.25)
    assert (basin.open_below, basin.open_above) == (False, False)


def test_basin_is_open_at_the_edge_and_stops_at_a_ridge() -> None:
    basin = lr_basin([1e-4, 1e-3, 1e-2, 1e-1, 1.0], [1.0, 1.05, 1.01, 2.0, 1.0], 4.0)
    assert basin.open_below
    assert not basin.open_above
    assert 2 < basin.width < 2.2
    whole = lr_basin([1e-3, 1e-2], [1.0, 1.05], 4.0)
    assert (whole.width, whole.open_below, whole.open_above) == (pytest.approx(1), True, True)


def _spikes_one_by_one(values: list[float], sigmas: float, window: int) -> list[bool]:
    seen: list[float] = []
    out = []
    for value in values:
        if not math.isfinite(value):
            out.append(True)
            continue
        last = np.asarray(seen[-window:])
        out.append(
            len(seen) >= window and bool(value > np.mean(last) + sigmas * float(np.std(last)))
        )
        seen.append(value)
    return out


@given(
    st.lists(
        st.integers(0, 50).map(float) | st.just(math.nan) | st.just(math.inf) | st.just(1e6),
        max_size=40,
    ),
    st.integers(1, 9),
)
def test_spikes_equal_the_definition_followed_value_by_value(
    values: list[float], window: int
) -> None:
    found = spikes(values, sigmas=1.5, window=window)
    assert found.tolist() == _spikes_one_by_one(values, 1.5, window)


def test_spike_score_is_the_share_of_steps_and_looks_upward_only() -> None:
    rng = np.random.default_rng(0)
    loss, norm = rng.normal(3, 0.01, 400), rng.normal(1, 0.01, 400)
    assert spike_score(loss, norm) == 0
    loss[200], norm[200], norm[300], loss[350] = 9, 9, 9, -9
    assert spike_score(loss, norm) == pytest.approx(2 / 400)
    loss[10] = 9  # before the first full window nothing can be judged
    assert spike_score(loss, norm) == pytest.approx(2 / 400)
    norm[399] = math.nan
    assert spike_score(loss, norm) == pytest.approx(3 / 400)


def test_spike_score_of_a_run_shorter_than_its_window_is_unknown() -> None:
    assert math.isnan(spike_score([1.0] * 128, [1.0] * 128))
    assert math.isnan(spike_score([], []))
    assert spike_score([1.0, math.nan], [1.0, 1.0]) == 0.5


def test_gradient_figures_keep_what_clipping_hides() -> None:
    norms = [1.0] * 98 + [50.0, 9850.0]
    figures = gradient_figures(norms, [n > 1 for n in norms])
    assert (figures.max, figures.p99, figures.clipped_share) == (9850, 50, 0.02)
    assert gradient_figures([1.0, math.nan], [False, True]).max == math.inf
    assert math.isnan(gradient_figures([], []).max)
