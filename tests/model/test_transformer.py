import copy
import io
import math
import pickle

import pytest
import torch

from minillama.config import ModelConfig
from minillama.errors import ConfigError
from minillama.model.kernels import attend, linear_cross_entropy
from minillama.model.norms import norm_parameter_names, register_norm
from minillama.model.transformer import Transformer, initialise
from minillama.sampling import generate

VOCAB, LENGTH = 23, 9


def config(**fields):
    sizes = {"vocab_size": VOCAB, "dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    return ModelConfig(**{**sizes, "ffn_dim": 24, "max_seq_len": LENGTH, **fields})


def build(seed=0, **fields):
    return Transformer(config(**fields), seed=seed)


def ids(*shape, seed=0):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


TOKENS, TARGETS = ids(2, LENGTH), ids(2, LENGTH, seed=1)


# ---------------------------------------------------------------- what it consists of


def test_the_state_has_these_names_and_shapes():
    attention = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 16)}
    mlp = {"gate_proj": (24, 16), "up_proj": (24, 16), "down_proj": (16, 24)}
    expected = {"embed.weight": (VOCAB, 16), "final_norm.weight": (16,)}
    for layer in range(2):
        block = {f"attention.{name}": shape for name, shape in attention.items()}
        block |= {f"mlp.{name}": shape for name, shape in mlp.items()}
        block |= {"attention_input_norm": (16,), "mlp_input_norm": (16,)}
        expected |= {f"blocks.{layer}.{name}.weight": shape for name, shape in block.items()}

    def shapes(model):
        return {name: tuple(value.shape) for name, value in model.state_dict().items()}

    assert shapes(build()) == expected
    assert shapes(build(tie_embeddings=False)) == {**expected, "lm_head.weight": (VOCAB, 16)}


def test_the_sizes_of_a_model_follow_from_its_config():
    model = Transformer(ModelConfig(vocab_size=VOCAB, dim=24, n_heads=3, n_layers=1))
    assert (model.config.n_kv_heads, model.config.head_dim, model.config.ffn_dim) == (3, 8, 64)
    wide = Transformer(config(head_dim=6))
    assert wide.blocks[0].attention.q_proj.weight.shape == (24, 16)
    assert wide(TOKENS).shape == (2, LENGTH, VOCAB)


def test_a_missing_vocabulary_size_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        Transformer(ModelConfig())


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"dim": 18}, "dim = 18: is not divisible by n_heads = 4"),
        ({"dim": 12}, r"head_dim = 3: must be even"),
        ({"head_dim": 7}, "head_dim = 7: must be even"),
        ({"n_kv_heads": 3}, "n_heads = 4: is not divisible by n_kv_heads = 3"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(fields, error):
    with pytest.raises(ValueError, match=error):
        config(**fields)


def test_norm_parameters_are_those_of_the_norms_modules():
    model = build(norm={"placement": "peri", "qk_norm": "full", "embed_norm": True})
    norms = norm_parameter_names(model)
    others = {name for name, _ in model.named_parameters()} - norms
    assert all("_norm.weight" in name for name in norms)
    assert len(norms) == 2 * (4 + 2) + 2
    assert len(others) == 2 * 7 + 1


class WithMatrix(torch.nn.Module):
    """A norm with a matrix, in a module within it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(dim, dim, bias=False)


@pytest.mark.parametrize("build_norm", [WithMatrix, lambda dim: WithMatrix(dim)])
def test_a_norms_parameters_are_known_by_its_class_not_by_a_name(scratch_registries, build_norm):
    register_norm("matrix")(build_norm)
    model = build(norm={"kind": "matrix"})
    model.blocks[0].mlp.scale_norm = torch.nn.Linear(4, 4, bias=False)
    model.readout = WithMatrix(4)
    norms = norm_parameter_names(model)
    assert {"blocks.0.mlp_input_norm.inner.weight", "readout.inner.weight"} <= norms
    assert "blocks.0.mlp.scale_norm.weight" not in norms


# ---------------------------------------------------------------- initial weights


WIDE = {"dim": 128, "ffn_dim": 352, "n_layers": 3, "vocab_size": 512, "n_kv_heads": 4}


@pytest.mark.parametrize("init", ["normal", "plain_normal", "fan_in"])
def test_the_standard_deviations_are_those_documented(init):
    model = build(init=init, tie_embeddings=False, **WIDE)
    norms = norm_parameter_names(model)
    for name, weight in model.named_parameters():
        if name in norms:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        std = {"fan_in": weight.shape[1] ** -0.5}.get(init, 0.02)
        if init == "normal" and name.endswith(("o_proj.weight", "down_proj.weight")):
            std = 0.02 / math.sqrt(2 * 3)
        assert weight.std().item() == pytest.approx(std, rel=0.03), name
        assert weight.mean().abs() < 5 * std / math.sqrt(weight.numel()), name
        assert weight.abs().max() < 6 * std, name


def others(model):
    norms = norm_parameter_names(model)
    return {n: w for n, w in model.state_dict().items() if n not in norms}


@pytest.mark.parametrize(
    "norm",
    [
        {"kind": "layernorm"},
        {"kind": "none"},
        {"kind": "dyt"},
        {"qk_norm": "full", "embed_norm": True},
        {"placement": "reordered", "qk_norm": "head"},
        {"placement": "post"},
        {"placement": "hybrid", "kind": "scalenorm"},
        {"final_norm": False},
    ],
    ids=str,
)
def test_other_norms_leave_the_initial_weights_equal(norm):
    reference, model = others(build(seed=3)), others(build(seed=3, norm=norm))
    assert model.keys() == reference.keys()
    for name, weight in reference.items():
        assert torch.equal(model[name], weight), name


def test_seeds_and_matrices_differ_in_their_initial_weights():
    first, second = others(build(seed=0)), others(build(seed=1))
    for name, weight in first.items():
        assert (weight - second[name]).abs().max() > 0.01, name
    same_shape = [w for n, w in first.items() if n.endswith(("gate_proj.weight", "up_proj.weight"))]
    for place, weight in enumerate(same_shape):
        assert not any(torch.equal(weight, other) for other in same_shape[:place])


def test_more_layers_leave_the_first_ones_as_they_were():
    few, many = (others(build(init="fan_in", n_layers=n)) for n in (2, 4))
    assert all(torch.equal(many[name], weight) for name, weight in few.items())


def test_tied_and_untied_models_share_their_other_weights():
    tied, untied = others(build()), others(build(tie_embeddings=False))
    assert untied.keys() - tied.keys() == {"lm_head.weight"}
    assert all(torch.equal(untied[name], weight) for name, weight in tied.items())
    assert not torch.equal(untied["lm_head.weight"], untied["embed.weight"])


def test_initial_weights_depend_on_nothing_but_seed_and_name():
    expected = build(seed=7).state_dict()
    torch.manual_seed(99)
    torch.rand(3)
    again = build(seed=7).state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        double = build(seed=7).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    moved = build(seed=1)
    with torch.device("meta"):  # as on a machine whose default device is an accelerator
        initialise(moved, 7)
    for name, weight in expected.items():
        assert torch.equal(again[name], weight), name
        assert torch.equal(double[name], weight.double()), name
        assert torch.equal(moved.state_dict()[name], weight), name


def test_loss_at_the_start_is_that_of_guessing():
    assert build().loss(TOKENS, TARGETS).item() == pytest.approx(math.log(VOCAB), abs=0.1)


# ---------------------------------------------------------------- forward


@pytest.mark.parametrize(
    "norm",
    [
        {},
        {"placement": "post", "kind": "layernorm"},
        {"placement": "reordered", "qk_norm": "full"},
        {"placement": "hybrid"},
        {"qk_norm": "head", "embed_norm": True},
    ],
    ids=str,
)
def test_no_logit_feels_a_later_token(norm):
    model = build(init="fan_in", norm=norm)
    x = model.embed(TOKENS).detach().requires_grad_()
    hook = model.embed.register_forward_hook(lambda *_: x)
    logits = model(TOKENS)
    hook.remove()
    for t in range(LENGTH):
        (gradient,) = torch.autograd.grad(logits[:, t].square().sum(), x, retain_graph=True)
        assert (gradient[:, t + 1 :] == 0).all()
        assert (gradient[:, : t + 1].abs().amax(-1) > 0).all()


def test_rows_of_a_batch_do_not_see_each_other():
    model = build(init="fan_in").double()
    alone = torch.cat([model(row[None]) for row in TOKENS])
    torch.testing.assert_close(model(TOKENS), alone, rtol=1e-12, atol=1e-12)


def test_the_head_reads_hidden_states_and_a_tied_one_is_the_embedding():
    model = build(init="fan_in")
    hidden = model.hidden(TOKENS)
    assert hidden.shape == (2, LENGTH, 16)
    torch.testing.assert_close(model(TOKENS), hidden @ model.embed.weight.T)
    untied = build(init="fan_in", tie_embeddings=False)
    torch.testing.assert_close(untied(TOKENS), untied.hidden(TOKENS) @ untied.lm_head.weight.T)


class Adapted(torch.nn.Module):
    """A layer with something added, whose ``weight`` is the layer's, as in peft."""

    def __init__(self, layer, added):
        super().__init__()
        self.layer, self.added = layer, added

    @property
    def weight(self):
        return self.layer.weight

    def forward(self, x):
        return self.layer(x) + self.added(x)


@pytest.mark.parametrize("change", ["adapter", "hook"])
def test_a_changed_head_counts_in_logits_and_loss(change):
    model = build(init="fan_in", tie_embeddings=False, logit_softcap=5.0).double()
    plain = model.hidden(TOKENS) @ model.lm_head.weight.T
    if change == "adapter":
        adapter = torch.nn.Linear(16, VOCAB, bias=False, dtype=torch.float64)
        model.lm_head = Adapted(model.lm_head, adapter)
        wanted = plain + model.hidden(TOKENS) @ adapter.weight.T
    else:
        model.lm_head.register_forward_hook(lambda module, args, logits: 3 * logits)
        wanted = 3 * plain
    wanted = 5 * torch.tanh(wanted / 5)
    torch.testing.assert_close(model(TOKENS), wanted)
    expected = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), TARGETS.flatten())
    torch.testing.assert_close(model.loss(TOKENS, TARGETS), expected)
    model.loss(TOKENS, TARGETS).backward()
    assert all(weight.grad is not None for weight in model.lm_head.parameters())


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match=f"{LENGTH + 1} positions are more than max_seq_len"):
        build()(ids(1, LENGTH + 1))
    assert build()(ids(1, LENGTH)).shape == (1, LENGTH, VOCAB)


def test_embeddings_may_be_scaled_by_a_fixed_or_a_learned_number():
    plain = build(init="fan_in", norm={"kind": "none"}, n_layers=1)
    seen = []
    for embed_scale in ("fixed", "learned"):
        model = build(init="fan_in", norm={"kind": "none"}, n_layers=1, embed_scale=embed_scale)
        assert ("embed_scale" in model.state_dict()) == (embed_scale == "learned")
        model.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        model.loss(TOKENS, TARGETS).backward()
    for x in seen:
        torch.testing.assert_close(x, 4.0 * plain.embed(TOKENS))
    assert model.embed_scale.grad.abs() > 0


def test_a_soft_cap_keeps_logits_below_it():
    plain, capped = (build(init="fan_in", logit_softcap=cap) for cap in (0.0, 2.0))
    logits = plain(TOKENS)
    assert logits.abs().max() > 2
    torch.testing.assert_close(capped(TOKENS), 2 * torch.tanh(logits / 2))


# ---------------------------------------------------------------- loss


def test_the_loss_is_the_mean_over_the_targets_that_count():
    model, targets = build(init="fan_in").double(), TARGETS.clone()
    targets[0, 2:5] = targets[1, 0] = -100
    log_p = model(TOKENS).log_softmax(-1)
    places = [(b, t) for b in (0, 1) for t in range(LENGTH) if targets[b, t] >= 0]
    counted = [-log_p[b, t, targets[b, t]] for b, t in places]
    assert len(counted) == 2 * LENGTH - 4
    sums = model.loss_sums(TOKENS, targets)
    assert sums.n_targets == len(counted)
    torch.testing.assert_close(sums.cross_entropy, sum(counted))
    torch.testing.assert_close(sums.objective, sums.cross_entropy)
    torch.testing.assert_close(model.loss(TOKENS, targets), sum(counted) / len(counted))


def test_targets_that_do_not_count_have_no_gradient():
    model, targets = build(), TARGETS.clone()
    targets[1] = -100
    gradients = []
    for tokens, wanted in ((TOKENS, targets), (TOKENS[:1], targets[:1])):
        model.zero_grad()
        model.loss(tokens, wanted, z_loss=0.1).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_no_target_that_counts_gives_zero_loss_and_zero_gradient(z_loss):
    model = build()
    loss = model.loss(TOKENS, torch.full_like(TARGETS, -100), z_loss)
    assert loss == 0
    loss.backward()
    assert all(not p.grad.any() for p in model.parameters())


def test_z_loss_adds_the_weighted_mean_of_squared_log_z():
    model, targets = build(init="fan_in").double(), TARGETS.clone()
    targets[0, :4] = -100
    log_z = model(TOKENS).logsumexp(-1)[targets != -100]
    plain, sums = model.loss_sums(TOKENS, targets), model.loss_sums(TOKENS, targets, 0.3)
    torch.testing.assert_close(sums.objective - plain.objective, 0.3 * log_z.square().sum())
    torch.testing.assert_close(sums.cross_entropy, plain.cross_entropy)

    x = model.hidden(TOKENS).detach().requires_grad_()
    model.hidden = lambda *_: x
    weight = model.embed.weight
    ours = torch.autograd.grad(
        model.loss(TOKENS, targets, 0.3) - model.loss(TOKENS, targets), [x, weight]
    )
    logits = x @ weight.T
    log_z = torch.logsumexp(logits, -1)
    by_hand = 0.3 * log_z.square()[targets != -100].mean()
    for one, other in zip(ours, torch.autograd.grad(by_hand, [x, weight]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_computes_in_its_dtype_the_loss_in_at_least_float32(dtype):
    model = build(init="fan_in", norm={"qk_norm": "head"})
    expected = model.loss(TOKENS, TARGETS)
    model = model.to(dtype)
    assert model(TOKENS).dtype == dtype
    loss = model.loss(TOKENS, TARGETS, 1e-4)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss.float(), expected, rtol=0.05, atol=0)
    loss.backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm", "scalenorm", "dyt"])
def test_training_under_autocast_works_for_every_placement_of_a_norm(kind):
    for placement in ("pre", "post", "peri", "hybrid", "rezero"):
        model = build(norm={"kind": kind, "placement": placement})
        expected = model.loss(TOKENS, TARGETS)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(TOKENS, TARGETS)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


# ---------------------------------------------------------------- copies


def test_a_model_can_be_copied_pickled_saved_and_loaded():
    model = build(init="fan_in", norm={"kind": "layernorm"})
    expected = model(TOKENS)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = build(seed=5, norm={"kind": "layernorm"})
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(twin(TOKENS), expected)
        twin.embed.weight.data.zero_()
    assert torch.equal(model(TOKENS), expected)


@pytest.mark.parametrize(
    "changed",
    [
        {"norm": {"qk_norm": "head"}},
        {"norm": {"v_norm": True, "placement": "keel"}, "attention_gate": "element"},
        {"norm": {"kind": "l2norm", "placement": "ngpt"}},
    ],
    ids=str,
)
def test_a_compiled_model_computes_the_same_without_a_graph_break(changed):
    model = build(init="fan_in", **changed)
    torch._dynamo.reset()
    # Whether it can be captured whole is the question; machine code would only cost time here.
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    results = []
    for loss_of in (model.loss, compiled):
        model.zero_grad()
        loss = loss_of(TOKENS, TARGETS, 1e-3)
        loss.backward()
        results.append([loss, *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # some 20 s of C++ compiling
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
def test_a_model_in_machine_code_computes_the_same():
    model = build(init="fan_in", norm={"qk_norm": "head"})
    torch._dynamo.reset()
    results = []
    for loss_of in (model.loss, torch.compile(model.loss, fullgraph=True)):
        model.zero_grad()
        loss = loss_of(TOKENS, TARGETS, 1e-3)
        loss.backward()
        results.append([loss, *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_tokens_and_targets_of_another_shape_are_refused():
    model = build()
    for shape in ((), (3,), (1, 3, 1)):
        with pytest.raises(ValueError, match=r"must be \(batch, positions\)"):
            model(torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match="must have the shape of the tokens"):
        model.loss(ids(2, 4), ids(4, 2))


def test_sizes_that_do_not_fit_the_loss_are_refused():
    x, weight = torch.ones(4, 3), torch.ones(5, 3)
    with pytest.raises(ValueError, match="must be x"):
        linear_cross_entropy(x, weight, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be x"):
        linear_cross_entropy(x[:, :2], weight, torch.zeros(4, dtype=torch.int64))


def test_sizes_that_do_not_fit_attention_are_refused():
    q = torch.ones(1, 3, 4, 8)
    for k in (q[:, :2], q[..., :6], q[0]):
        with pytest.raises(ValueError, match="must be q"):
            attend(q, k, k)


def test_a_model_on_the_meta_device_gives_shapes_and_generates_nothing():
    config = ModelConfig(vocab_size=20, dim=16, n_layers=1, n_heads=2, max_seq_len=8)
    with torch.device("meta"):
        model, tokens = Transformer(config), torch.zeros(2, 4, dtype=torch.long)
    assert model(tokens).shape == (2, 4, 20)
    assert model.loss(tokens, tokens).shape == ()
    with pytest.raises(ConfigError, match="meta device, without weights"):
        generate(model, [1], 3)


def test_targets_of_32_bits_count_as_those_of_64():
    config = ModelConfig(vocab_size=20, dim=16, n_layers=1, n_heads=2, max_seq_len=8)
    model, tokens = Transformer(config), torch.arange(8).reshape(2, 4)
    narrow = tokens.int()
    assert torch.equal(model.loss(narrow, narrow), model.loss(tokens, tokens))


def test_an_exported_model_takes_other_sizes():
    config = ModelConfig(vocab_size=20, dim=16, n_layers=1, n_heads=2, max_seq_len=8)
    model, auto = Transformer(config), torch.export.Dim.AUTO
    exported = torch.export.export(
        model, (torch.zeros(2, 4, dtype=torch.long),), dynamic_shapes=({0: auto, 1: auto},)
    )
    tokens = torch.arange(18).reshape(3, 6)
    torch.testing.assert_close(exported.module()(tokens), model(tokens))
