import math
from typing import Any

import pytest

from minillama.ablation.analysis import analyse_arms, compare_arms
from minillama.ablation.measures import lr_sensitivity
from minillama.ablation.results import read_results

INIT = 6.2


def test_the_best_rate_is_that_of_the_lowest_mean(make_ablation: Any) -> None:
    results = read_results(
        make_ablation({"rms": {1e-3: [2.0, 2.2], 3e-3: [1.0, 2.9], 1e-2: [2.5, 2.5]}})
    )
    (arm,) = analyse_arms(results)
    assert arm.best_lr == 3e-3
    assert arm.best_loss == pytest.approx(1.95)
    assert arm.best_sd == pytest.approx(1.9 / math.sqrt(2))
    assert arm.best_seeds == (0, 1)
    assert arm.edge == ""


def test_a_diverged_run_counts_with_the_loss_at_init(make_ablation: Any) -> None:
    results = read_results(make_ablation({"rms": {1e-3: [2.0, 2.2], 3e-3: [1.0, None]}}))
    (arm,) = analyse_arms(results)
    assert arm.mean_loss[3e-3] == pytest.approx((1 + INIT) / 2)
    assert (arm.best_lr, arm.edge) == (1e-3, "lowest")
    assert arm.fates == {"ok": 3, "diverged": 1}
    assert arm.sensitivity[1] == lr_sensitivity([1e-3, 3e-3], [2.2, math.nan], INIT)


def test_sensitivity_takes_only_seeds_with_the_full_grid(make_ablation: Any) -> None:
    results = read_results(make_ablation({"rms": {1e-3: [2.0, 2.2], 3e-3: [1.0, "missing"]}}))
    (arm,) = analyse_arms(results)
    assert list(arm.sensitivity) == [0]
    assert arm.mean_sensitivity()[0] == pytest.approx(0.5)
    assert arm.basin is not None


def test_arms_are_compared_each_at_its_own_best_rate_by_seed(make_ablation: Any) -> None:
    results = read_results(
        make_ablation(
            {
                "rms": {1e-3: [2.0, 2.1, 2.3], 3e-3: [3.0, 3.0, 3.0]},
                "ln": {1e-3: [9.0, 9.0, 9.0], 3e-3: [2.1, 2.25, "missing"]},
            }
        )
    )
    (found,) = compare_arms(analyse_arms(results), margin=0.02)
    assert (found.arm, found.lr, found.baseline, found.baseline_lr) == ("ln", 3e-3, "rms", 1e-3)
    assert found.seeds == (0, 1)
    assert found.differences == pytest.approx((0.1, 0.15))
    assert found.mean == pytest.approx(0.125)
    assert found.t95.low < 0.1 < found.mean < found.t95.high
    assert math.isnan(found.bca95.low)
    assert found.p_holm == found.p_t


def test_p_values_are_adjusted_for_the_number_of_arms(make_ablation: Any) -> None:
    base = [2.00, 2.05, 2.10, 2.02]
    arms = {"rms": {1e-3: base}}
    for i in range(3):
        arms[f"arm{i}"] = {1e-3: [b + 0.1 + 0.01 * i + 0.02 * j for j, b in enumerate(base)]}
    found = compare_arms(analyse_arms(read_results(make_ablation(arms))), 0.02)
    assert len(found) == 3
    assert min(c.p_holm for c in found) == pytest.approx(3 * min(c.p_t for c in found))
    assert all(c.same_holm >= c.same_p for c in found)


def test_an_arm_without_a_shared_seed_is_not_compared(make_ablation: Any) -> None:
    results = read_results(
        make_ablation({"rms": {1e-3: [2.0, "missing"]}, "ln": {1e-3: ["missing", 2.0]}})
    )
    assert compare_arms(analyse_arms(results), 0.02) == []


def test_a_difference_in_sensitivity_is_paired_by_seed(make_ablation: Any) -> None:
    results = read_results(
        make_ablation(
            {
                "rms": {1e-3: [2.0, 2.0], 3e-3: [2.2, 2.4]},
                "ln": {1e-3: [2.0, 2.0], 3e-3: [2.4, 2.8]},
            }
        )
    )
    (found,) = compare_arms(analyse_arms(results), 0.02)
    assert found.s_mean == pytest.approx((0.1 + 0.2) / 2)
    assert found.s_t95.low < found.s_mean < found.s_t95.high
