"""The gated MLP in one, against float64 and against its layers one after another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import tensor
from torch import Tensor

from minillama.model.kernels import (
    gated_mlp,
    gated_mlp_reference,
    linear,
    mlp,
    residual_mlp,
    rms_norm_reference,
    swiglu,
)

Weights = tuple[Tensor, Tensor, Tensor]


def weights(dim: int, inner: int) -> Weights:
    gate, up, down = tensor(inner, dim), tensor(inner, dim, seed=1), tensor(dim, inner, seed=2)
    return gate / dim**0.5, up / dim**0.5, down / inner**0.5


def exact(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The equation, sums written out, in float64."""
    g = (x[..., None, :] * gate).sum(-1)
    h = g / (1 + torch.exp(-g)) * (x[..., None, :] * up).sum(-1)
    return (h[..., None, :] * down).sum(-1)


def apart(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(swiglu(linear(x, gate, up)), down)


def with_gradients(
    function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor, learn: str = "xgud"
) -> list[Tensor]:
    """Return the output and the gradients of those inputs whose letter is in ``learn``."""
    inputs = tuple(
        tensor.detach().requires_grad_(letter in learn)
        for tensor, letter in zip(inputs, "xgud", strict=True)
    )
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, [t for t in inputs if t.requires_grad], grad)]


def used(dim: int, inner: int) -> bool:
    return mlp.is_one_kernel(dim, inner)


# ------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rows", "dim", "inner"),
    [(1, 16, 16), (7, 16, 48), (97, 48, 16), (600, 64, 176), (500, 16, 4096)],
)
def test_the_sub_layer_with_its_norm_is_that_of_float64(
    dtype: torch.dtype, rows: int, dim: int, inner: int
) -> None:
    def plain(x: Tensor, gain: Tensor, *weights: Tensor) -> Tensor:
        return x + gated_mlp_reference(rms_norm_reference(x, gain, 1e-6), *weights)

    def fused(x: Tensor, gain: Tensor, *weights: Tensor) -> Tensor | None:
        return residual_mlp(x, gain, 1e-6, *weights)

    def gradients(function: Callable[..., Tensor | None], dtype: torch.dtype) -> list[Tensor]:
        given = (tensor(rows, dim, seed=3), tensor(dim, seed=5), *weights(dim, inner))
        tensors = [t.to(dtype).requires_grad_() for t in given]
        y = function(*tensors)
        assert y is not None
        grad = tensor(rows, dim, seed=4).to(dtype)
        return [y.detach(), *torch.autograd.grad(y, tensors, grad)]

    if not used(dim, inner):
        pytest.skip("no C compiler, or few vector registers")
    tolerance = 64 * torch.finfo(dtype).eps * (1 if dtype is torch.float32 else 8)
    ours, true = gradients(fused, dtype), gradients(plain, torch.float64)
    for got, want in zip(ours, true, strict=True):
        assert got.dtype == dtype
        assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("rows", [96, 2049])
def test_the_sub_layer_with_its_norm_is_the_same_on_any_number_of_threads(
    threads: Callable[[int], None], rows: int
) -> None:
    if not used(64, 176):
        pytest.skip("no C compiler, or few vector registers")
    given = (tensor(rows, 64, seed=3), tensor(64, seed=5), *weights(64, 176))
    x, gain, *others = (t.float().requires_grad_() for t in given)
    results = []
    for n in (1, 2, 3):
        threads(n)
        y = residual_mlp(x, gain, 1e-6, *others)
        assert y is not None
        results.append([y, *torch.autograd.grad(y, [x, gain, *others], x.detach())])
        for got, want in zip(results[-1], results[0], strict=True):
            assert torch.equal(got, want)


def test_the_sub_layer_that_has_no_kernel_is_left_to_the_caller() -> None:
    given = (tensor(70, 32, seed=3), tensor(32, seed=5), *weights(32, 48))
    x, gain, gate, up, down = (t.float() for t in given)
    assert residual_mlp(x[..., :30], gain[:30], 1e-6, gate[:, :30], up[:, :30], down[:30]) is None
    assert residual_mlp(x, gain[:1], 1e-6, gate, up, down) is None
    assert residual_mlp(x, gain.double(), 1e-6, gate, up, down) is None
    assert residual_mlp(x[:9], gain, 1e-6, gate, up, down) is None  # few rows
    wide = (tensor(70, 512), tensor(512), *weights(512, 1024))
    assert residual_mlp(wide[0], wide[1], 1e-6, *wide[2:]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rows", "dim", "inner"),
    [(1, 16, 16), (7, 16, 48), (95, 32, 80), (97, 48, 16), (200, 64, 176), (65, 80, 208)],
)
def test_values_and_gradients_are_those_of_float64(
    kernels: str, dtype: torch.dtype, rows: int, dim: int, inner: int
) -> None:
    inputs = tensor(rows, dim, seed=3), *weights(dim, inner)
    grad = tensor(rows, dim, seed=4)
    true = with_gradients(exact, grad, *inputs)
    ours = with_gradients(gated_mlp, grad.to(dtype), *(t.to(dtype) for t in inputs))
    tolerance = 64 * torch.finfo(dtype).eps
    for got, want in zip(ours, true, strict=True):
        assert got.dtype == dtype
        atol = tolerance * want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("learn", ["x", "g", "u", "d", "gd", "xu", "gud"])
def test_only_what_learns_gets_a_gradient(kernels: str, learn: str) -> None:
    inputs = tensor(99, 32, seed=3).float(), *(w.float() for w in weights(32, 48))
    grad = tensor(99, 32, seed=4).float()
    ours = with_gradients(gated_mlp, grad, *inputs, learn=learn)
    whole = dict(zip("yxgud", with_gradients(gated_mlp, grad, *inputs), strict=True))
    for got, letter in zip(ours, "y" + "".join(c for c in "xgud" if c in learn), strict=True):
        assert torch.equal(got, whole[letter])


@pytest.mark.parametrize("rows", [96, 1000, 2049])
def test_any_number_of_threads_and_the_layers_apart_give_the_same(
    kernels: str, threads: Callable[[int], None], rows: int
) -> None:
    inputs = tensor(rows, 64, seed=3).float(), *(w.float() for w in weights(64, 176))
    grad = tensor(rows, 64, seed=4).float()
    threads(1)
    one = with_gradients(gated_mlp, grad, *inputs)
    for n in (1, 2, 3, 5):
        threads(n)
        without = gated_mlp(*inputs)  # keeps nothing for a backward pass
        more = with_gradients(gated_mlp, grad, *inputs)
        for got, want in zip([*more, without], [*one, one[0]], strict=True):
            if kernels == "compiled" and used(64, 176):
                assert torch.equal(got, want)
            else:  # torch promises no order of its sums
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for got, want in zip(one, with_gradients(apart, grad, *inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_many_groups_of_rows(kernels: str) -> None:
    dim, inner = 16, 4096  # of so wide rows few make a group
    inputs = tensor(500, dim, seed=3).float(), *(w.float() for w in weights(dim, inner))
    grad = tensor(500, dim, seed=4).float()
    ours = with_gradients(gated_mlp, grad, *inputs)
    wide = with_gradients(gated_mlp_reference, grad.double(), *(t.double() for t in inputs))
    for got, want in zip(ours, wide, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    sixteenths=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    rest=st.sampled_from([(0, 0), (1, 0), (0, 5)]),
    strided=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_any_shape_strides_and_dtype(
    shape: list[int],
    sixteenths: tuple[int, int],
    rest: tuple[int, int],
    strided: bool,
    dtype: torch.dtype,
) -> None:
    dim, inner = (16 * n + r for n, r in zip(sixteenths, rest, strict=True))
    gate, up, down = (w.to(dtype) for w in weights(dim, inner))
    x, grad = tensor(*shape, 2 * dim, seed=3).to(dtype), tensor(*shape, dim, seed=4).to(dtype)
    x = x[..., ::2] if strided else x[..., :dim]
    if strided:
        gate, down = gate.t().contiguous().t(), down.t().contiguous().t()
    ours = with_gradients(gated_mlp, grad, x, gate, up, down)
    true = with_gradients(exact, grad.double(), *(t.double() for t in (x, gate, up, down)))
    for got, want in zip(ours, true, strict=True):
        assert (got.dtype, got.shape) == (dtype, want.shape)
        tolerance = 128 * torch.finfo(dtype).eps
        size = want.abs().max().item() if want.numel() else 0.0
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * (1 + size))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_in_its_row(kernels: str, number: float) -> None:
    x, grad = tensor(100, 32, seed=3).float(), tensor(100, 32, seed=4).float()
    inputs = tuple(w.float() for w in weights(32, 48))
    clean = with_gradients(gated_mlp, grad, x, *inputs, learn="x")
    x[5, 7] = number
    spoilt = with_gradients(gated_mlp, grad, x, *inputs, learn="x")
    others = torch.arange(100) != 5
    for got, want in zip(spoilt, clean, strict=True):
        assert not got[5].isfinite().all()
        assert torch.equal(got[others], want[others])
    assert all(not g.isfinite().all() for g in with_gradients(gated_mlp, grad, x, *inputs)[2:])


# ----------------------------------------------------------------------------- differentiation


def test_first_and_second_gradients(kernels: str) -> None:
    inputs = [t.requires_grad_() for t in (tensor(3, 8, seed=3), *weights(8, 8))]
    assert torch.autograd.gradcheck(gated_mlp, inputs)
    assert torch.autograd.gradgradcheck(gated_mlp, inputs)


def test_the_backward_pass_can_be_run_twice(kernels: str) -> None:
    inputs = [t.float().requires_grad_() for t in (tensor(99, 16, seed=3), *weights(16, 32))]
    y = gated_mlp(*inputs).square().sum()
    first, second = (torch.autograd.grad(y, inputs, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_keeps_its_inputs_and_what_gate_and_up_make_of_them(kernels: str) -> None:
    if kernels == "plain" or not used(16, 32):
        pytest.skip("the layers apart keep one more")
    kept: list[int] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t.numel())
        return t

    inputs = [t.float().requires_grad_() for t in (tensor(99, 16, seed=3), *weights(16, 32))]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        gated_mlp(*inputs)
    assert sorted(kept) == sorted([*(t.numel() for t in inputs), 99 * 2 * 32])


def test_changing_a_weight_before_the_backward_pass_is_noticed(kernels: str) -> None:
    x, gate, up, down = (t.float() for t in (tensor(99, 16, seed=3), *weights(16, 32)))
    down.requires_grad_()
    up.requires_grad_()
    y = gated_mlp(x, gate, up, down)
    with torch.no_grad():
        down.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(y.sum())


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own use
def test_function_transforms(kernels: str) -> None:
    inputs = tensor(4, 16, seed=3), *weights(16, 16)
    direction = tensor(4, 16, seed=4)
    by_row = torch.func.vmap(lambda x: gated_mlp(x, *inputs[1:]))(inputs[0])
    torch.testing.assert_close(by_row, exact(*inputs))
    found = torch.func.grad(lambda *inputs: gated_mlp(*inputs).sum(), argnums=(0, 1, 2, 3))(*inputs)
    want = with_gradients(exact, torch.ones(4, 16, dtype=torch.float64), *inputs)[1:]
    torch.testing.assert_close(list(found), want)
    tangents = torch.func.jvp(lambda x: gated_mlp(x, *inputs[1:]), inputs[:1], (direction,))
    torch.testing.assert_close(
        tangents, torch.func.jvp(lambda x: exact(x, *inputs[1:]), inputs[:1], (direction,))
    )


# -------------------------------------------------------------------------------- where it is used


def test_sizes_that_do_not_fit_are_refused(kernels: str) -> None:
    x, (gate, up, down) = tensor(99, 16).float(), (w.float() for w in weights(16, 32))
    for inputs in (
        (x[:, :15], gate, up, down),
        (x, gate[:, :15], up, down),
        (x, gate, up[:16], down),
        (x, gate, up, down[:, :16]),
    ):
        with pytest.raises(ValueError, match="must be x"):
            gated_mlp(*(t.contiguous() for t in inputs))


def test_autocast_compile_and_other_devices(kernels: str) -> None:
    inputs = tuple(t.float() for t in (tensor(99, 16, seed=3), *weights(16, 32)))
    with torch.autocast("cpu", torch.bfloat16):
        assert gated_mlp(*inputs).dtype == torch.bfloat16
    y = gated_mlp(*(t.to("meta") for t in inputs))
    assert (y.device.type, y.shape) == ("meta", (99, 16))
    compiled = torch.compile(gated_mlp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), gated_mlp(*inputs))


def test_models_use_it_unless_a_layer_is_more_than_its_weight(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minillama.config import ModelConfig
    from minillama.model import mlp as module

    calls: list[int] = []

    def counted(*inputs: Tensor) -> Tensor:
        calls.append(1)
        return gated_mlp(*inputs)

    monkeypatch.setattr(module, "gated_mlp", counted)
    layer, x = module.MLP(ModelConfig(dim=32, n_heads=2)), tensor(2, 50, 32, seed=3).float()
    y = layer(x)
    assert len(calls) == 1
    seen: list[Tensor] = []
    layer.down_proj.register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.testing.assert_close(layer(x), y)
    assert len(calls) == len(seen) == 1
