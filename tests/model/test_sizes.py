import pytest

from minillama.config import ModelConfig
from minillama.model.sizes import MAX_ROTATIONS, MAX_SIZE, absurd_sizes, misfits
from minillama.model.transformer import Transformer

SHAPE = {"vocab_size": 11, "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6}


def config(**fields: object) -> ModelConfig:
    return ModelConfig.model_validate(SHAPE | fields)


@pytest.mark.parametrize("norm", [{}, {"placement": "post"}, {"placement": "hybrid"}])
def test_a_model_fits_its_own_config(norm):
    shape = config(norm=norm)
    shapes = {name: weight.shape for name, weight in Transformer(shape).state_dict().items()}
    assert absurd_sizes(shape, len(shapes)) == misfits(shape, shapes) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"vocab_size": 12}, ["embed.weight"]),
        ({"ffn_dim": 40}, ["blocks.0.mlp.gate_proj.weight", "blocks.1.mlp.gate_proj.weight"]),
        ({"n_kv_heads": 4}, [f"blocks.{i}.attention.k_proj.weight" for i in (0, 1)]),
        ({"n_layers": 3}, [f"blocks.2.attention.{n}_proj.weight" for n in "qk"] + ["blocks.2.mlp"]),
    ],
)
def test_what_differs_is_named(changed, named):
    shapes = {name: weight.shape for name, weight in Transformer(config()).state_dict().items()}
    errors_in = misfits(config(**changed), shapes)
    assert len(errors_in) == len(named)
    assert all(expected.startswith(name) for expected, name in zip(errors_in, named, strict=True))


def test_absurd_sizes_are_named():
    scaling = {"kind": "llama3", "original_max_seq_len": MAX_SIZE + 1}
    large = config(vocab_size=10**30, n_layers=100, rope_scaling=scaling)
    errors_in = absurd_sizes(large, 20)
    assert [expected.split(" ")[0] for expected in errors_in] == [
        "vocab_size",
        "original_max_seq_len",
        "100",
    ]
    assert absurd_sizes(config(max_seq_len=MAX_ROTATIONS // 6), 99) == []
    assert "lower it to" in absurd_sizes(config(max_seq_len=MAX_ROTATIONS // 6 + 1), 99)[0]
