import math
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minillama.config import RunConfig
from minillama.errors import DataError
from minillama.plan.compute import count_flops
from minillama.plan.memory import estimate_memory
from minillama.plan.parameters import count_parameters
from minillama.plan.suggest import (
    FEWEST_PER_PARAMETER,
    PASSES,
    SHAPES,
    TOKENS_PER_PARAMETER,
    Vocabulary,
    suggest,
)

SOURCE = {"kind": "files", "files": ["a.txt"]}
LEAST_STEPS = 200


def suggested(n_bytes: int, speed: float = 1e10, seconds: float = 600, **more: Any) -> RunConfig:
    return suggest(n_bytes, SOURCE, speed, seconds=seconds, **more)


def n_tokens(config: RunConfig) -> int:
    return config.train.steps * config.train.batch_size * config.data.seq_len


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.integers(1000, 10**13),
    st.floats(1e8, 1e17),
    st.floats(1, 1e7),
    st.sampled_from([Vocabulary(None, 1.0), Vocabulary(2048, 1.7)]),
)
def test_any_text_and_any_time_give_a_run_within_both(n_bytes, speed, seconds, vocabulary):
    config = suggested(n_bytes, speed, seconds, vocabulary=vocabulary)
    n_params = count_parameters(config.model).total
    if config.train.steps > LEAST_STEPS:
        assert n_tokens(config) <= TOKENS_PER_PARAMETER * n_params
        assert n_tokens(config) <= PASSES * n_bytes / vocabulary.bytes_per_token
        assert count_flops(config).total <= seconds * speed
    if config.model.dim > SHAPES[0].dim:
        assert n_tokens(config) >= FEWEST_PER_PARAMETER * n_params
    if vocabulary.size is None or n_bytes >= 20_000:
        held_out = config.data.val_fraction * n_bytes / vocabulary.bytes_per_token
        assert held_out > config.data.seq_len


def test_more_text_time_or_memory_gives_no_smaller_model():
    def sizes(**grid: list[float]) -> list[int]:
        [(name, values)] = grid.items()
        given = {"n_bytes": 10**8, "speed": 1e11, "seconds": 1e5}
        return [count_parameters(suggested(**given | {name: v}).model).total for v in values]

    for name, values in (
        ("n_bytes", [10**4, 10**6, 10**8, 10**10]),
        ("seconds", [10, 1000, 1e5, 1e7]),
        ("memory", [1e8, 1e9, 1e10, math.inf]),
    ):
        found = sizes(**{name: values})
        assert found == sorted(found)
        assert found[0] < found[-1]


def test_the_suggested_model_fits_the_memory():
    config = suggested(10**10, 1e15, 1e6, memory=2e9)
    assert estimate_memory(config, on_cpu=True).peak_on_cpu <= 2e9


def test_the_vocabulary_grows_with_the_text_and_bytes_serve_a_short_one():
    assert suggested(5000).tokenizer.kind == "byte"
    sizes = [suggested(n, 1e13, 1e5).tokenizer.vocab_size for n in (10**5, 10**6, 10**8)]
    assert sizes == [512, 1024, 4096]


def test_a_text_without_a_window_to_test_on_is_refused():
    with pytest.raises(DataError, match="has 999 bytes, and needs 1000"):
        suggested(999)
