"""Products of few and many rows against float64, and layers that share their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import tensor
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from minillama.config import ModelConfig
from minillama.model.kernels import linear
from minillama.model.mlp import MLP
from minillama.model.projection import packed_linear
from minillama.model.transformer import Transformer
from minillama.sampling import generate

ROWS = [1, 2, 3, 16, 17, 63, 64, 65, 300]
OUTPUTS = [(1,), (5,), (3, 2), (64, 17, 17)]


def draw_weights(outputs: tuple[int, ...], n_in: int, dtype: torch.dtype) -> list[Tensor]:
    return [tensor(n, n_in, seed=1 + i).to(dtype) for i, n in enumerate(outputs)]


def exact(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.cat([(x[..., None, :] * weight).sum(-1) for weight in weights], dim=-1)


def with_gradients(
    function: Callable[..., Tensor], x: Tensor, weights: list[Tensor], grad: Tensor
) -> list[Tensor]:
    inputs = [y.detach().requires_grad_() for y in (x, *weights)]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad.to(y.dtype))]


# ------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_values_and_gradients_are_those_of_float64(
    kernels: str, rows: int, outputs: tuple[int, ...]
) -> None:
    for dtype in (torch.float32, torch.float64):
        for n_in in (1, 3, 15, 16, 17, 63):
            x, weights = tensor(rows, n_in).to(dtype), draw_weights(outputs, n_in, dtype)
            grad = tensor(rows, sum(outputs), seed=9).to(dtype)
            ours = with_gradients(linear, x, weights, grad)
            wide = [weight.double() for weight in weights]
            true = with_gradients(exact, x.double(), wide, grad.double())
            tolerance = 128 * torch.finfo(dtype).eps
            for got, want in zip([linear(x, *weights), *ours], [true[0], *true], strict=True):
                assert got.dtype == dtype
                torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_many_weights_to_read(kernels: str) -> None:
    weights = draw_weights((1031, 258), 129, torch.float32)  # more than one unit of work
    for rows in ROWS:
        x = tensor(rows, 129).float()
        want = torch.cat([x.double() @ weight.double().T for weight in weights], dim=-1)
        got = linear(x, *weights).double()
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    n_in=st.integers(1, 40),
    outputs=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    strided=st.booleans(),
    learns=st.booleans(),
)
def test_any_shape_and_strides(
    shape: list[int], n_in: int, outputs: list[int], strided: bool, learns: bool
) -> None:
    x = tensor(*shape, 2 * n_in).float()[..., ::2]
    weights = [tensor(n_in, n, seed=1 + i).float().T for i, n in enumerate(outputs)]
    if not strided:
        x, weights = x.contiguous(), [weight.contiguous() for weight in weights]
    y = linear(x.requires_grad_(learns), *weights)
    assert y.shape == (*shape, sum(outputs))
    torch.testing.assert_close(y, F.linear(x, torch.cat(weights)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_are_torchs(kernels: str, dtype: torch.dtype) -> None:
    for rows in (1, 3, 64):
        x, weights = tensor(rows, 17).to(dtype), draw_weights((5, 3), 17, dtype)
        y = linear(x, *weights)
        assert y.dtype == dtype
        assert torch.equal(y, F.linear(x, torch.cat(weights)))
        x, weights = x.float(), [weight.float() for weight in weights]
        with torch.autocast("cpu", dtype=dtype):
            y = linear(x, *weights)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), linear(x, *weights), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("rows", [1, 3, 8, 100])
def test_sizes_that_do_not_fit_are_refused(kernels: str, rows: int) -> None:
    x = tensor(rows, 5).float()
    for weights in ([tensor(3, 4).float()], [tensor(3, 5).float(), tensor(3, 6).float()]):
        with pytest.raises(ValueError, match="must be x"):
            linear(x, *weights)


# ----------------------------------------------------------------------------- exact properties


def test_few_rows_do_not_see_each_other(kernels: str) -> None:
    if kernels == "plain":
        pytest.skip("torch sums in another order for another number of rows")
    x, weights = tensor(40, 123).float(), draw_weights((1001, 7), 123, torch.float32)
    whole = linear(x, *weights)
    for rows in (2, 3, 16, 17, 39):
        assert torch.equal(linear(x[:rows], *weights), whole[:rows])
        assert torch.equal(linear(x[-rows:], *weights), whole[-rows:])
    assert torch.equal(linear(x, weights[0]), whole[:, :1001])
    # One row alone is summed in another order.
    alone = torch.cat([linear(row, *weights)[None] for row in x])
    torch.testing.assert_close(alone, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(linear(x[5], weights[0]), alone[5, :1001])


@pytest.mark.parametrize("rows", [1, 3, 33])
def test_few_rows_on_any_number_of_threads(
    kernels: str, threads: Callable[[int], None], rows: int
) -> None:
    x, weights = tensor(rows, 123).float(), draw_weights((2001, 7), 123, torch.float32)
    results = []
    for n in (1, 1, 2, 2, 3):
        threads(n)
        results.append(linear(x, *weights))
    for result in results[1:]:
        if kernels == "compiled":
            assert torch.equal(result, results[0])
        else:
            torch.testing.assert_close(result, results[0])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_is_not_a_number_reaches_its_outputs(kernels: str, number: float) -> None:
    for place in (0, 3, 16):  # in a whole vector, and in the rest
        for rows in (1, 3):
            x, weight = tensor(rows, 17).float(), tensor(9, 17, seed=1).float()
            x[rows // 2, place] = number
            weight[2] = 0
            want = F.linear(x, weight)
            y = linear(x, weight)
            assert torch.equal(y.isnan(), want.isnan())
            torch.testing.assert_close(y, want, equal_nan=True)


# ----------------------------------------------------------------------------- differentiation


@pytest.mark.parametrize(("x_learns", "w_learns"), [(True, True), (True, False), (False, True)])
def test_first_and_second_gradients(kernels: str, x_learns: bool, w_learns: bool) -> None:
    x = tensor(3, 4).requires_grad_(x_learns)
    weights = [weight.requires_grad_(w_learns) for weight in draw_weights((2, 3), 4, x.dtype)]
    assert torch.autograd.gradcheck(linear, (x, *weights))
    assert torch.autograd.gradgradcheck(linear, (x, *weights))
    # The way by oneDNN is float32's alone, too coarse for finite differences.
    results = []
    for dtype in (torch.float64, torch.float32):
        inputs = [y.detach().to(dtype).requires_grad_(y.requires_grad) for y in (x, *weights)]
        wanted = [y for y in inputs if y.requires_grad]
        loss = linear(*inputs).square().sum()
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.pow(3).sum() for g in first]).sum(), wanted)
        results.append([y.detach().double() for y in (*first, *second)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-3)


def test_the_backward_pass_can_be_run_twice(kernels: str) -> None:
    x, weight = tensor(5, 3).float().requires_grad_(), tensor(7, 3).float().requires_grad_()
    y = linear(x, weight).square().sum()
    first, second = (torch.autograd.grad(y, (x, weight), retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own use
def test_function_transforms(kernels: str) -> None:
    x, weight = tensor(6, 3, 4).float(), tensor(5, 4, seed=1).float()
    function = lambda x: linear(x, weight)  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(function)(x), exact(x, weight))
    torch.testing.assert_close(
        torch.func.grad(lambda x: function(x).sum())(x), weight.sum(0).expand(6, 3, 4)
    )
    _, tangent = torch.func.jvp(function, (x,), (2 * x,))
    torch.testing.assert_close(tangent, 2 * exact(x, weight))
    learning = weight.clone().requires_grad_()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, 2 * x)
        tangent = torch.autograd.forward_ad.unpack_dual(linear(dual, learning)).tangent
    torch.testing.assert_close(tangent, 2 * exact(x, weight))


# ------------------------------------------------------------------------------- layers together


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Adapted(nn.Module):
    """As LoRA does: keeps the layer, adds to it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + 1
        return y


def two_layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(5, 3, bias=False), nn.Linear(5, 2, bias=False)


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("learns", [True, False])
def test_layers_together_are_the_layers_one_by_one(rows: int, learns: bool) -> None:
    layers, x = two_layers(), tensor(rows, 5).float()
    with torch.set_grad_enabled(learns):
        want = torch.cat([layer(x) for layer in layers], dim=-1)
        torch.testing.assert_close(packed_linear(x, *layers), want)


def test_a_replaced_layer_is_called() -> None:
    x = tensor(8, 5).float()
    one, other = two_layers()
    plain = packed_linear(x, one, other)
    doubled = Doubled(5, 2, bias=False)
    doubled.load_state_dict(other.state_dict())
    torch.testing.assert_close(
        packed_linear(x, one, doubled), torch.cat((plain[:, :3], 2 * plain[:, 3:]), dim=-1)
    )
    torch.testing.assert_close(
        packed_linear(x, Adapted(one), other), torch.cat((plain[:, :3] + 1, plain[:, 3:]), dim=-1)
    )
    nn.utils.parametrizations.weight_norm(other)
    torch.testing.assert_close(packed_linear(x, one, other), plain)
    one.forward = lambda x: torch.zeros(*x.shape[:-1], 3)  # type: ignore[method-assign]
    torch.testing.assert_close(packed_linear(x, one, other)[:, :3], torch.zeros(8, 3))


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_are_called(register: str) -> None:
    layers, x = two_layers(), tensor(8, 5).float().requires_grad_()
    calls: list[nn.Module] = []
    handle = getattr(layers[1], register)(lambda layer, *_: calls.append(layer))
    y = packed_linear(x, *layers)
    y.sum().backward()
    assert calls == [layers[1]]
    handle.remove()
    torch.testing.assert_close(packed_linear(x, *layers), y)
    assert len(calls) == 1


class Int8Weight(Tensor):
    """As torchao's: a weight that F.linear knows what to do with, and torch.cat does not."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.cat:
            raise NotImplementedError(function)
        y = super().__torch_function__(function, types, args, kwargs or {})
        return y.as_subclass(Tensor) if function is F.linear else y


def test_a_layer_whose_weight_is_of_another_class_is_called() -> None:
    layers, x = two_layers(), tensor(8, 5).float()
    want = packed_linear(x, *layers)
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Int8Weight))
    torch.testing.assert_close(packed_linear(x, *layers), want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("tied", [False, True])
def test_torch_quantizes_every_projection(tied: bool) -> None:
    config = ModelConfig(vocab_size=32, dim=32, n_layers=1, n_heads=2, tie_embeddings=tied)
    model, tokens = Transformer(config, seed=0).eval(), torch.arange(32)[None]
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not any(type(module) is nn.Linear for module in quantized.modules())
    with torch.no_grad():
        change = quantized(tokens) - model(tokens)
        assert 0 < change.norm() < 0.05 * model(tokens).norm()
        loss = quantized.loss(tokens, tokens)
    torch.testing.assert_close(loss, model.loss(tokens, tokens), rtol=0.01, atol=0)
    generate(quantized, [1, 2], 4, temperature=0)


def test_hooks_on_all_modules_are_called() -> None:
    layers, x = two_layers(), tensor(8, 5).float()
    calls: list[nn.Module] = []
    handle = register_module_forward_hook(lambda layer, *_: calls.append(layer))
    try:
        packed_linear(x, *layers)
    finally:
        handle.remove()
    assert calls == list(layers)


def test_names_stay() -> None:
    mlp = MLP(ModelConfig(dim=8, n_heads=2, ffn_dim=6))
    names = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    assert list(mlp.state_dict()) == names
    mlp(tensor(2, 3, 8).float()).sum().backward()
    assert all(weight.grad is not None for weight in mlp.parameters())
