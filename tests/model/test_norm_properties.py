"""What holds exactly of RMSNorm and LayerNorm, and what must not; float64, ε = 0.

The list is from the papers: Zhang & Sennrich 2019 (invariances), Jiang 2023 (pre-LN = pre-RMS).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillama.config import ModelConfig
from minillama.model.norms import LayerNorm, RMSNorm
from minillama.model.transformer import Transformer

DIM = 7
EXACT = {"rtol": 4e-15, "atol": 4e-15}


def rms(x):
    return RMSNorm(x.shape[-1], eps=0.0).double()(x)


def ln(x):
    return LayerNorm(x.shape[-1], eps=0.0).double()(x)


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def orthogonal(dim, seed=0):
    return torch.linalg.qr(draw(dim, dim, seed=seed))[0]


def differs(one, other):
    return (one - other).abs().max() > 1e-2


# ---------------------------------------------------------------- invariances


@given(st.floats(1e-3, 1e3), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_rms_is_the_same_for_a_rescaled_input(alpha, seed):
    x = draw(5, DIM, seed=seed)
    torch.testing.assert_close(rms(alpha * x), rms(x), **EXACT)


@pytest.mark.parametrize("dim", [1, 3, 64, 123])
def test_rms_is_the_same_to_the_bit_for_an_input_times_8(dim):
    x = draw(9, dim).float()
    norm = RMSNorm(dim, eps=0.0)
    assert torch.equal(norm(8 * x), norm(x))


def test_rms_turns_with_the_sign():
    x = draw(5, DIM)
    torch.testing.assert_close(rms(-x), -rms(x), **EXACT)


def test_rms_is_the_same_for_rescaled_weights_before_it():
    x, w = draw(5, 4), draw(DIM, 4, seed=1)
    torch.testing.assert_close(rms(x @ (3.7 * w).T), rms(x @ w.T), **EXACT)


def test_rms_turns_with_an_orthogonal_matrix():
    x, q = draw(5, DIM), orthogonal(DIM)
    torch.testing.assert_close(rms(x @ q), rms(x) @ q, **EXACT)


def test_ln_is_rms_of_the_centred_input():
    x = draw(5, DIM)
    torch.testing.assert_close(ln(x), rms(x - x.mean(-1, keepdim=True)), **EXACT)


@pytest.mark.parametrize("shift", [-3.0, 0.5, 40.0])
def test_ln_is_the_same_for_a_shifted_input(shift):
    x = draw(5, DIM)
    torch.testing.assert_close(ln(x + shift), ln(x), rtol=1e-13, atol=1e-13)


def test_ln_is_the_same_for_shifted_weights_before_it():
    x, w, v = draw(5, 4), draw(DIM, 4, seed=1), draw(4, seed=2)
    shifted = w + torch.ones(DIM, 1, dtype=torch.float64) * v
    torch.testing.assert_close(ln(x @ shifted.T), ln(x @ w.T), rtol=2e-14, atol=2e-14)


# ---------------------------------------------------------------- and what must not hold


def test_rms_changes_under_a_shift():
    x = draw(5, DIM)
    assert differs(rms(x + 0.5), rms(x))


def test_rms_changes_when_the_weights_before_it_are_centred():
    x, w = draw(5, 4), draw(DIM, 4, seed=1)
    assert differs(rms(x @ (w - w.mean(0)).T), rms(x @ w.T))


def test_rms_changes_when_one_row_of_the_weights_is_rescaled():
    x, w = draw(5, 4), draw(DIM, 4, seed=1)
    scaled = w.clone()
    scaled[0] *= 2
    assert differs(rms(x @ scaled.T), rms(x @ w.T))


def test_ln_does_not_turn_with_an_orthogonal_matrix():
    x, q = draw(5, DIM), orthogonal(DIM)
    assert differs(ln(x @ q), ln(x) @ q)


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("dim", [2, 7, 31])
def test_jacobian_has_one_zero_singular_value_and_the_rest_1_over_r(dim):
    x = draw(dim)
    r = x.square().mean().sqrt()
    jacobian = torch.autograd.functional.jacobian(rms, x)
    identity = torch.eye(dim, dtype=torch.float64)
    expected = (identity - torch.outer(x, x) / (dim * r**2)) / r
    torch.testing.assert_close(jacobian, expected, rtol=1e-13, atol=1e-14)
    values = torch.linalg.svdvals(jacobian)
    assert values[-1] < 1e-14
    torch.testing.assert_close(values[:-1], (1 / r).expand(dim - 1), rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("norm", [rms, ln])
def test_the_gradient_is_orthogonal_to_the_input(norm):
    x = draw(5, DIM).requires_grad_()
    (gradient,) = torch.autograd.grad((norm(x) * draw(5, DIM, seed=1)).sum(), x)
    assert gradient.abs().max() > 0.1
    assert (gradient * x).sum(-1).abs().max() < 4e-15


@pytest.mark.parametrize("norm", [rms, ln])
def test_the_gradient_at_a_rescaled_input_is_rescaled_inversely(norm):
    def gradient(x):
        x = x.requires_grad_()
        return torch.autograd.grad((norm(x) * draw(5, DIM, seed=1)).sum(), x)[0]

    torch.testing.assert_close(
        gradient(5.0 * draw(5, DIM)), gradient(draw(5, DIM)) / 5.0, rtol=1e-13, atol=4e-15
    )


def float64_model(seed=0, **norm):
    config = ModelConfig(
        vocab_size=19,
        dim=12,
        n_layers=2,
        n_heads=3,
        ffn_dim=20,
        max_seq_len=9,
        tie_embeddings=False,
        init="fan_in",
        norm=norm,
    )
    return Transformer(config, seed=seed).double()


def gains_moved(model):
    for name, weight in model.named_parameters():
        if "_norm." in name:
            weight.data += 0.3 * draw(*weight.shape, seed=len(name))
    return model


TOKENS = torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(
    ("norm", "before_a_norm"),
    [
        ({"placement": "reordered"}, ("o_proj", "down_proj")),
        ({"placement": "peri"}, ("o_proj", "down_proj")),
        ({"qk_norm": "full"}, ("q_proj", "k_proj")),
        ({"qk_norm": "head"}, ("q_proj", "k_proj")),
        ({"placement": "hybrid"}, ("q_proj", "k_proj", "v_proj")),
        ({"embed_norm": True}, ("embed",)),
    ],
    ids=str,
)
def test_a_weight_before_a_norm_is_orthogonal_to_its_gradient(norm, before_a_norm, kind):
    model = gains_moved(float64_model(kind=kind, eps=0.0, **norm))
    model.loss(TOKENS, TOKENS.roll(-1, 1)).backward()
    for name, weight in model.named_parameters():
        role = name.split(".")[-2]
        if "_norm." in name or role not in {*before_a_norm, "gate_proj", "lm_head"}:
            continue
        product = (weight * weight.grad).sum().abs()
        size = weight.norm() * weight.grad.norm()
        assert size > 0
        if role in before_a_norm:
            assert product < 1e-14 * max(1.0, size), name
        else:
            assert product > 1e-4 * size, name


# ---------------------------------------------------------------- pre-LN = pre-RMS (Jiang 2023)


def as_pre_rms(model):
    """Convert a pre-LN model without β into a pre-RMS model that computes the same.

    Each weight that writes to the residual stream is multiplied by I − 11ᵀ/d, so that the stream
    has mean zero, where LayerNorm is RMSNorm.
    """
    dim = model.config.dim
    affine = model.config.norm.options["affine"]
    norm = model.config.norm.model_copy(update={"kind": "rmsnorm", "options": {"affine": affine}})
    converted = Transformer(model.config.model_copy(update={"norm": norm})).double()
    centre = torch.eye(dim, dtype=torch.float64) - 1 / dim
    state = dict(model.state_dict())
    for name, weight in state.items():
        if name == "embed.weight":
            state[name] = weight @ centre
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            state[name] = centre @ weight
    converted.load_state_dict(state)
    return converted


@pytest.mark.parametrize("options", [{"bias": False}, {"affine": False}], ids=str)
def test_a_pre_ln_model_equals_a_pre_rms_model_with_centred_weights(options):
    model = gains_moved(float64_model(kind="layernorm", options=options))
    converted = as_pre_rms(model)
    torch.testing.assert_close(converted(TOKENS), model(TOKENS), rtol=1e-12, atol=1e-12)
    uncentred = Transformer(converted.config).double()
    uncentred.load_state_dict(model.state_dict())
    assert differs(uncentred(TOKENS), model(TOKENS))  # it is the centring that does it
