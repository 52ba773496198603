import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minillama.ablation.report.curves import running_mean, subsample, thin
from minillama.ablation.report.figures import arm_styles


def test_no_two_arms_share_color_and_dash() -> None:
    styles = arm_styles([f"arm{i}" for i in range(40)])
    assert len({(style.light, style.dash) for style in styles.values()}) == 40
    assert len({(style.dark, style.dash) for style in styles.values()}) == 40


@given(
    st.lists(st.floats(-1e3, 1e3) | st.just(float("nan")), min_size=1, max_size=300),
    st.integers(4, 60),
)
def test_thin_keeps_both_ends_and_every_extreme(values: list[float], points: int) -> None:
    x, y = np.arange(len(values), dtype=float), np.array(values)
    thin_x, thin_y = thin(x, y, points)
    assert (thin_x[0], thin_x[-1]) == (x[0], x[-1])
    assert len(thin_x) <= max(points, 4) + 2
    assert (np.diff(thin_x) > 0).all()
    np.testing.assert_array_equal(thin_y, y[thin_x.astype(int)])
    if np.isfinite(y).any():
        assert np.nanmax(thin_y) == np.nanmax(y)
        assert np.nanmin(thin_y) == np.nanmin(y)


def test_subsample_keeps_both_ends() -> None:
    x, _ = subsample(np.arange(1000.0), np.arange(1000.0), 50)
    assert (x[0], x[-1], len(x)) == (0, 999, 50)


def test_running_mean_is_causal_and_ignores_gaps() -> None:
    y = np.array([1.0, 3.0, np.nan, 5.0, 7.0])
    np.testing.assert_allclose(running_mean(y, 2), [1, 2, np.nan, 5, 6])
    np.testing.assert_allclose(running_mean(y, 10), [1, 2, np.nan, 3, 4])
