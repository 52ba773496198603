from pathlib import Path
from typing import Any

import pytest

from minillama.ablation import estimate
from minillama.ablation.estimate import describe_work
from minillama.ablation.grid import cells
from minillama.config.ablation import AblationConfig
from minillama.formatting import format_duration
from minillama.plan.compute import DEFAULT_MFU, count_flops, gpu_named

TOKENS = 100 * 4 * 32


@pytest.fixture
def grid(tmp_path: Path) -> Any:
    base = {
        "model": {"dim": 64, "n_layers": 2, "n_heads": 2, "max_seq_len": 32},
        "tokenizer": {"kind": "byte"},
        "data": {"seq_len": 32},
        "train": {"steps": 100, "batch_size": 4, "device": "cpu"},
    }
    arms = {"a": {}, "b": {"train.steps": 200}}
    config = AblationConfig(base=base, arms=arms, baseline="a", lr=[1e-3], out_dir=str(tmp_path))
    return cells(config)


def row(arm: str, seconds: float, tokens: int = TOKENS) -> dict[str, Any]:
    return {"arm": arm, "seconds": seconds, "starting_seconds": 1.0, "tokens": tokens}


def test_time_per_token_of_cells_that_ended(grid: Any) -> None:
    rows = [row("a", 59.0), row("b", 299.0, 2 * TOKENS)]
    said = describe_work(grid, [], rows, workers=2)
    assert said == "2 cells to run: about 3 min 0 s on 2 workers (from 2 cells that ended)"


def test_an_arm_without_cells_takes_the_mean_of_the_others(grid: Any) -> None:
    said = describe_work(grid, grid, [row("a", 59.0)], workers=1)
    assert said.startswith(
        "2 cells to run, then at most 2 with fresh seeds: about 6 min 0 s on 1 worker"
    )


def test_without_a_finished_cell_the_flops_give_the_time(
    grid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    h100 = gpu_named("h100")
    monkeypatch.setattr(estimate, "device_of", lambda config, name: h100)
    many = [cell for cell in grid for _ in range(10**4)]
    seconds = 10**4 * sum(count_flops(cell.config).total for cell in grid)
    seconds /= h100.float32 * DEFAULT_MFU
    said = describe_work(many, [], [], workers=2)
    assert f"about {format_duration(seconds)} on 2 workers (from FLOPs alone" in said


def test_a_cluster_of_unknown_size_gets_no_time(grid: Any) -> None:
    assert describe_work(grid, [], [], workers=0) == "2 cells to run"
