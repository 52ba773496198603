import pytest
import torch

from minillama.config import ModelConfig
from minillama.config.run import OptimConfig
from minillama.model.transformer import Transformer
from minillama.training.optim import AdamW, build_optimizer, clip_gradients


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
