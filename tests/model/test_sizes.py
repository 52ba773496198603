import pytest

from minillama.config import ModelConfig
from minillama.model.sizes import MAX_ROTATIONS, MAX_SIZE, absurd_sizes, misfits
from minillama.model.transformer import Transformer

SHAPE = {"vocab_size": 11, "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6}
MLP = ("gate", "up", "down")


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
        ({"ffn_dim": 40}, [f"blocks.{i}.mlp.{n}_proj.weight" for i in (0, 1) for n in MLP]),
        (
            {"n_kv_heads": 4},
            [f"blocks.{i}.attention.{n}_proj.weight" for i in (0, 1) for n in "kv"],
        ),
    ],
)
def test_what_differs_is_named(changed, named):
    shapes = {name: weight.shape for name, weight in Transformer(config()).state_dict().items()}
    errors_in = misfits(config(**changed), shapes)
    assert [error.partition(" is ")[0] for error in errors_in] == named


def test_what_is_missing_or_has_no_place_is_named():
    shapes = {name: weight.shape for name, weight in Transformer(config()).state_dict().items()}
    errors_in = misfits(config(n_layers=3), shapes)
    assert all(e.startswith("blocks.2.") and e.endswith("is missing") for e in errors_in)
    assert len(errors_in) == 9
    errors_in = misfits(config(n_layers=1), shapes)
    assert all(e.startswith("blocks.1.") and e.endswith("is not in the model") for e in errors_in)
    assert len(errors_in) == 9


def test_names_may_be_those_of_another_program():
    names = {name: name.upper() for name in Transformer(config()).state_dict()}
    shapes = {name.upper(): w.shape for name, w in Transformer(config()).state_dict().items()}
    assert misfits(config(), shapes, names) == []
    del shapes["FINAL_NORM.WEIGHT"]
    assert misfits(config(), shapes, names) == ["FINAL_NORM.WEIGHT is missing"]


def test_a_size_that_no_integer_holds_is_an_error_in_one_line():
    shape = config(
        n_heads=MAX_SIZE, n_kv_heads=1, head_dim=MAX_SIZE, dim=MAX_SIZE, ffn_dim=8, max_seq_len=4
    )
    (error,) = misfits(shape, dict.fromkeys("abcd", (1,)))
    assert "too large for any machine" in error


def test_absurd_sizes_are_named():
    scaling = {"kind": "llama3", "original_max_seq_len": MAX_SIZE + 1}
    large = config(vocab_size=2**62, n_layers=100, rope_scaling=scaling)
    errors_in = absurd_sizes(large, 20)
    assert [expected.split(" ")[0] for expected in errors_in] == [
        "vocab_size",
        "original_max_seq_len",
        "100",
    ]
    assert absurd_sizes(config(max_seq_len=MAX_ROTATIONS // 6), 99) == []
    assert "lower it to" in absurd_sizes(config(max_seq_len=MAX_ROTATIONS // 6 + 1), 99)[0]
