from typing import Any

import pytest
import yaml

from minillama.config.ablation import AblationConfig
from minillama.config.loading import check
from minillama.config.run import to_yaml
from minillama.errors import ConfigError

GRID = {"seeds": [3, 1]}


def ablation(stages: Any, **fields: Any) -> AblationConfig:
    raw = {"base": {}, "arms": {"a": {}}, "baseline": "a", "lr": [1e-3, 1e-2], "stages": stages}
    return check(AblationConfig, raw | fields, "x.yaml")


def test_the_grid_takes_the_seeds_of_the_first_stage() -> None:
    assert ablation([GRID, {"seeds": 24}]).seeds == [3, 1]
    assert ablation([GRID, {"seeds": 24}], seeds=[3, 1]).seeds == [3, 1]
    with pytest.raises(
        ConfigError, match=r"seeds = \[0\]: differs from the first stage's \[3, 1\]"
    ):
        ablation([GRID, {"seeds": 24}], seeds=[0])


def test_a_written_config_reads_as_the_same() -> None:
    config = ablation([GRID, {"until": "decided", "max_seeds": 24, "rates": "best_and_neighbours"}])
    assert check(AblationConfig, yaml.safe_load(to_yaml(config)), "y.yaml") == config


@pytest.mark.parametrize(
    ("stage", "looks"),
    [
        ({"seeds": 24}, (24,)),
        ({"until": 0.02, "max_seeds": 24}, (6, 12, 18, 24)),
        ({"until": 0.02, "max_seeds": 4}, (2, 3, 4)),
        ({"until": "decided", "max_seeds": 9, "looks": [2, 9]}, (2, 9)),
    ],
)
def test_the_numbers_of_seeds_to_look_at(stage: dict[str, Any], looks: tuple[int, ...]) -> None:
    stages = ablation([GRID, stage]).stages
    assert stages is not None
    assert stages[1].planned_looks() == looks


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([GRID], "stages.1 = None: is required"),
        ([GRID, {}], "stages.1.seeds = None: set seeds for a fixed number, or until"),
        ([GRID, {"seeds": 4, "until": 0.02, "max_seeds": 8}], "stages.1.seeds = 4: set seeds"),
        ([GRID, {"until": 0.02}], "stages.1.max_seeds = None: goes with until"),
        ([GRID, {"seeds": 1}], "stages.1.seeds = 1: must be 2 or more"),
        ([GRID, {"seeds": 4, "looks": [2, 4]}], "stages.1.looks = [2, 4]: must rise"),
        (
            [GRID, {"until": 0.02, "max_seeds": 8, "looks": [4, 2, 8]}],
            "stages.1.looks = [4, 2, 8]: must rise",
        ),
        ([GRID, {"seeds": 4, "rates": "worst"}], "valid: best, best_and_neighbours"),
    ],
)
def test_errors_name_the_field_and_the_rule(stages: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        ablation(stages)
    assert said in str(error.value)
