"""Attention against loops over heads and positions in float64."""

import math

import pytest
import torch

from minillama.config import ModelConfig
from minillama.errors import ConfigError
from minillama.model.attention import Attention
from minillama.model.rope import RotaryEmbedding, Rotation

HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1), "one head": (1, 1), "GQA of 6": (6, 2)}


def build(n_heads, n_kv_heads, *, head_dim=6, qkv_norm=False, gate="none", **norm):
    config = ModelConfig(
        dim=10,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        attention_gate=gate,
        norm=norm,
    )
    attention = Attention(config, qkv_norm=qkv_norm).double()
    generator = torch.Generator().manual_seed(0)
    for weight in attention.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    rope = RotaryEmbedding(head_dim, 32)
    return attention, rope


def draw(batch=2, n_tokens=7):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, n_tokens, 10, generator=generator, dtype=torch.float64)


def rms(x, gain):
    return x / math.sqrt(float(x.square().mean()) + 1e-6) * gain


def turn(x, position, theta=10_000.0):
    half = len(x) // 2
    y = x.clone()
    for j in range(half):
        angle = position / theta ** (2 * j / len(x))
        y[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
        y[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
    return y


def attention_values_normed(attention):
    return getattr(attention.v_norm, "weight", 0) is None  # an RMSNorm without a gain


@torch.no_grad()
def by_hand(attention, x, *, norm="none"):
    """One query head, one query and one key at a time."""
    weights = dict(attention.named_parameters())
    n_heads, n_kv_heads, size = attention.n_heads, attention.n_kv_heads, attention.head_dim
    out = torch.zeros(*x.shape[:2], n_heads * size, dtype=torch.float64)

    def project(x, name, head, gains):
        whole = weights[f"{name}_proj.weight"] @ x
        part = slice(head * size, (head + 1) * size)
        if name == "v" and attention_values_normed(attention):
            return rms(whole[part], 1.0)
        if norm == "full" and name in gains:
            return rms(whole, weights[f"{name}_norm.weight"])[part]
        if norm != "none" and name in gains:
            return rms(whole[part], weights[f"{name}_norm.weight"])
        return whole[part]

    gains = {"none": "", "head": "qk", "full": "qk", "qkv": "qkv"}[norm]
    for b in range(x.shape[0]):
        for head in range(n_heads):
            kv_head = head // (n_heads // n_kv_heads)
            for t in range(x.shape[1]):
                q = turn(project(x[b, t], "q", head, gains), t)
                keys = [turn(project(x[b, s], "k", kv_head, gains), s) for s in range(t + 1)]
                values = [project(x[b, s], "v", kv_head, gains) for s in range(t + 1)]
                scores = torch.stack([q @ key for key in keys]) / math.sqrt(size)
                p = (scores - scores.max()).exp()
                mixed = (p / p.sum()) @ torch.stack(values)
                if "g_proj.weight" in weights:
                    gates = weights["g_proj.weight"] @ x[b, t]
                    of_head = gates.reshape(n_heads, -1)[head]
                    mixed = mixed / (1 + (-of_head).exp())
                out[b, t, head * size : (head + 1) * size] = mixed
    return out @ weights["o_proj.weight"].T


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
def test_attention_equals_loops_over_heads_and_positions(heads, qk_norm):
    attention, rope = build(*heads, qk_norm=qk_norm)
    x = draw(batch=1, n_tokens=5)
    y = attention(x, rope(torch.arange(5), torch.float64))
    # The table is float32, the loops' angles are float64.
    torch.testing.assert_close(y, by_hand(attention, x, norm=qk_norm), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_queries_keys_and_values_normed_by_the_kind_of_the_model(heads):
    attention, rope = build(*heads, qkv_norm=True)
    x = draw(batch=1, n_tokens=5)
    y = attention(x, rope(torch.arange(5), torch.float64))
    torch.testing.assert_close(y, by_hand(attention, x, norm="qkv"), rtol=1e-5, atol=2e-5)
    shapes = {name: tuple(w.shape) for name, w in attention.named_parameters() if "_norm" in name}
    assert shapes == {f"{p}_norm.weight": (6,) for p in "qkv"}
    layernorm, _ = build(*heads, qkv_norm=True, kind="layernorm")
    assert type(layernorm.v_norm).__name__ == "LayerNorm"


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("gate", ["none", "head", "element"])
@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
def test_normed_values_and_a_gate_equal_loops(heads, qk_norm, gate):
    attention, rope = build(*heads, qk_norm=qk_norm, v_norm=True, gate=gate)
    x = draw(batch=1, n_tokens=4)
    y = attention(x, rope(torch.arange(4), torch.float64))
    torch.testing.assert_close(y, by_hand(attention, x, norm=qk_norm), rtol=1e-5, atol=2e-5)
    assert not [name for name, _ in attention.named_parameters() if "v_norm" in name]
    n_gates = {"none": 0, "head": heads[0], "element": heads[0] * 6}[gate]
    assert (attention.g_proj.weight.shape if n_gates else (0, 10)) == (n_gates, 10)


def test_a_zero_centred_gain_of_qk_norm_starts_at_zero_and_counts_from_one():
    config = ModelConfig(dim=10, n_heads=1, head_dim=6, norm={"qk_norm": "head"})
    offset = config.model_copy(
        update={"norm": config.norm.model_copy(update={"qk_unit_offset": True})}
    )
    plain, centred = Attention(config).double(), Attention(offset).double()
    assert torch.equal(centred.q_norm.weight, torch.zeros(6).double())
    assert torch.equal(centred.k_norm.weight, torch.zeros(6).double())
    centred.load_state_dict(
        {n: w - 1 if "_norm" in n else w for n, w in plain.state_dict().items()}
    )
    rotation = RotaryEmbedding(6, 32)(torch.arange(7), torch.float64)
    torch.testing.assert_close(centred(draw(), rotation), plain(draw(), rotation))


def test_query_head_i_reads_kv_head_i_over_the_group_size():
    attention, rope = build(6, 2)
    x = draw(n_tokens=4)
    rotation = rope(torch.arange(4), torch.float64)

    def heads_out(x):
        """What each query head hands to o_proj, (B, T, H, K)."""
        seen = []
        hook = attention.o_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        attention(x, rotation)
        hook.remove()
        return seen[0].unflatten(-1, (6, 6))

    before = heads_out(x)
    with torch.no_grad():
        attention.v_proj.weight[6:] *= 2  # kv head 1
    changed = (heads_out(x) - before).abs().amax((0, 1, 3)) > 1e-6
    assert changed.tolist() == [False, False, False, True, True, True]


@pytest.mark.parametrize(("qk_norm", "shapes"), [("head", (6, 6)), ("full", (24, 12))])
def test_qk_norm_has_a_gain_of_a_head_or_of_the_whole_projection(qk_norm, shapes):
    attention, _ = build(4, 2, qk_norm=qk_norm, kind="layernorm", eps=0.25)
    assert type(attention.q_norm).__name__ == "RMSNorm"  # for every kind of the model's norms
    assert attention.q_norm.eps == attention.k_norm.eps == 0.25
    assert (attention.q_norm.weight.numel(), attention.k_norm.weight.numel()) == shapes


def test_qkv_hands_out_what_attention_uses():
    attention, rope = build(4, 2, qk_norm="head")
    rotation = rope(torch.arange(7), torch.float64)
    q, k, v = attention.qkv(draw(), rotation)
    assert q.shape == (2, 4, 7, 6)
    assert k.shape == v.shape == (2, 2, 7, 6)
    unturned = Rotation(torch.ones_like(rotation.cos), torch.zeros_like(rotation.sin))
    plain = attention.qkv(draw(), unturned)[0]
    torch.testing.assert_close(plain.square().mean(-1), q.square().mean(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_no_output_feels_a_later_input(heads):
    attention, rope = build(*heads, qk_norm="full")
    x = draw().requires_grad_()
    y = attention(x, rope(torch.arange(7), torch.float64))
    for t in range(7):
        (gradient,) = torch.autograd.grad(y[:, t].sum(), x, retain_graph=True)
        assert (gradient[:, t + 1 :] == 0).all()
        assert (gradient[:, : t + 1].abs().amax((0, 2)) > 0).all()


def test_rows_of_a_batch_do_not_see_each_other():
    attention, rope = build(4, 2)
    x, rotation = draw(), rope(torch.arange(7), torch.float64)
    alone = torch.cat([attention(row[None], rotation) for row in x])
    torch.testing.assert_close(attention(x, rotation), alone, rtol=1e-12, atol=1e-12)


def test_the_mask_says_which_keys_are_seen():
    attention, rope = build(4, 2)
    x, rotation = draw(n_tokens=3), rope(torch.arange(3), torch.float64)
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    torch.testing.assert_close(
        attention(x, rotation, mask=causal), attention(x, rotation), rtol=1e-12, atol=1e-12
    )
    itself = torch.eye(3, dtype=torch.bool)
    alone = torch.cat(
        [attention(x[:, t : t + 1], Rotation(*(y[t : t + 1] for y in rotation))) for t in range(3)],
        dim=1,
    )
    torch.testing.assert_close(attention(x, rotation, mask=itself), alone, rtol=1e-12, atol=1e-12)


def test_no_projection_has_a_bias():
    attention, _ = build(4, 2)
    assert sorted(name for name, _ in attention.named_parameters()) == [
        "k_proj.weight",
        "o_proj.weight",
        "q_proj.weight",
        "v_proj.weight",
    ]


@pytest.mark.parametrize("qk_norm", ["head", "full"])
def test_normed_queries_are_not_normed_once_more(qk_norm):
    with pytest.raises(ConfigError, match=rf"model\.norm\.qk_norm = '{qk_norm}'.*leave this"):
        build(2, 2, qkv_norm=True, qk_norm=qk_norm)
