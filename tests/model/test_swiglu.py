"""SwiGLU's kernel against float64, against torch, and against what must hold exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import tensor, with_gradient
from torch import Tensor

from minillama.model.kernels import swiglu, swiglu_reference

DTYPES = [torch.float32, torch.float64]
SIZES = [1, 3, 15, 16, 17, 63]


def exact(x: Tensor) -> Tensor:
    """The equation, and nothing else."""
    gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return gate / (1 + (-gate).exp()) * up


# ------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_values_and_gradients_are_those_of_float64(
    kernels: str, dim: int, dtype: torch.dtype, rows: int
) -> None:
    x, grad = 3 * tensor(rows, 2 * dim).to(dtype), tensor(rows, dim, seed=1).to(dtype)
    true = with_gradient(exact, x.double(), grad.double())
    tolerance = 16 * torch.finfo(dtype).eps
    ours = with_gradient(swiglu, x, grad)
    for got, want in zip(ours, true, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    assert torch.equal(swiglu(x), ours[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_torchs(kernels: str, dtype: torch.dtype) -> None:
    x, grad = tensor(5, 2 * 17).to(dtype), tensor(5, 17, seed=1).to(dtype)
    ours, torchs = (with_gradient(f, x, grad) for f in (swiglu, swiglu_reference))
    for got, want in zip(ours, torchs, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want)


def test_autocast_keeps_the_dtype_of_its_input(kernels: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = tensor(5, 6).to(dtype)
            assert swiglu(x).dtype == swiglu_reference(x).dtype == dtype


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
)
def test_any_shape_and_strides(shape: list[int], order: object, step: int) -> None:
    axes = list(range(len(shape)))
    order.shuffle(axes)  # type: ignore[attr-defined]
    shape[axes[-1]] *= 2
    x = tensor(*(step * n for n in shape)).float()[tuple(slice(None, None, step) for _ in shape)]
    x = x.permute(axes)
    y = swiglu(x)
    assert y.shape == (*x.shape[:-1], x.shape[-1] // 2)
    torch.testing.assert_close(y, swiglu_reference(x))


def test_strided_inputs_and_gradients(kernels: str) -> None:
    x, grad = tensor(2 * 17, 7, 4).float().permute(2, 1, 0), tensor(7, 17).float().expand(4, 7, 17)
    ours = with_gradient(swiglu, x, grad)
    other = with_gradient(swiglu, x.contiguous(), grad.contiguous())
    for got, want in zip(ours, other, strict=True):
        if kernels == "compiled":
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want)


def test_an_odd_last_dimension_is_refused(kernels: str) -> None:
    for width in (1, 5):
        for x in (tensor(4, width).float(), tensor(4, width).float().requires_grad_()):
            with pytest.raises(ValueError, match="must be x"):
                swiglu(x)


# ------------------------------------------------------------------------------- hostile numbers


def test_numbers_at_the_edges(kernels: str) -> None:
    inf, nan = math.inf, math.nan
    edges = [0.0, -0.0, 1e-40, -1e-40, 1e-310, 30.0, -30.0, 100.0, -100.0, 1e30, -1e30, inf, -inf]
    pairs = torch.cartesian_prod(*2 * [torch.tensor([*edges, nan, 1.0, -1.0]).double()])
    for dtype in DTYPES:
        # The gates of one call, then the ups: whole vectors and a rest.
        x = pairs.to(dtype).T.reshape(-1)
        grad = torch.ones(len(pairs), dtype=dtype)
        y, grad_x = with_gradient(swiglu, x, grad)
        want, want_grad = with_gradient(swiglu_reference, x, grad)
        tiny = torch.finfo(dtype).tiny  # the kernel takes exp below it for 0
        rtol = 8 * torch.finfo(dtype).eps
        scale = 1 + x.abs().nan_to_num(0, 0, 0).view(2, -1).prod(0)
        for got, true in ((y, want), *zip(grad_x.view(2, -1), want_grad.view(2, -1), strict=True)):
            assert torch.equal(got.isnan(), true.isnan())
            assert torch.equal(got.isinf(), true.isinf())
            finite = true.isfinite()
            error = (got.double() - true.double()).abs()[finite]
            allowed = rtol * true.double().abs() + 200 * tiny * scale.double()
            assert (error <= allowed[finite]).all()
        zero = y == 0
        assert torch.equal(y[zero].signbit(), exact(x)[zero].signbit())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exponential_is_right_to_the_last_bits(kernels: str, dtype: torch.dtype) -> None:
    lowest, rtol = (-87.0, 4e-7) if dtype == torch.float32 else (-708.0, 1.5e-15)
    gate = torch.cat(
        [torch.linspace(lowest, 0, 200_003), -torch.logspace(-30, math.log10(-lowest), 50_001)]
    )
    gate = gate.to(dtype).clamp(min=lowest)
    y = swiglu(torch.stack((gate, torch.ones_like(gate)), dim=-1)).double()[:, 0]
    e = gate.double().exp()
    want = gate.double() * e / (1 + e)
    torch.testing.assert_close(y, want, rtol=rtol, atol=0)
    positive = swiglu(torch.stack((-gate, torch.ones_like(gate)), dim=-1)).double()[:, 0]
    torch.testing.assert_close(positive, -gate.double() / (1 + e), rtol=rtol, atol=0)


# ----------------------------------------------------------------------------- exact properties


def test_numbers_do_not_depend_on_their_neighbours(kernels: str) -> None:
    if kernels == "plain":
        pytest.skip("torch's own kernels differ between whole vectors and the rest")
    x, grad = tensor(40, 2 * 63).float(), tensor(40, 63, seed=1).float()
    whole = with_gradient(swiglu, x, grad)
    for row in (0, 1, 39):
        for got, want in zip(with_gradient(swiglu, x[row], grad[row]), whole, strict=True):
            assert torch.equal(got, want[row])
    gate, up = x.chunk(2, dim=-1)
    narrow = swiglu(torch.cat((gate[:, 50:], up[:, 50:]), dim=-1))
    assert torch.equal(narrow, whole[0][:, 50:])


@pytest.mark.parametrize(("rows", "dim"), [(2048, 64), (1001, 123), (3, 40_000)])
def test_the_same_to_the_bit_on_any_number_of_threads(
    kernels: str, threads: Callable[[int], None], rows: int, dim: int
) -> None:
    x, grad = tensor(rows, 2 * dim).float(), tensor(rows, dim, seed=1).float()
    results = []
    for n in (1, 1, 2, 2, 3):
        threads(n)
        results.append(with_gradient(swiglu, x, grad))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            if kernels == "compiled":
                assert torch.equal(got, want)
            else:
                torch.testing.assert_close(got, want)


# ----------------------------------------------------------------------------- differentiation


def test_first_and_second_gradients(kernels: str) -> None:
    for dim in (1, 5):
        x = tensor(3, 2 * dim).requires_grad_()
        assert torch.autograd.gradcheck(swiglu, (x,))
        assert torch.autograd.gradgradcheck(swiglu, (x,))


def test_the_backward_pass_can_be_run_twice(kernels: str) -> None:
    x = tensor(3, 34).float().requires_grad_()
    y = swiglu(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_keeps_no_more_than_its_input(kernels: str) -> None:
    if kernels == "plain":
        pytest.skip("the plain version keeps what autograd likes")
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        swiglu(tensor(4, 34).float().requires_grad_())
    assert [t.numel() for t in kept] == [4 * 34]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own use
def test_function_transforms(kernels: str) -> None:
    x, direction = tensor(4, 10), tensor(4, 10, seed=1)
    torch.testing.assert_close(torch.func.vmap(swiglu)(x), exact(x))
    torch.testing.assert_close(
        torch.func.grad(lambda x: swiglu(x).sum())(x),
        with_gradient(exact, x, torch.ones(4, 5))[1],
    )
    value, tangent = torch.func.jvp(swiglu, (x,), (direction,))
    want, want_tangent = torch.func.jvp(exact, (x,), (direction,))
    torch.testing.assert_close((value, tangent), (want, want_tangent))
    learning = x.clone().requires_grad_()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(learning, direction)
        forward_mode = torch.autograd.forward_ad.unpack_dual(swiglu(dual)).tangent
    torch.testing.assert_close(forward_mode, want_tangent)
    by_rows = torch.autograd.functional.jacobian(swiglu, x[0], vectorize=True)
    torch.testing.assert_close(by_rows, torch.func.jacrev(exact)(x[0]))


def test_other_devices(kernels: str) -> None:
    y = swiglu(torch.empty(3, 10, device="meta"))
    assert (y.device.type, y.shape) == ("meta", (3, 5))
    assert torch.equal(F.silu(torch.ones(3)), swiglu(torch.ones(3, 2))[:, 0])
