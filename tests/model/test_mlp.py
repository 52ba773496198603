import pytest
import torch

from minillama.config import ModelConfig
from minillama.model.mlp import MLP


def build(dim=6, ffn_dim=10):
    mlp = MLP(ModelConfig(dim=dim, n_heads=1, ffn_dim=ffn_dim)).double()
    generator = torch.Generator().manual_seed(0)
    for weight in mlp.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return mlp


def test_it_is_swiglu():
    mlp, x = build(), torch.randn(2, 3, 6, dtype=torch.float64)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    silu = gate / (1 + torch.exp(-gate))
    expected = (silu * up) @ mlp.down_proj.weight.T
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)


def test_gate_and_up_are_told_apart():
    mlp, x = build(), torch.randn(1, 1, 6, dtype=torch.float64)
    y = mlp(x)
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    assert (mlp(x) - y).abs().max() > 1e-3


def test_positions_do_not_see_each_other():
    mlp, x = build(), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(mlp(x)[0, 1].sum(), x)
    assert gradient[0, 1].abs().max() > 0
    gradient[0, 1] = 0
    assert not gradient.any()


@pytest.mark.parametrize(("dim", "inner"), [(12, 32), (24, 64), (64, 192), (128, 352), (768, 2048)])
def test_the_inner_width_is_eight_thirds_dim_rounded_up_to_32(dim, inner):
    mlp = MLP(ModelConfig(dim=dim, n_heads=1))
    assert mlp.gate_proj.weight.shape == mlp.up_proj.weight.shape == (inner, dim)
    assert mlp.down_proj.weight.shape == (dim, inner)


def test_it_has_three_matrices_and_no_bias():
    names = sorted(name for name, _ in build().named_parameters())
    assert names == ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]
