from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillama.ablation.grid import Place
from minillama.ablation.stage_plan import StagePlan, make_plan, read_plan, write_plan
from minillama.config.ablation import AblationConfig
from minillama.errors import ConfigError, RunFolderError

LRS = [1e-1, 1e-3, 1e-2]


def config(seeds: list[int] | None = None, stage: Any = None, **fields: Any) -> AblationConfig:
    default = {
        "base": {},
        "arms": {"a": {}, "b": {}},
        "baseline": "a",
        "lr": LRS,
        "stages": [
            {"seeds": seeds or [0, 1]},
            stage or {"seeds": 3, "rates": "best_and_neighbours"},
        ],
    }
    return AblationConfig(**default | fields)


def plan(of: AblationConfig) -> StagePlan:
    return make_plan(of, {"a": 1e-2, "b": 1e-1}, "2026-01-01T00:00:00+00:00")


def test_neighbors_end_at_the_edges_of_the_grid() -> None:
    assert plan(config()).rates == {"a": (1e-3, 1e-2, 1e-1), "b": (1e-2, 1e-1)}
    assert plan(config(stage={"seeds": 3})).rates == {"a": (1e-2,), "b": (1e-1,)}


@given(
    seeds=st.lists(st.integers(0, 300), min_size=1, max_size=9, unique=True),
    n=st.integers(2, 40),
)
def test_fresh_seeds_are_not_of_the_grid(seeds: list[int], n: int) -> None:
    fresh = plan(config(seeds, {"seeds": n})).seeds
    assert len(set(fresh)) == n
    assert not set(fresh) & set(seeds)
    assert min(fresh) >= 100


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    of = config(stage={"until": "decided", "max_seeds": 8})
    assert read_plan(tmp_path, of) is None
    write_plan(tmp_path, plan(of))
    assert read_plan(tmp_path, of) == plan(of)
    assert read_plan(tmp_path, config(stages=None, seeds=[0, 1])) is None


def test_only_the_seeds_that_it_ended_with_are_run() -> None:
    whole = plan(config(stage={"until": "decided", "max_seeds": 8}))
    assert len(whole.places()) == 2 * 8
    assert whole.places(2)[:2] == [Place("a", 1e-2, 100), Place("a", 1e-2, 101)]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (config([0, 1, 2]), "grid_seeds"),
        (config(lr=[1e-3, 1e-2, 1e-1, 1.0]), "grid_rates"),
        (config(arms={"a": {}, "b": {}, "c": {}}), "grid_rates"),
        (config(stage={"seeds": 4, "rates": "best_and_neighbours"}), "seeds, looks"),
        (config(stage={"seeds": 3}), "rates"),
    ],
)
def test_a_plan_does_not_change(changed: AblationConfig, named: str, tmp_path: Path) -> None:
    write_plan(tmp_path, plan(config()))
    with pytest.raises(ConfigError, match=rf"of another config \({named} differ\)"):
        read_plan(tmp_path, changed)


@pytest.mark.parametrize("text", ["{", "[]", '{"time": ""}'])
def test_a_damaged_plan_is_an_error_of_its_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "stages.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"stages\.json is damaged"):
        read_plan(tmp_path, config())
