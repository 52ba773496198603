"""The maximal update parametrization: its table, its base, its coordinate check, its export."""

import itertools
import math

import pytest
import torch

from minillama.config import ModelConfig, NormConfig
from minillama.config.loading import override, parse_overrides
from minillama.config.run import OWNED_BY_KIND, OptimConfig, parse_run
from minillama.errors import ConfigError
from minillama.model.decoding import Decoder
from minillama.model.folding import fold_scales
from minillama.model.kv_cache import KVCache
from minillama.model.parametrization import initial_std
from minillama.model.transformer import Transformer
from minillama.training.optim import build_optimizer, set_learning_rate

VOCABULARY = 40
TOKENS = torch.randint(VOCABULARY, (4, 17), generator=torch.Generator().manual_seed(0))
MUP = {"parametrization": "mup", "mup": {"base_dim": 32, "base_head_dim": 8, "base_n_layers": 2}}


def config_of(dim=32, n_layers=2, **changes):
    shape = {"vocab_size": VOCABULARY, "dim": dim, "n_layers": n_layers, "n_heads": 4}
    shape |= {"ffn_dim": 3 * dim, "max_seq_len": 16}
    return ModelConfig.model_validate({**shape, **changes})


def train(config, steps, optim=None, lr=1e-2):
    """Return the model after some steps, and its losses."""
    model = Transformer(config, seed=1)
    optim = optim or OptimConfig(lr=lr, weight_decay=0.1)
    optimizer, losses = build_optimizer(model, optim), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        loss.backward()
        set_learning_rate(optimizer, lr)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("init", ["normal", "plain_normal", "fan_in"])
@pytest.mark.parametrize("tied", [True, False])
def test_at_the_base_it_is_the_standard_one_to_the_bit(init, tied):
    standard, losses = train(config_of(init=init, tie_embeddings=tied), 3)
    mup, others = train(config_of(init=init, tie_embeddings=tied, **MUP), 3)
    assert others == losses
    for name, weight in standard.state_dict().items():
        assert torch.equal(mup.state_dict()[name], weight), name


def test_factors_are_those_of_the_papers():
    # Width four times the base, depth three times, heads of four times the features.
    config = config_of(128, 6, tie_embeddings=False, init="plain_normal", **MUP)
    model = Transformer(config)
    optimizer = build_optimizer(model, OptimConfig(lr=1.0, weight_decay=0.1, eps=1e-8))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(parameter)]: (group["lr_factor"], group["weight_decay"], group["eps"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert found["embed.weight"] == (1, 0.1, pytest.approx(1e-8 / 4))
    assert found["lm_head.weight"] == (1, 0.1, pytest.approx(1e-8 / 4))
    for name in ("attention.q_proj", "attention.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        expected = (pytest.approx(1 / 4), pytest.approx(0.4), pytest.approx(1e-8 / 12))
        assert found[f"blocks.0.{name}.weight"] == expected
    gain = found["blocks.0.attention_input_norm.weight"]
    assert gain == (1, 0, pytest.approx(1e-8 / 12))
    assert found["final_norm.weight"] == (1, 0, pytest.approx(1e-8 / 4))
    assert initial_std(config, "embed.weight", 128) == 0.02
    assert initial_std(config, "lm_head.weight", 128) == 0.02
    assert initial_std(config, "blocks.0.mlp.up_proj.weight", 128) == pytest.approx(0.02 / 2)
    divided = config.model_copy(update={"init": "normal"})
    assert initial_std(divided, "blocks.0.mlp.down_proj.weight", 384) == pytest.approx(0.01 / 2)
    fan_in = config.model_copy(update={"init": "fan_in"})
    assert initial_std(fan_in, "blocks.0.mlp.up_proj.weight", 128) == pytest.approx(128**-0.5)
    assert initial_std(fan_in, "embed.weight", 128) == pytest.approx(32**-0.5)
    assert model.logit_factor == 1 / 4
    assert model.blocks[0].output_scale == pytest.approx(1 / 3)


@torch.no_grad()
def test_attention_is_scaled_by_one_over_the_head_dim():
    config = config_of(64, init="fan_in", **MUP)  # heads of 16 features, of 8 at the base
    model = Transformer(config, seed=3).double()
    attention = model.blocks[0].attention
    x = torch.randn(2, 6, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = Transformer(config_of(64)).rope(torch.arange(6), torch.float64)
    q, k, v = attention.qkv(x, plain)
    logits = (q @ k.mT) * math.sqrt(8) / 16
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    weights = logits.masked_fill(~mask, -math.inf).softmax(-1)
    expected = attention.o_proj((weights @ v).transpose(1, 2).flatten(2))
    actual = attention(x, model.rope(torch.arange(6), torch.float64))
    # The table of rotations is in float32.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_every_sub_layer_adds_its_part_of_a_deep_model():
    model = Transformer(config_of(32, 6, **MUP), seed=3).double()
    block = model.blocks[0]
    x = torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rotation = model.rope(torch.arange(6), torch.float64)
    y = x + block.attention(block.attention_input_norm(x), rotation) / 3
    y = y + block.mlp(block.mlp_input_norm(y)) / 3
    torch.testing.assert_close(block(x, rotation), y, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def changes_in_training(config, steps):
    """Return the mean change of the residual stream, of the head's input and of the logits."""
    with torch.enable_grad():
        trained, _ = train(config, steps, OptimConfig(weight_decay=0.0), lr=1e-3)
    found = []
    for model in (Transformer(config, seed=1), trained):
        streams = []
        model.final_norm.register_forward_pre_hook(lambda _, args, to=streams: to.append(args[0]))
        hidden = model.hidden(TOKENS[:, :-1])
        found.append((*streams, hidden / model.logit_factor, model.head(hidden)))
    return [(after - before).abs().mean().item() for before, after in zip(*found, strict=True)]


def slopes(configs, sizes, steps):
    """Return the exponents by which these changes grow with the size."""
    small, large = (changes_in_training(config, steps) for config in configs)
    ratio = math.log(sizes[1] / sizes[0])
    return [math.log(last / first) / ratio for first, last in zip(small, large, strict=True)]


def test_changes_are_flat_in_width_where_the_standard_ones_grow():
    widths = (64, 512)
    mup = {"parametrization": "mup", "mup": {"base_dim": 64, "base_head_dim": 16}}
    stream, hidden, logits = slopes([config_of(d, init="fan_in", **mup) for d in widths], widths, 4)
    assert abs(stream) < 0.1
    assert abs(hidden) < 0.1
    assert -0.25 < logits < 0.1  # those at the start fall with the width
    standard = slopes([config_of(d, init="fan_in") for d in widths], widths, 4)
    assert min(standard) > 0.2
    assert standard[0] > 0.3


def test_changes_are_flat_in_depth_where_those_of_mup_alone_grow():
    depths = (2, 16)
    stream = {}
    for base in (2, None):
        mup = {"parametrization": "mup", "mup": {"base_dim": 64, "base_n_layers": base}}
        configs = [config_of(64, n, init="fan_in", **mup) for n in depths]
        stream[base], _, _ = slopes(configs, depths, 1)
    assert abs(stream[2]) < 0.15
    assert stream[None] > 0.8


NORMS = (
    {},
    {"qk_norm": "head"},
    {"placement": "peri"},
    {"placement": "reordered", "qk_norm": "full", "qk_unit_offset": True},
    {"options": {"unit_offset": True}},
    {"options": {"affine": False}, "placement": "peri"},
    {"kind": "layernorm", "placement": "hybrid"},
    {"kind": "layernorm", "options": {"bias": False}, "placement": "scaled"},
)


@pytest.mark.parametrize(
    ("norm", "tied"),
    list(itertools.product(NORMS, (True, False))),
    ids=lambda value: str(value) if isinstance(value, bool) else "-".join(map(str, value.values())),
)
@torch.no_grad()
def test_a_folded_model_is_a_standard_one_with_the_same_logits(norm, tied):
    mup = {"parametrization": "mup", "mup": {"base_dim": 16, "base_head_dim": 4}}
    if norm.get("placement") != "hybrid":
        mup["mup"]["base_n_layers"] = 1
    model = Transformer(config_of(32, 3, norm=norm, tie_embeddings=tied, **mup), seed=2).double()
    generator = torch.Generator().manual_seed(2)
    for weight in model.parameters():
        if weight.ndim < 2:
            weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    folded = fold_scales(model)
    assert folded.config.parametrization == "standard"
    torch.testing.assert_close(folded(TOKENS[:, :16]), model(TOKENS[:, :16]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("depth", [None, 1])
@torch.no_grad()
def test_decoding_gives_the_logits_of_a_whole_pass(depth):
    mup = {"base_dim": 16, "base_head_dim": 4, "base_n_layers": depth}
    model = Transformer(config_of(32, 3, parametrization="mup", mup=mup), seed=2)
    cache = KVCache(model.config, 1, 8)
    decoder = Decoder(model, cache)
    rows = [decoder.read([int(token)]).clone() for token in TOKENS[0, :8]]
    torch.testing.assert_close(torch.stack(rows, 1), model(TOKENS[:1, :8]), rtol=1e-4, atol=1e-5)


def test_a_norm_without_a_gain_cannot_take_the_factors():
    norm = {"kind": "l2norm", "placement": "peri"}
    model = Transformer(config_of(32, 4, norm=norm, **MUP))
    with pytest.raises(ConfigError, match=r"l2norm.*no gain"):
        fold_scales(model)


def run_with(overrides):
    raw = {"model": {"dim": 32, "n_heads": 4}, "tokenizer": {"kind": "byte"}}
    return parse_run(override(raw, parse_overrides(overrides), OWNED_BY_KIND), "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.mup.base_dim=32"], "of model.parametrization = mup alone"),
        (["model.parametrization=mup", "optim.kind=muon"], "has no rule for"),
        (["model.parametrization=mup", "optim.kind=sgd"], "has no rule for"),
        (["model.parametrization=mup", "model.norm.placement=ngpt"], "normalises all weights"),
        (
            ["model.parametrization=mup", "model.mup.base_n_layers=2", "model.norm.placement=post"],
            "norms or gates the residual stream",
        ),
    ],
)
def test_what_it_has_no_rule_for_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        run_with(changes)


def test_lion_is_scaled_as_adam_is():
    config = run_with(["model.parametrization=mup", "optim.kind=lion"])
    model = Transformer(config_of(128, **MUP))
    factors = {group["lr_factor"] for group in build_optimizer(model, config.optim).param_groups}
    assert factors == {1.0, 0.25}


def test_the_norm_of_a_model_may_be_any():
    for kind in ("layernorm", "scalenorm", "dyt", "derf", "none"):
        model, losses = train(config_of(64, norm=NormConfig(kind=kind), **MUP), 3)
        assert losses[-1] < losses[0], (kind, losses)
        assert model.config.parametrization == "mup"
