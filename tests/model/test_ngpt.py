"""nGPT against the equations of its paper (2410.01131), written out in float64."""

import math

import pytest
import torch

from minillama import ModelConfig, Transformer
from minillama.model.kv_cache import KVCache
from minillama.model.ngpt import LearnedScale, normalise_weights

V, D, L, H, F = 31, 24, 3, 4, 40
NGPT = {"kind": "l2norm", "placement": "ngpt"}
TOKENS = torch.randint(V, (2, 11), generator=torch.Generator().manual_seed(1))


def build(n_kv_heads=H, tied=False):
    model = Transformer(
        ModelConfig(
            vocab_size=V,
            dim=D,
            n_layers=L,
            n_heads=H,
            n_kv_heads=n_kv_heads,
            ffn_dim=F,
            max_seq_len=16,
            tie_embeddings=tied,
            norm=NGPT,
        )
    ).double()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim < 2:  # also below zero, where a is its absolute value
            weight.data *= 1 + torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return model


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def rotated(x_BTHK):
    """RoPE, features j and j + K/2 together."""
    n_tokens, half = x_BTHK.shape[1], x_BTHK.shape[3] // 2
    angle = torch.outer(
        torch.arange(n_tokens, dtype=torch.float64),
        10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half),
    )[:, None]
    one, other = x_BTHK[..., :half], x_BTHK[..., half:]
    return torch.cat(
        (one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()), -1
    )


def logits_by_hand(model):
    """Equations 4 to 21 of the paper, each learned scale stored as its code stores it."""
    w = model.state_dict()
    n_kv_heads = model.config.n_kv_heads
    K, base = D // H, D**-0.5
    h = w["embed.weight"][TOKENS]
    mask = torch.ones(11, 11, dtype=torch.bool).tril()
    for layer in range(L):
        p = f"blocks.{layer}."
        q, k, v = (
            (h @ w[f"{p}attention.{name}_proj.weight"].T).unflatten(-1, (-1, K)) for name in "qkv"
        )
        s_qk = (w[f"{p}attention.qk_scale.weight"] / base).view(n_kv_heads, K)
        k = s_qk * unit(rotated(k))
        q = s_qk.repeat_interleave(H // n_kv_heads, 0) * unit(rotated(q))
        k, v = (y.repeat_interleave(H // n_kv_heads, 2) for y in (k, v))
        scores = math.sqrt(K) * torch.einsum("bthk,bshk->bhts", q, k)
        p_BHTS = scores.masked_fill(~mask, -math.inf).softmax(-1)
        y = torch.einsum("bhts,bshk->bthk", p_BHTS, v).flatten(2)
        h_a = unit(y @ w[f"{p}attention.o_proj.weight"].T)
        step = (w[f"{p}attention_step.weight"] * 0.05 / base).abs()
        h = unit(h + step * (h_a - h))
        gate = h @ w[f"{p}mlp.gate_proj.weight"].T * w[f"{p}mlp.gate_scale.weight"] * D**0.5
        up = h @ w[f"{p}mlp.up_proj.weight"].T * w[f"{p}mlp.up_scale.weight"]
        h_m = unit((gate * gate.sigmoid() * up) @ w[f"{p}mlp.down_proj.weight"].T)
        step = (w[f"{p}mlp_step.weight"] * 0.05 / base).abs()
        h = unit(h + step * (h_m - h))
    head = w["embed.weight" if model.config.tie_embeddings else "lm_head.weight"]
    return h @ head.T * w["logit_scale.weight"] / base


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_logits_and_loss_are_those_of_the_equations(n_kv_heads, tied):
    model = build(n_kv_heads, tied)
    with torch.no_grad():
        logits, expected = model(TOKENS), logits_by_hand(model)
        # The table of rotations is float32.
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        loss = model.loss(TOKENS, TOKENS)
        reference = torch.nn.functional.cross_entropy(expected.flatten(0, 1), TOKENS.flatten())
        torch.testing.assert_close(loss, reference, rtol=1e-6, atol=1e-6)


def test_a_watched_projection_changes_nothing():
    model = build()
    with torch.no_grad():
        expected = model(TOKENS)
        for name, module in model.named_modules():
            if name.endswith(("_proj", "lm_head")):
                module.register_forward_hook(lambda *args: None)
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_decoding_token_by_token_is_the_whole():
    model, pad_B = build(n_kv_heads=2), torch.tensor([0, 3])
    cache = KVCache(model.config, 2, 16, pad_B=pad_B, dtype=torch.float64)
    parts = [model(TOKENS[:, :5], cache)]
    parts += [model(TOKENS[:, t : t + 1], cache) for t in range(5, 11)]
    logits = torch.cat(parts, dim=1)
    torch.testing.assert_close(logits[0], model(TOKENS[:1])[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(logits[1, 3:], model(TOKENS[1:, 3:])[0], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_vectors_of_the_width_have_length_one_and_keep_their_direction():
    model = build(n_kv_heads=2)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        if weight.ndim == 2:
            weight *= 3
    normalise_weights(model)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, before[name], rtol=1e-6, atol=1e-7, msg=name)
        if weight.ndim == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            length = weight.norm(dim=0 if writes else 1)
            torch.testing.assert_close(length, torch.ones_like(length), rtol=1e-12, atol=0)


@torch.no_grad()
def test_a_row_of_zeros_stays_zero():
    model = build()
    model.embed.weight[3] = 0
    normalise_weights(model)
    assert not model.embed.weight[3].any()


def test_a_learned_scale_moves_in_proportion_to_what_it_stores():
    scale = LearnedScale(3, start=0.05, stored=0.1)
    torch.testing.assert_close(scale(), torch.full((3,), 0.05))
    scale.weight.data += 0.02  # as large as Adam's step
    torch.testing.assert_close(scale(), torch.full((3,), 0.06))
