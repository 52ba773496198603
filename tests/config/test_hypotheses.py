from typing import Any

import pytest

from minillama.config.ablation import AblationConfig
from minillama.config.loading import check
from minillama.errors import ConfigError


def ablation(**hypothesis: Any) -> AblationConfig:
    given = {"name": "h", "arm": "b", "claim": "same"} | hypothesis
    raw = {"base": {}, "arms": {"a": {}, "b": {}}, "baseline": "a", "lr": [1e-3]}
    return check(AblationConfig, raw | {"hypotheses": [given]}, "x.yaml")


def test_the_defaults_are_the_loss_at_the_best_rates() -> None:
    (hypothesis,) = ablation().hypotheses
    assert (hypothesis.measure, hypothesis.rate, hypothesis.baseline) == ("loss", "best", None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"claim": "lower", "margin": 0.1}, "hypotheses.0.margin = 0.1: is of claim: same alone"),
        ({"measure": "failures"}, "hypotheses.0.claim = 'same': cannot be tested on failures"),
        ({"measure": "S", "rate": 0.1}, "hypotheses.0.rate = 0.1: S is of all rates"),
        ({"baseline": "b"}, "hypotheses.0.baseline = 'b': is the arm itself"),
        ({"claim": "better"}, "valid: different, higher, lower, same"),
        ({"rate": "worst"}, "hypotheses.0.rate"),
    ],
)
def test_errors_name_the_field_and_the_rule(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        ablation(**fields)
    assert said in str(error.value)
