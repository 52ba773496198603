"""Second stages of real cells, as small as they come."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minillama.ablation.grid import Cell
from minillama.ablation.results import Results, read_results
from minillama.ablation.runner import dry_run, run

GRID = {"seeds": [0]}
LRS = [1e-3, 1e-2]


def fresh(results: Results) -> Counter[tuple[str, float]]:
    """Return the number of ended fresh seeds of each arm and rate."""
    return Counter((run.arm, run.lr) for run in results.runs if run.seed >= 100 and run.ended)


def test_a_finished_grid_that_gets_stages_runs_the_second_alone(
    ablation: Any, pool_here: Any, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    folder = run(ablation(lr=LRS, seeds=[0]), progress=False, make_pool=pool_here)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")}
    staged = ablation(lr=LRS, stages=[GRID, {"seeds": 2}])
    with caplog.at_level("INFO", "minillama"):
        run(staged, make_pool=pool_here)
    assert "[1/4] rms" in capsys.readouterr().err  # the bar counts the cells of the stage
    assert "4 cells to run: about" in caplog.text

    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    results = read_results(folder)
    assert results.plan is not None
    assert fresh(results) == Counter(dict.fromkeys(results.plan.chosen.items(), 2))
    for arm, chosen in results.plan.chosen.items():
        losses = {each.lr: each.figure("val_loss") for each in results.of_grid().of_arm(arm)}
        assert losses[chosen] == min(losses.values())
    assert "0 of 8 cells to run" in dry_run(staged)


class NoPoolError(Exception):
    """Raised where the second stage would begin."""


def test_a_killed_second_stage_continues_with_the_same_plan(ablation: Any, pool_here: Any) -> None:
    staged = ablation(arms={"rms": {}}, lr=LRS, stages=[GRID, {"seeds": 2}])

    def only_the_grid(cells: Sequence[Cell], workers: int, threads: int) -> Any:
        if cells[0].seed >= 100:
            raise NoPoolError
        return pool_here(cells, workers, threads)

    with pytest.raises(NoPoolError):
        run(staged, progress=False, make_pool=only_the_grid)
    folder = Path(staged.out_dir)
    plan = json.loads((folder / "stages.json").read_text())
    (chosen,) = plan["chosen"].values()
    # Now the other rate would be chosen.
    worse = folder / f"cells/rms/lr-{chosen:g}/seed-0/summary.json"
    worse.write_text(json.dumps(json.loads(worse.read_text()) | {"val_loss": 99.0}))
    run(staged, progress=False, make_pool=pool_here)
    assert fresh(read_results(folder)) == Counter({("rms", chosen): 2})
    assert json.loads((folder / "stages.json").read_text()) == plan | {"n_run": 2}


@pytest.mark.parametrize(
    ("until", "margin", "n_run"), [(9.0, 0.02, 2), (1e-9, 0.02, 4), ("decided", 50.0, 3)]
)
def test_seeds_grow_until_the_rule_is_met(
    ablation: Any, pool_here: Any, until: Any, margin: float, n_run: int
) -> None:
    stage = {"until": until, "max_seeds": 4, "looks": [2, 3, 4] if until == 9.0 else [3, 4]}
    staged = ablation(margin=margin, stages=[GRID, stage])
    results = read_results(run(staged, progress=False, make_pool=pool_here))
    assert results.plan is not None
    assert results.plan.n_run == n_run
    assert fresh(results) == Counter({("rms", 1e-3): n_run, ("ln", 1e-3): n_run})
    assert not results.missing


def test_hypotheses_are_recorded_before_the_first_cell(ablation: Any, pool_here: Any) -> None:
    first = ablation(hypotheses=[{"name": "early", "arm": "ln", "claim": "same"}])
    record = Path(first.out_dir) / "hypotheses.json"

    def looks(cells: Sequence[Cell], workers: int, threads: int) -> Any:
        assert record.exists()
        return pool_here(cells, workers, threads)

    run(first, progress=False, make_pool=looks)
    late = {"name": "late", "arm": "ln", "claim": "lower"}
    run(ablation(hypotheses=[*first.hypotheses, late]), progress=False, make_pool=pool_here)
    assert [each["n_seen"] for each in json.loads(record.read_text())] == [0, 2]


def test_the_second_stage_waits_for_a_grid_without_crashes(ablation: Any, pool_here: Any) -> None:
    arms = {"rms": {}, "faulty": {"model.norm.kind": "faulty"}}
    staged = ablation(arms=arms, stages=[GRID, {"seeds": 2}])
    folder = run(staged, progress=False, make_pool=pool_here)
    assert not (folder / "stages.json").exists()
