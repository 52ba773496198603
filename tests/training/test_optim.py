import pytest
import torch

from minillama.config import ModelConfig
from minillama.config.run import OptimConfig
from minillama.model.transformer import Transformer
from minillama.training.optim import (
    SGD,
    AdamW,
    Lion,
    Muon,
    build_optimizer,
    clip_gradients,
    set_learning_rate,
)


def tiny(**fields):
    return Transformer(ModelConfig(vocab_size=11, dim=8, n_layers=1, n_heads=2, **fields))


def names_of_group(model, optimizer, index):
    held = {id(p) for p in optimizer.param_groups[index]["params"]}
    return {name for name, p in model.named_parameters() if id(p) in held}


def test_only_matrices_decay_and_norms_never_do():
    model = tiny(norm={"kind": "layernorm", "qk_norm": "head"}, tie_embeddings=False)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    decayed, spared = (names_of_group(model, optimizer, index) for index in (0, 1))
    assert {"embed.weight", "lm_head.weight", "blocks.0.attention.q_proj.weight"} <= decayed
    assert all("_norm." in name for name in spared)
    assert {"final_norm.weight", "final_norm.bias", "blocks.0.attention.q_norm.weight"} <= spared
    assert decayed | spared == {name for name, _ in model.named_parameters()}
    assert not decayed & spared


def test_a_norm_with_a_matrix_of_gains_is_spared_too():
    model = tiny()
    model.final_norm.weight = torch.nn.Parameter(torch.ones(1, 8))
    optimizer = build_optimizer(model, OptimConfig())
    assert "final_norm.weight" in names_of_group(model, optimizer, 1)


def test_tied_weights_count_once():
    tied, untied = tiny(tie_embeddings=True), tiny(tie_embeddings=False)

    def count(model):
        groups = build_optimizer(model, OptimConfig()).param_groups
        return sum(len(group["params"]) for group in groups)

    assert count(tied) == count(untied) - 1 == len(list(tied.parameters()))


def test_an_update_is_that_of_adamw():
    weight = torch.tensor([[1.0, -2.0]])
    gradient = torch.tensor([[0.5, 0.25]])
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight = torch.nn.Parameter(weight.clone())
    layer.weight.grad = gradient.clone()
    build_optimizer(layer, OptimConfig(lr=0.1, weight_decay=0.2, eps=1e-8)).step()
    # The first update's moments, bias-corrected, are the gradient itself: lr · g/|g| after decay.
    expected = weight * (1 - 0.1 * 0.2) - 0.1 * gradient.sign()
    torch.testing.assert_close(layer.weight.detach(), expected)


def test_all_that_can_be_done_with_it_is_torchs():
    def steps(kind):
        torch.manual_seed(0)
        layer = torch.nn.Linear(5, 3)
        optimizer = kind(layer.parameters(), lr=0.1, weight_decay=0.1, fused=True)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 1.0})
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        for number in range(5):
            optimizer.zero_grad()
            layer(torch.full((4, 5), 1.0 + number)).square().sum().backward()
            optimizer.step()
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
        assert calls == ["before", "after"] * 5
        return [*layer.parameters(), *(s["exp_avg"] for s in state["state"].values())]

    for ours, theirs in zip(steps(AdamW), steps(torch.optim.AdamW), strict=True):
        assert torch.equal(ours, theirs)


def decay_by_name(model, **fields):
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.3, **fields))
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("none", set()),
        ("input", {"attention_input_norm", "mlp_input_norm", "final_norm"}),
        ("output", {"attention_output_norm", "mlp_output_norm"}),
    ],
)
def test_decay_norms_says_which_gains_decay(which, expected):
    model = tiny(norm={"kind": "layernorm", "placement": "peri", "qk_norm": "head"})
    decays = decay_by_name(model, decay_norms=which)
    gains = {n: decay for n, decay in decays.items() if n.endswith("_norm.weight")}
    assert {name.split(".")[-2] for name, decay in gains.items() if decay == 0.3} == expected
    assert {decay for name, decay in decays.items() if name.endswith("bias")} == {0.0}
    everywhere = decay_by_name(model, decay_norms="all")
    assert {everywhere[name] for name in gains} == {0.3}


def test_a_zero_centred_gain_decays_to_one():
    model = tiny(norm={"options": {"unit_offset": True}})
    weight = model.final_norm.weight
    weight.data.fill_(1.0)
    config = OptimConfig(lr=0.5, weight_decay=1.0, decay_norms="all")
    optimizer = build_optimizer(model, config)
    for _ in range(20):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    torch.testing.assert_close(1 + weight.detach(), torch.ones(8), atol=1e-5, rtol=0)


def test_groups_have_rates_and_decays_of_their_own():
    groups = {"embed": {"lr_factor": 0.5}, "shifts": {"lr_factor": 0.1, "weight_decay": 0.2}}
    model = tiny(norm={"kind": "layernorm"})
    optimizer = build_optimizer(model, OptimConfig(groups=groups, weight_decay=0.3))
    set_learning_rate(optimizer, 2.0)
    found = {
        name: (group["lr"], group["weight_decay"])
        for index, group in enumerate(optimizer.param_groups)
        for name in names_of_group(model, optimizer, index)
    }
    assert found["embed.weight"] == (1.0, 0.3)
    assert found["final_norm.bias"] == (0.2, 0.2)
    assert found["final_norm.weight"] == (2.0, 0.0)
    assert found["blocks.0.mlp.up_proj.weight"] == (2.0, 0.3)


def test_lion_follows_its_equations():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer = Lion([weight], 0.1, (0.8, 0.95), weight_decay=0.2)
    theta, m = weight.detach().clone(), torch.zeros(5, 3, dtype=torch.float64)
    for _ in range(10):
        g = torch.randn(5, 3, dtype=torch.float64)
        weight.grad = g.clone()
        optimizer.step()
        theta = theta - 0.1 * (torch.sign(0.8 * m + 0.2 * g) + 0.2 * theta)
        m = 0.95 * m + 0.05 * g
    torch.testing.assert_close(weight.detach(), theta)


def test_muon_updates_hidden_matrices_orthogonally_and_the_rest_as_adamw():
    model, twin = tiny(), tiny()
    optimizer = build_optimizer(model, OptimConfig(kind="muon", weight_decay=0.0))
    other = build_optimizer(twin, OptimConfig(weight_decay=0.0))
    assert isinstance(optimizer, Muon)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        one.grad = torch.randn(one.shape)
        two.grad = one.grad.clone()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for each in (optimizer, other):
        set_learning_rate(each, 0.1)
        each.step()
    for name, parameter in model.named_parameters():
        if name.startswith("blocks") and parameter.ndim > 1:
            update = (before[name] - parameter.detach()) / 0.1
            scale = 0.2 * max(parameter.shape) ** 0.5
            singular = torch.linalg.svdvals(update / scale)
            assert 0.5 < singular.min() < singular.max() < 1.3, name
        else:
            torch.testing.assert_close(parameter, twin.get_parameter(name))


def test_sgd_is_that_of_torch():
    weight, twin = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.weight = weight
    ours = build_optimizer(layer, OptimConfig(kind="sgd", lr=0.1, weight_decay=0.2))
    theirs = torch.optim.SGD([twin], 0.1, momentum=0.9, weight_decay=0.2)
    assert isinstance(ours, SGD)
    for _ in range(4):
        weight.grad, twin.grad = torch.randn(2, 2), None
        twin.grad = weight.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(weight, twin)


def with_gradients(*values):
    parameters = [torch.nn.Parameter(torch.zeros(len(v))) for v in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return [*parameters, torch.nn.Parameter(torch.zeros(3))]  # the last has no gradient


def test_clipping_scales_all_gradients_and_returns_the_norm_before():
    parameters = with_gradients([3.0, 0.0], [4.0])
    assert clip_gradients(parameters, 1.0) == pytest.approx(5.0)
    torch.testing.assert_close(parameters[0].grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(parameters[1].grad, torch.tensor([0.8]))


@pytest.mark.parametrize("max_norm", [0.0, 5.1])
def test_short_gradients_and_no_clipping_leave_every_bit(max_norm):
    parameters = with_gradients([3.0, 0.0], [4.0])
    assert clip_gradients(parameters, max_norm) == pytest.approx(5.0)
    assert parameters[0].grad.tolist() == [3.0, 0.0]
    assert parameters[1].grad.tolist() == [4.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_is_returned_as_such(bad):
    assert clip_gradients(with_gradients([bad], [1.0]), 0.0) == pytest.approx(bad, nan_ok=True)
