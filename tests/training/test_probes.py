import math

import pytest
import torch

from minillama.config import ModelConfig
from minillama.model.transformer import Transformer
from minillama.training import probes
from minillama.training.probes import StepProbe

LAYER = {
    "residual_rms",
    "kurtosis",
    "attention_logit_max",
    "attention_entropy",
    "grad_rms",
    "update_ratio",
}


def build(**fields):
    shape = {"vocab_size": 13, "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    return Transformer(ModelConfig(**shape, max_seq_len=8, init="fan_in", **fields), seed=1)


def tokens(n_windows=2):
    return torch.randint(0, 13, (n_windows, 8), generator=torch.Generator().manual_seed(0))


def probed_step(model, tokens_BT, lr=0.1):
    """Make one plain step down the gradient, probed; return the probe and the weights before."""
    model.zero_grad()
    model.loss(tokens_BT, tokens_BT).backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    probe = StepProbe(model, tokens_BT)
    probe.before_update()
    torch.optim.SGD(model.parameters(), lr=lr).step()
    return probe.after_update(), before


@pytest.mark.parametrize("placement", ["pre", "post", "peri", "rezero", "hybrid", "ngpt"])
def test_every_layer_and_the_output_have_their_measures(placement):
    probe, _ = probed_step(build(norm={"placement": placement}), tokens())
    assert list(probe) == ["layer_0", "layer_1", "output"]
    assert set(probe["layer_0"]) == set(probe["layer_1"]) == LAYER
    assert set(probe["output"]) == {"log_z_sq"}
    assert all(math.isfinite(v) for values in probe.values() for v in values.values())


def test_the_numbers_are_those_of_the_definitions():
    model, tokens_BT = build(norm={"qk_norm": "head"}), tokens()
    residuals, inputs = [], []
    for block in model.blocks:
        block.register_forward_hook(lambda m, a, out: residuals.append(out.double()))
        block.attention.register_forward_pre_hook(lambda m, args: inputs.append(args))
    with torch.no_grad():
        log_z = model(tokens_BT).double().logsumexp(-1)
        queries_keys = [
            b.attention.qkv(*a[:2])[:2] for b, a in zip(model.blocks, inputs, strict=True)
        ]
    probe, before = probed_step(model, tokens_BT, lr=0.1)
    assert probe["output"]["log_z_sq"] == pytest.approx(log_z.square().mean().item(), rel=1e-5)
    for index, block in enumerate(model.blocks):
        got = probe[f"layer_{index}"]
        x = residuals[index]
        s2 = x.square().mean((0, 1))
        kurtosis = (s2**2).mean() / s2.mean() ** 2
        assert got["residual_rms"] == pytest.approx(x.square().mean().sqrt().item(), rel=1e-5)
        assert got["kurtosis"] == pytest.approx(kurtosis.item(), rel=1e-5)

        q, k = (y.double() for y in queries_keys[index])
        k = k.repeat_interleave(2, dim=1)
        logits = q @ k.mT / math.sqrt(4)
        seen = torch.ones(8, 8, dtype=torch.bool).tril()
        p = logits.masked_fill(~seen, -math.inf).softmax(-1)
        entropy = -torch.xlogy(p, p).sum(-1).mean()
        assert got["attention_entropy"] == pytest.approx(entropy.item(), rel=1e-5)
        assert got["attention_logit_max"] == pytest.approx(
            logits.abs()[..., seen].max().item(), rel=1e-5
        )

        gradients = torch.cat([p.grad.flatten() for p in block.parameters()]).double()
        rms = gradients.square().mean().sqrt().item()
        assert got["grad_rms"] == pytest.approx(rms, rel=1e-5)
        names = [f"blocks.{index}.{name}" for name, _ in block.named_parameters()]
        size = torch.cat([before[name].flatten() for name in names]).double().norm()
        assert got["update_ratio"] == pytest.approx(
            (0.1 * gradients.norm() / size).item(), rel=1e-3
        )


def test_kurtosis_goes_from_one_to_the_width():
    layer = {}
    flat, spike = torch.ones(1, 2, 16), torch.zeros(1, 2, 16)
    spike[..., 3] = 7
    for x, expected in ((flat, 1.0), (spike, 16.0)):
        probes._residual_hook(layer)(None, None, x)
        assert layer["kurtosis"].item() == pytest.approx(expected)


def test_a_logit_that_the_mask_hides_is_not_the_largest():
    k_BHTK = torch.arange(8.0).view(1, 1, 8, 1)
    q_BHTK = torch.ones(1, 1, 8, 1)
    q_BHTK[0, 0, 0] = 100  # the first position sees only itself, and there k is 0
    assert probes._attention_extremes(q_BHTK, k_BHTK)[0].item() == 7


def test_attention_is_the_same_in_parts_of_any_size(monkeypatch):
    q, k = torch.randn(2, 2, 4, 8, 4, generator=torch.Generator().manual_seed(0)).unbind()
    whole = probes._attention_extremes(q, k)
    monkeypatch.setattr(probes, "_LOGITS_AT_ONCE", 70)  # two rows of 4 heads · 8 positions
    for part, one in zip(probes._attention_extremes(q, k), whole, strict=True):
        torch.testing.assert_close(part, one)


def test_a_probe_changes_no_gradient_and_leaves_no_hook():
    plain, probed = build(), build()
    for model in (plain, probed):
        model.loss(tokens(), tokens()).backward()
    probe = StepProbe(probed, tokens())
    probe.before_update()
    for a, b in zip(plain.parameters(), probed.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, b.grad)
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in probed.modules()]
    assert not any(hooks)


def test_only_the_first_windows_are_read():
    model = build()
    many = tokens(6)
    few, _ = probed_step(model, many[: probes.WINDOWS])
    again, _ = probed_step(build(), many)
    assert few["layer_0"]["residual_rms"] == again["layer_0"]["residual_rms"]


@pytest.mark.parametrize("kind", ["dyt", "derf"])
def test_saturation_is_the_share_of_squashed_features(kind):
    model, seen = build(norm={"kind": kind, "options": {"alpha": 2.0}}), []
    for name, norm in model.blocks[1].named_modules():
        if name.endswith("_norm") and list(norm.parameters()):
            norm.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    with torch.no_grad():
        model.embed.weight *= 4
        model(tokens())
    shares = [(2.0 * x.double()).abs().gt(2).double().mean().item() for x in seen]
    assert len(shares) == 2
    probe, _ = probed_step(model, tokens(), lr=0.0)
    assert 0.1 < sum(shares) / 2 < 0.9
    assert probe["layer_1"]["saturation"] == pytest.approx(sum(shares) / 2, abs=1e-6)
    assert set(probe["layer_0"]) == LAYER | {"saturation"}
