"""S is shown with what it rests on."""

from typing import Any

import pytest

from minillama.ablation.analysis import analyse_arms
from minillama.ablation.report.sensitivity import sensitivity_rows
from minillama.ablation.results import read_results


def test_a_difference_of_s_may_rest_on_the_highest_rate(make_ablation: Any) -> None:
    base = {1e-3: [2.0, 2.1, 2.2], 1e-2: [2.3, 2.4, 2.5], 1e-1: [3.2, 3.3, 3.4]}
    arm = {1e-3: [2.01, 2.1, 2.2], 1e-2: [2.3, 2.41, 2.5], 1e-1: [2.3, 2.4, 2.5]}
    folder = make_ablation({"base": base, "arm": arm})
    first, second = sensitivity_rows(analyse_arms(read_results(folder)))
    assert first.plain == pytest.approx(0.5)
    assert first.trimmed == pytest.approx(0.15)
    assert second.trimmed == pytest.approx((0.145 + 0.155 + 0.15) / 3)
    assert second.trimmed_difference == pytest.approx(0.0, abs=1e-12)
    assert second.trimmed_t95.low == pytest.approx(-0.01242, abs=1e-4)
    assert (first.n_pairs, second.n_pairs) == (0, 3)


def test_an_arm_that_trains_nowhere_is_not_ranked(make_ablation: Any) -> None:
    good, flat = {1e-3: [2.0], 1e-2: [2.5]}, {1e-3: [3.2], 1e-2: [3.25]}
    near = {1e-3: [2.09], 1e-2: [2.5]}
    folder = make_ablation({"good": good, "flat": flat, "near": near})
    rows = {row.arm: row for row in sensitivity_rows(analyse_arms(read_results(folder)))}
    assert rows["flat"].plain < rows["good"].plain
    assert {arm for arm, row in rows.items() if row.is_ranked} == {"good", "near"}
    assert rows["flat"].behind == pytest.approx(1.2)


def test_seeds_without_every_rate_are_named(make_ablation: Any) -> None:
    folder = make_ablation({"a": {1e-3: [2.0, 2.0], 1e-2: [2.5, "missing"], 1e-1: [3.0, 3.0]}})
    (row,) = sensitivity_rows(analyse_arms(read_results(folder)))
    assert row.left_out == (1,)
    assert row.plain == pytest.approx(0.5)
