"""Each placement against its formula, written out by hand on the model's own weights in float64."""

import pytest
import torch

from minillama.config import ModelConfig, load_config
from minillama.config.norms import NormConfig
from minillama.config.placement import PLACEMENTS, Placement, Slots, register_placement
from minillama.errors import ConfigError
from minillama.model.transformer import Transformer

LAYERS = 5  # ⌊5 / 4⌋ = 1, so that mix has layers of both sorts
ROWS = [
    *("deepnorm", "hybrid", "keel", "mix", "ngpt", "peri", "peri_scaled", "post", "pre"),
    *("reordered", "rezero", "scaled"),
]


def build(placement, n_layers=LAYERS, **norm):
    model_config = ModelConfig(
        vocab_size=17,
        dim=16,
        n_layers=n_layers,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=16,
        max_seq_len=8,
        init="fan_in",
        norm={"placement": placement, **norm},
    )
    model = Transformer(model_config).double()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim < 2:
            weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return model


TOKENS = torch.randint(17, (2, 8), generator=torch.Generator().manual_seed(1))


def stream_by_hand(model, formula):
    """Run the residual stream with ``formula(x, f, norm, layer, a)`` for each block.

    f holds the two sub-layers, and norm is by name: RMSNorm on the state dict's gain, or a KeyError
    where the placement has none.
    """
    state = model.state_dict()
    rotation = model.rope(torch.arange(TOKENS.shape[1]), torch.float64)

    def norm_called(name):
        gain = state[f"{name}.weight"]
        return lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * gain

    x = state["embed.weight"][TOKENS]
    for index, block in enumerate(model.blocks):
        x = formula(
            x,
            lambda x, block=block: block.attention(x, rotation),
            block.mlp,
            lambda name, index=index: norm_called(f"blocks.{index}.{name}_norm"),
            index,
            state.get(f"blocks.{index}.a", (block.attention_step, block.mlp_step)),
        )
    if "final_norm.weight" in state:
        x = norm_called("final_norm")(x)
    return x


def pre(x, attention, mlp, norm, layer, a):
    x = x + attention(norm("attention_input")(x))
    return x + mlp(norm("mlp_input")(x))


def post(x, attention, mlp, norm, layer, a):
    x = norm("attention_residual")(x + attention(x))
    return norm("mlp_residual")(x + mlp(x))


def reordered(x, attention, mlp, norm, layer, a):
    x = x + norm("attention_output")(attention(x))
    return x + norm("mlp_output")(mlp(x))


def peri(x, attention, mlp, norm, layer, a):
    x = x + norm("attention_output")(attention(norm("attention_input")(x)))
    return x + norm("mlp_output")(mlp(norm("mlp_input")(x)))


def scaled(x, attention, mlp, norm, layer, a):
    x = x + attention(norm("attention_input")(x) / (layer + 1) ** 0.5)
    return x + mlp(norm("mlp_input")(x) / (layer + 1) ** 0.5)


def deepnorm(x, attention, mlp, norm, layer, a):
    x = norm("attention_residual")((2 * LAYERS) ** 0.25 * x + attention(x))
    return norm("mlp_residual")((2 * LAYERS) ** 0.25 * x + mlp(x))


def rezero(x, attention, mlp, norm, layer, a):
    x = x + a * attention(x)
    return x + a * mlp(x)


def mix(x, attention, mlp, norm, layer, a):
    return (post if layer < 1 else pre)(x, attention, mlp, norm, layer, a)


def hybrid(x, attention, mlp, norm, layer, a):
    x = norm("attention_residual")(x + attention(x))
    return x + mlp(x)


def keel(x, attention, mlp, norm, layer, a):
    alpha = 2 * LAYERS  # the number of sub-layers
    x = norm("attention_residual")(alpha * x + attention(norm("attention_input")(x)))
    return norm("mlp_residual")(alpha * x + mlp(norm("mlp_input")(x)))


def peri_scaled(x, attention, mlp, norm, layer, a):
    return peri(x, attention, mlp, norm, layer, a)


def ngpt(x, attention, mlp, norm, layer, a):
    # a is stored as 16 ** -0.5 at the start, for 0.05.
    one, other = (step.weight.detach().abs() * 4 * 0.05 for step in a)
    x = norm("attention_residual")((1 - one) * x + one * norm("attention_output")(attention(x)))
    return norm("mlp_residual")((1 - other) * x + other * norm("mlp_output")(mlp(x)))


FORMULAS = (
    *(pre, post, reordered, peri, scaled, deepnorm, rezero, mix, hybrid),
    *(keel, peri_scaled, ngpt),
)


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda f: f.__name__)
def test_the_residual_stream_follows_the_formula(formula):
    model = build(formula.__name__)
    torch.testing.assert_close(
        model.hidden(TOKENS), stream_by_hand(model, formula), rtol=1e-12, atol=1e-12
    )


def test_every_row_has_its_formula_and_source():
    assert set(ROWS) <= set(PLACEMENTS)  # a test of plugins may have added to them
    assert sorted(f.__name__ for f in FORMULAS) == ROWS
    for name in ROWS:
        row = PLACEMENTS.get(name)
        assert row.formula
        assert row.source


BOTH = ("attention_{}", "mlp_{}")
SLOTS = {
    "pre": (("input",), BOTH, True),
    "post": (("residual",), BOTH, False),
    "reordered": (("output",), BOTH, True),
    "peri": (("input", "output"), BOTH, True),
    "scaled": (("input",), BOTH, True),
    "deepnorm": (("residual",), BOTH, False),
    "rezero": ((), BOTH, False),
    "hybrid": (("residual",), BOTH[:1], True),
    "keel": (("input", "residual"), BOTH, False),
    "peri_scaled": (("input", "output"), BOTH, True),
    "ngpt": (("output", "residual"), BOTH, False),
}


@pytest.mark.parametrize("placement", SLOTS)
def test_the_state_dict_has_exactly_the_norms_of_the_placement(placement):
    slots, sides, final = SLOTS[placement]
    expected = {
        f"blocks.{layer}.{side.format(slot)}_norm.weight"
        for layer in range(LAYERS)
        for side in sides
        for slot in slots
    }
    if placement == "hybrid":
        expected |= {
            f"blocks.{i}.attention.{p}_norm.weight" for i in range(LAYERS) for p in ("q", "k", "v")
        }
    expected |= {"final_norm.weight"} if final else set()
    names = build(placement).state_dict().keys()
    assert {name for name in names if "norm" in name} == expected
    gates = {f"blocks.{layer}.a" for layer in range(LAYERS)} if placement == "rezero" else set()
    assert {name for name in names if name.endswith(".a")} == gates


def test_mix_has_post_norm_in_the_first_quarter_of_the_layers():
    def post_layers(n_layers):
        names = build("mix", n_layers).state_dict()
        return [i for i in range(n_layers) if f"blocks.{i}.mlp_residual_norm.weight" in names]

    assert [post_layers(n) for n in (1, 3, 4, 8)] == [[], [], [0], [0, 1]]


@pytest.mark.parametrize("placement", ROWS)
@pytest.mark.parametrize("final_norm", [True, False])
def test_final_norm_can_be_set_whatever_the_placement(placement, final_norm):
    names = build(placement, final_norm=final_norm).state_dict()
    assert ("final_norm.weight" in names) == final_norm


@pytest.mark.parametrize("placement", ROWS)
def test_embed_norm_norms_the_embedding(placement):
    model = build(placement, embed_norm=True)
    state = model.state_dict()
    x = state["embed.weight"][TOKENS]
    expected = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * state["embed_norm.weight"]
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(TOKENS)
    torch.testing.assert_close(seen[0], expected, rtol=1e-12, atol=1e-12)


def test_kind_none_leaves_every_slot_as_identity():
    model = build("peri", kind="none", embed_norm=True)
    assert not [name for name in model.state_dict() if "norm" in name]
    plain = build("pre", kind="none")
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=0, atol=0)


def test_rezero_starts_as_the_identity_and_its_gate_learns():
    model = build("rezero")
    for block in model.blocks:
        block.a.data.zero_()
    assert torch.equal(model.hidden(TOKENS), model.embed.weight[TOKENS])
    model.loss(TOKENS, TOKENS).backward()
    assert all(block.a.grad.abs() > 0 for block in model.blocks)


def test_deepnorm_divides_the_start_of_some_weights():
    # (8 L)^¼ of values, outputs and the MLP; queries and keys as they are (DeepNet, figure 2).
    plain, deep = build("post").state_dict(), build("deepnorm").state_dict()
    divided = ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for name in plain:
        if "norm" in name:
            continue
        divisor = (8 * LAYERS) ** 0.25 if name.split(".")[-2] in divided else 1.0
        torch.testing.assert_close(
            deep[name], plain[name] / divisor, rtol=1e-6, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("norm", "start"),
    [
        ({}, 9**-0.5),
        ({"kind": "layernorm"}, 9**-0.5),
        ({"kind": "dyt"}, 9**-0.5),
        ({"options": {"unit_offset": True}}, 9**-0.5 - 1),
    ],
    ids=str,
)
def test_peri_scaled_starts_with_a_small_gain_at_the_output(norm, start):
    config = {"vocab_size": 17, "dim": 16, "n_layers": 9, "n_heads": 4, "ffn_dim": 16}
    norm = {"placement": "peri_scaled", **norm}
    model = Transformer(ModelConfig.model_validate(config | {"norm": norm}))
    plain = 0.0 if "options" in norm else 1.0
    for block in model.blocks:
        for outer in (block.attention_output_norm, block.mlp_output_norm):
            torch.testing.assert_close(outer.weight, torch.full((16,), start))
        for inner in (block.attention_input_norm, block.mlp_input_norm, model.final_norm):
            torch.testing.assert_close(inner.weight, torch.full((16,), plain))


def test_peri_scaled_changes_what_each_kind_calls_its_gain():
    config = {"vocab_size": 17, "dim": 16, "n_layers": 4, "n_heads": 4, "ffn_dim": 16}
    norm = {"placement": "peri_scaled", "kind": "scalenorm"}
    model = Transformer(ModelConfig.model_validate(config | {"norm": norm}))
    assert model.blocks[0].mlp_output_norm.g.item() == pytest.approx(4 / 2)
    norm["kind"] = "l2norm"  # no gain: as peri
    assert not list(
        Transformer(ModelConfig.model_validate(config | {"norm": norm}))
        .blocks[0]
        .mlp_output_norm.parameters()
    )


def test_ngpt_norms_queries_and_keys_itself():
    with pytest.raises(ValueError, match="norms q and k itself; leave this at none"):
        NormConfig(kind="l2norm", placement="ngpt", qk_norm="head")


# ---------------------------------------------------------------- rows of one's own


def test_a_row_of_a_users_own_is_used_by_name(scratch_registries):
    def slots(layer, n_layers):
        return Slots(input=True, alpha=2.0, mlp=Slots(output=True))

    def formula(x, attention, mlp, norm, layer, a):
        x = 2 * x + attention(norm("attention_input")(x))
        return 2 * x + norm("mlp_output")(mlp(x))

    register_placement("mine", Placement("2x + …", "a test", slots, final_norm=False))
    assert PLACEMENTS.get("mine").formula == "2x + …"
    model = build("mine")
    torch.testing.assert_close(
        model.hidden(TOKENS), stream_by_hand(model, formula), rtol=1e-12, atol=1e-12
    )


def test_a_plugin_file_may_add_a_row(tmp_path, scratch_registries):
    plugin = tmp_path / "row.py"
    plugin.write_text(
        "from minillama.config.placement import Placement, Slots, register_placement\n"
        "register_placement('double', Placement('N(2x + f(x))', 'a test',\n"
        "    lambda layer, n_layers: Slots(residual=True, alpha=2.0)))\n"
    )
    config = tmp_path / "config.yaml"
    config.write_text(f"plugins: ['{plugin.as_posix()}']\nmodel: {{norm: {{placement: double}}}}\n")
    model = Transformer(load_config(config).model)
    assert model.blocks[0].alpha == 2.0


def test_a_name_that_is_taken_is_refused(scratch_registries):
    row = Placement("x", "a test", lambda layer, n_layers: Slots())
    with pytest.raises(ConfigError, match="norm placement 'pre' is registered already"):
        register_placement("pre", row)


def test_an_unknown_placement_names_the_nearest_and_all():
    with pytest.raises(ValueError, match="did you mean 'peri'") as error:
        NormConfig(placement="perri")
    assert all(name in str(error.value) for name in ROWS)
