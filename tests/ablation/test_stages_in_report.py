"""What the report says of an ablation with a second stage, from hand-made folders."""

from pathlib import Path
from typing import Any

import pytest

from minillama.ablation.analysis import ArmResult, Comparison, analyse_arms, compare_arms
from minillama.ablation.failures import compare_failures
from minillama.ablation.report.fates import fate_rows
from minillama.ablation.report.prose import cautions, findings, headline
from minillama.ablation.report.quote import quotable
from minillama.ablation.report.sensitivity import sensitivity_rows
from minillama.ablation.report.stages import seed_range
from minillama.ablation.results import Results, read_results

GRID = {
    "rms": {1e-3: [2.0, 2.1], 1e-2: [1.5, 1.5], 1e-1: [5.5, 3.0]},
    "ln": {1e-3: [2.0, 2.1], 1e-2: [1.9, 1.9], 1e-1: [3.0, 3.0]},
}
FRESH = {
    "rms": {1e-2: [1.8, 1.82, 1.81, 1.79, 1.8], 1e-1: [5.5, 5.5, 3.0, 3.0, 3.0]},
    "ln": {1e-2: [1.8, 1.81, 1.82, 1.8, 1.79], 1e-1: [1.7, 1.7, 1.7, 1.7, 1.7]},
}


@pytest.fixture
def staged(make_ablation: Any, add_fresh_seeds: Any) -> Path:
    """On the grid's seeds rms is far better; on fresh seeds the arms are equal."""
    folder: Path = add_fresh_seeds(make_ablation(GRID), FRESH, seeds=5, rates="best_and_neighbours")
    return folder


def read(folder: Path) -> tuple[Results, list[ArmResult], list[Comparison]]:
    results = read_results(folder)
    arms = analyse_arms(results)
    return results, arms, compare_arms(arms, results.margin)


def test_the_verdict_is_of_fresh_seeds_alone(staged: Path) -> None:
    _, arms, (comparison,) = read(staged)
    assert comparison.seeds == (100, 101, 102, 103, 104)
    assert comparison.mean == pytest.approx(0.0, abs=1e-9)
    assert comparison.lr == comparison.baseline_lr == 1e-2
    assert comparison.same_holm < 0.05
    assert [arm.best_loss for arm in arms] == pytest.approx([1.804, 1.804])


def test_sensitivity_fates_and_curves_are_of_the_grid(staged: Path) -> None:
    results, arms, _ = read(staged)
    rms = arms[0]
    assert rms.mean_loss == pytest.approx({1e-3: 2.05, 1e-2: 1.5, 1e-1: 4.25})
    assert list(rms.sensitivity) == [0, 1]
    assert sensitivity_rows(arms)[0].left_out == ()
    assert sensitivity_rows(arms)[0].behind == 0.0
    assert sum(rms.fates.values()) == 6
    assert all(row.n == 2 for row in fate_rows(arms))
    assert len(results.of_grid().runs) == 12


def test_rates_of_failure_count_every_seed(staged: Path) -> None:
    (at,) = compare_failures(read(staged)[1])
    assert (at.lr, at.n_seeds, at.failed, at.baseline_failed) == (1e-1, 7, 0, 3)


def test_the_report_says_on_which_seeds_it_chose_and_compared(staged: Path) -> None:
    results, arms, comparisons = read(staged)
    said = " ".join(findings(results, arms, comparisons))
    assert "chosen on seeds 0, 1, and the arms are compared on fresh seeds, 100 to 104" in said
    assert "1 of 12 runs of the grid failed" in headline(results, arms, comparisons)
    quoted = quotable(results, arms, comparisons)
    assert "5 fresh seeds, each arm at its own best of 3 learning rates" in quoted
    assert "chosen on 2 other seeds" in quoted


def test_a_grid_alone_says_that_it_chose_and_compared_on_the_same(make_ablation: Any) -> None:
    results, arms, comparisons = read(make_ablation(GRID))
    said = " ".join(findings(results, arms, comparisons))
    assert "chosen, and the arms compared, on the same seeds (0, 1)" in said


def test_an_arm_that_does_better_beside_its_rate_is_named(staged: Path) -> None:
    results, arms, _ = read(staged)
    (said,) = [text for text in cautions(results, arms) if "does better" in text]
    assert "ln does better at 0.1 than at 0.01, the rate chosen on the grid, by 0.104" in said


def test_a_second_stage_that_has_just_begun_compares_nothing(
    make_ablation: Any, add_fresh_seeds: Any
) -> None:
    nothing = {arm: {1e-2: ["missing"] * 3} for arm in GRID}
    results, arms, comparisons = read(add_fresh_seeds(make_ablation(GRID), nothing))
    assert comparisons == []
    assert len(results.missing) == 6
    assert "share no finished seed" in headline(results, arms, comparisons)
    assert sensitivity_rows(arms)


def test_looks_that_stop_early_widen_the_interval(make_ablation: Any, add_fresh_seeds: Any) -> None:
    fixed = add_fresh_seeds(make_ablation(GRID, name="fixed"), FRESH, seeds=5)
    until = {"until": "decided", "max_seeds": 20, "looks": [5, 20]}
    grows = add_fresh_seeds(make_ablation(GRID, name="grows"), FRESH, **until)
    (once,) = read(fixed)[2]
    results, arms, (looked,) = read(grows)
    assert looked.seeds == once.seeds
    assert looked.t95.low < once.t95.low < once.t95.high < looked.t95.high
    assert looked.same_p > once.same_p
    said = " ".join(findings(results, arms, [looked]))
    assert "grows to 5 or 20 until each comparison is decided; it has not ended" in said


def test_seeds_in_a_row_are_a_range() -> None:
    assert seed_range([3, 1, 2]) == "1 to 3"
    assert seed_range([0, 1, 3]) == "0, 1, 3"
    assert seed_range([5]) == "5"
