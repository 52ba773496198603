import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minillama.config.model import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from minillama.model.rope import RotaryEmbedding, Rotation, inverse_frequencies, rotate
from minillama.model.transformer import Transformer

LLAMA3 = Llama3RopeScaling(
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_seq_len=64,
)
SCALINGS = {
    "default": (None, {"rope_type": "default"}),
    "linear": (
        LinearRopeScaling(kind="linear", factor=3.0),
        {"rope_type": "linear", "factor": 3.0},
    ),
    "llama3": (
        LLAMA3,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


def draw(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


@pytest.mark.parametrize("head_dim", [2, 6, 64])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_and_rotation_equal_those_of_transformers(name, theta, head_dim):
    scaling, parameters = SCALINGS[name]
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            head_dim=head_dim,
            max_position_embeddings=600,
            rope_parameters={"rope_theta": theta, **parameters},
        )
    )
    torch.testing.assert_close(
        inverse_frequencies(head_dim, theta, scaling), theirs.inv_freq, rtol=1e-6, atol=0
    )
    x = draw(2, 3, 600, head_dim)
    positions = torch.arange(600)
    cos, sin = theirs(x, positions[None])
    ours = RotaryEmbedding(head_dim, 600, theta, scaling)(positions, torch.float32)
    half = head_dim // 2
    torch.testing.assert_close(ours.cos, cos[0, :, :half], rtol=0, atol=5e-5)
    torch.testing.assert_close(ours.sin, sin[0, :, :half], rtol=0, atol=5e-5)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(rotate(x, ours), expected, rtol=0, atol=2e-4)


def test_llama3_scaling_has_its_three_ranges():
    plain = inverse_frequencies(64, 10_000.0)
    scaled = inverse_frequencies(64, 10_000.0, LLAMA3)
    wave = 2 * torch.pi / plain
    ratio = scaled / plain
    torch.testing.assert_close(ratio[wave < 64 / 4], torch.ones_like(ratio[wave < 64 / 4]))
    long = ratio[wave > 64]
    torch.testing.assert_close(long, torch.full_like(long, 1 / 8))
    between = ratio[(wave > 64 / 4) & (wave < 64)]
    assert len(between) > 2
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (between.diff() < 0).all()


def test_the_phase_is_right_in_float64_far_from_the_start():
    table = RotaryEmbedding(8, 9000)
    rotation = table(torch.tensor([8999]), torch.float32)
    exponent = torch.arange(0, 8, 2, dtype=torch.float64) / 8
    angle = 8999 / 10_000.0**exponent
    torch.testing.assert_close(rotation.cos[0].double(), angle.cos(), rtol=0, atol=1e-3)
    torch.testing.assert_close(rotation.sin[0].double(), angle.sin(), rtol=0, atol=1e-3)


# ---------------------------------------------------------------- float32 phases in every dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_256_and_257_differ_in_half_precision(dtype):
    assert torch.tensor(257).to(torch.bfloat16) == torch.tensor(256).to(torch.bfloat16)
    model = Transformer(ModelConfig(vocab_size=5, dim=16, n_layers=1, max_seq_len=300)).to(dtype)
    rotation = model.rope(torch.tensor([256, 257]), dtype)
    assert rotation.cos.dtype == dtype
    exact = RotaryEmbedding(4, 300)(torch.tensor([256, 257]), torch.float32)
    torch.testing.assert_close(rotation.cos, exact.cos.to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(rotation.sin, exact.sin.to(dtype), rtol=0, atol=0)
    assert (rotation.cos[0] - rotation.cos[1]).abs().max() > 0.1
    # The same tokens, one place on, end in different logits: every token is the same here, so only
    # the positions distinguish the two.
    x = draw(1, 1, 2, 4).to(dtype)
    turned = rotate(x[:, :, :1].expand(1, 1, 2, 4), rotation)
    assert not torch.equal(turned[:, :, 0], turned[:, :, 1])


def test_a_model_that_was_bfloat16_for_a_while_has_its_table_intact():
    model = Transformer(ModelConfig(vocab_size=5, dim=16, n_layers=1, max_seq_len=300))
    fresh = model.rope(torch.arange(300), torch.float32)
    for changed in (
        copy.deepcopy(model).to(torch.bfloat16).to(torch.float32),
        copy.deepcopy(model).half().float(),
        copy.deepcopy(model).bfloat16().double(),
    ):
        again = changed.rope(torch.arange(300), torch.float32)
        assert torch.equal(again.cos, fresh.cos)
        assert torch.equal(again.sin, fresh.sin)


def test_the_table_is_no_part_of_the_state():
    rope = RotaryEmbedding(8, 20)
    assert not rope.state_dict()
    assert not list(rope.parameters())


def test_a_model_built_on_the_meta_device_has_its_table():
    config = ModelConfig(vocab_size=5, dim=16, n_layers=1, embed_scale="fixed", max_seq_len=7)
    with torch.device("meta"):
        empty = Transformer(config)
    model = Transformer(config, seed=3)
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(model.state_dict())
    tokens = torch.arange(5)[None]
    assert torch.equal(filled(tokens), model(tokens))


# ---------------------------------------------------------------- what a rotation is


def at(position, head_dim=8):
    rotation = RotaryEmbedding(head_dim, 512)(torch.tensor([position]), torch.float64)
    return Rotation(*rotation)


@given(st.integers(0, 511), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_a_rotation_keeps_the_length_of_every_pair(position, seed):
    x = draw(1, 1, 1, 8, seed=seed, dtype=torch.float64)
    y = rotate(x, at(position))

    def lengths(x):
        return torch.stack(x.chunk(2, -1)).norm(dim=0)

    torch.testing.assert_close(lengths(y), lengths(x), rtol=1e-6, atol=1e-6)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 400), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_the_product_of_query_and_key_depends_on_their_distance_alone(m, n, shift, seed):
    q, k = draw(2, 1, 1, 1, 8, seed=seed, dtype=torch.float64)

    def product(m, n):
        return (rotate(q, at(m)) * rotate(k, at(n))).sum()

    torch.testing.assert_close(product(m, n), product(m + shift, n + shift), rtol=0, atol=2e-4)


def test_position_0_is_not_turned_and_pairs_are_half_a_head_apart():
    x = torch.zeros(1, 1, 1, 8, dtype=torch.float64)
    x[..., 1] = 1
    torch.testing.assert_close(rotate(x, at(0)), x)
    y = rotate(x, at(7))
    angle = torch.tensor(7 / 10_000.0 ** (2 / 8), dtype=torch.float64)
    expected = torch.zeros_like(x)
    expected[..., 1], expected[..., 5] = angle.cos(), angle.sin()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


def test_positions_may_differ_by_row():
    rope = RotaryEmbedding(8, 40)
    positions = torch.tensor([[0, 1, 2], [20, 21, 22], [7, 3, 39]])
    x = draw(3, 2, 3, 8)
    together = rotate(x, rope(positions, torch.float32))
    for row in range(3):
        alone = rotate(x[row : row + 1], rope(positions[row], torch.float32))
        assert torch.equal(together[row : row + 1], alone)
