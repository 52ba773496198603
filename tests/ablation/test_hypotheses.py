from pathlib import Path
from typing import Any

import pytest

from minillama.ablation.grid import Place
from minillama.ablation.hypotheses import (
    RecordedHypothesis,
    hypotheses_of,
    read_hypotheses,
    record_hypotheses,
)
from minillama.config.ablation import AblationConfig
from minillama.errors import ConfigError, RunFolderError

SAME = {"name": "same", "arm": "b", "claim": "same"}
STEADIER = {"name": "steadier", "arm": "b", "claim": "lower", "measure": "failures", "rate": 0.1}
AT_BEST, AT_HIGH = Place("b", 1e-3, 0), Place("b", 0.1, 0)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def make(*hypotheses: dict[str, Any], **fields: Any) -> AblationConfig:
        default: dict[str, Any] = {
            "out_dir": str(tmp_path),
            "base": {},
            "arms": {"a": {}, "b": {}, "c": {}},
            "baseline": "a",
            "lr": [1e-3, 0.1],
            "seeds": [0, 1],
        }
        return AblationConfig(**default | {"hypotheses": list(hypotheses)} | fields)

    return make


def record(config: AblationConfig, *ended: Place) -> dict[str, RecordedHypothesis]:
    record_hypotheses(config, ended)
    return {each.hypothesis.name: each for each in read_hypotheses(Path(config.out_dir))}


def test_what_is_recorded_before_a_run_is_planned(config: Any) -> None:
    recorded = record(config(SAME, STEADIER))
    assert all(each.is_planned for each in recorded.values())
    assert recorded["same"].hypothesis.baseline == "a"
    assert recorded["same"].hypothesis.margin == 0.02
    assert recorded["steadier"].hypothesis.margin is None
    later = record(config(SAME, STEADIER), AT_BEST, AT_HIGH)
    assert later == recorded


def test_what_comes_later_counts_the_runs_that_decide_it(config: Any) -> None:
    recorded = record(config(SAME, STEADIER), AT_BEST, AT_HIGH, Place("c", 0.1, 0))
    assert {name: each.n_seen for name, each in recorded.items()} == {"same": 2, "steadier": 1}


def test_only_fresh_seeds_decide_what_is_claimed_of_the_second_stage(config: Any) -> None:
    sensitivity = {"name": "s", "arm": "b", "claim": "lower", "measure": "S"}
    stages = [{"seeds": [0, 1]}, {"seeds": 4}]
    staged = config(SAME, STEADIER, sensitivity, seeds=[0, 1], stages=stages)
    recorded = record(staged, AT_BEST, AT_HIGH)
    assert {name: each.n_seen for name, each in recorded.items()} == {
        "same": 0,
        "steadier": 1,
        "s": 2,
    }


def test_a_hypothesis_changes_only_before_its_runs(config: Any) -> None:
    first = record(config(SAME))
    other = config(SAME | {"claim": "lower"})
    assert record(other)["same"].sha256 != first["same"].sha256
    with pytest.raises(ConfigError, match="ended: same, recorded 20"):
        record(config(SAME), AT_BEST)
    assert record(other, AT_BEST)["same"].is_planned


def test_a_dropped_hypothesis_stays_once_its_runs_have_ended(config: Any) -> None:
    record(config(SAME, STEADIER))
    assert record(config(), AT_BEST).keys() == {"same"}
    assert record(config(), AT_BEST).keys() == {"same"}


def test_no_hypotheses_leave_no_file(config: Any, tmp_path: Path) -> None:
    record_hypotheses(config(), [AT_BEST])
    assert list(tmp_path.iterdir()) == []


def test_unknown_arms_and_rates_are_listed_together(config: Any) -> None:
    wrong = config(
        {**SAME, "arm": "bb"}, STEADIER | {"rate": 0.2}, {**SAME, "name": "x", "arm": "a"}
    )
    with pytest.raises(ConfigError) as error:
        hypotheses_of(wrong)
    said = str(error.value)
    assert "hypotheses.0.arm = 'bb': unknown arm 'bb'; did you mean 'b'?" in said
    assert "hypotheses.1.rate = 0.2: 0.2 is not a rate of b" in said
    assert "hypotheses.2.arm = 'a': is the baseline, a" in said


def test_an_edited_record_is_refused(config: Any, tmp_path: Path) -> None:
    record(config(SAME))
    path = tmp_path / "hypotheses.json"
    whole = path.read_text()
    path.write_text(
        whole.replace('"claim": "same"', '"claim": "different"').replace("0.02", "null")
    )
    with pytest.raises(RunFolderError, match=r"edited after it was written \(same\)"):
        read_hypotheses(tmp_path)
    path.write_text("[{}]")
    with pytest.raises(RunFolderError, match="is damaged"):
        read_hypotheses(tmp_path)
