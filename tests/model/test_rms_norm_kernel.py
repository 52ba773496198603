"""RMSNorm's kernels against float64, against torch, and against what must hold exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from minillama.model.kernels import rms_norm, rms_norm_reference
from minillama.model.kernels.rms_norm import _torch_rms_norm

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [1, 3, 16, 63, 123]
Gradients = tuple[Tensor, Tensor, Tensor | None]


def exact(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The equation, and nothing else, in float64."""
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def with_gradients(
    norm: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, weight: Tensor | None, grad: Tensor
) -> Gradients:
    x = x.detach().requires_grad_()
    weight = None if weight is None else weight.detach().requires_grad_()
    y = norm(x, weight)
    y.backward(grad.to(y.dtype))
    assert x.grad is not None
    return y.detach(), x.grad, None if weight is None else weight.grad


# ------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [True, False])
def test_values_and_gradients_are_those_of_float64(
    kernels: str, dim: int, dtype: torch.dtype, affine: bool
) -> None:
    x, grad = tensor(2, 5, dim).to(dtype), tensor(2, 5, dim, seed=1).to(dtype)
    weight = (1 + tensor(dim, seed=2)).to(dtype) if affine else None
    ours = with_gradients(lambda x, w: rms_norm(x, w, 1e-5), x, weight, grad)
    true = with_gradients(
        lambda x, w: exact(x, w, 1e-5),
        x.double(),
        None if weight is None else weight.double(),
        grad.double(),
    )
    tolerance = 10 * torch.finfo(dtype).eps
    for got, want in zip(ours, true, strict=True):
        if got is None or want is None:
            assert got is want
            continue
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cast_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_two_paths_agree(kernels: str, dtype: torch.dtype, cast_first: bool) -> None:
    x, weight, grad = (
        tensor(40, 123).to(dtype),
        tensor(123, seed=1).float(),
        tensor(40, 123, seed=2),
    )
    ours = with_gradients(lambda x, w: rms_norm(x, w, 1e-6, cast_first), x, weight, grad)
    plain = with_gradients(lambda x, w: rms_norm_reference(x, w, 1e-6, cast_first), x, weight, grad)
    for got, want in zip(ours, plain, strict=True):
        assert got is not None
        assert want is not None
        assert got.dtype == want.dtype
        # The plain gradients pass through the half-precision output of each step.
        rounding = 8 * torch.finfo(dtype).eps * want.abs().max().item()
        torch.testing.assert_close(got, want, rtol=0, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_order_of_casts(kernels: str, dtype: torch.dtype) -> None:
    x = torch.randint(-8, 8, (64, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = (1 + 0.1 * tensor(6)).float()
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    llama, gemma = normed.to(dtype) * weight.to(dtype), (normed * weight).to(dtype)
    assert not torch.equal(llama, gemma)
    assert torch.equal(rms_norm(x, weight, 1e-6), llama)
    assert torch.equal(rms_norm(x, weight, 1e-6, cast_first=False), gemma)


def test_agrees_with_torchs_norms(kernels: str) -> None:
    x, weight, grad = tensor(6, 63).float(), tensor(63, seed=1).float(), tensor(6, 63, seed=2)
    centred = (x - x.mean(-1, keepdim=True)).detach()
    ours = with_gradients(lambda x, w: rms_norm(x, w, 1e-5), centred, weight, grad)
    torchs = with_gradients(lambda x, w: F.rms_norm(x, (63,), w, 1e-5), centred, weight, grad)
    for got, want in zip(ours, torchs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[0], F.layer_norm(x, (63,), weight, None, 1e-5))


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
)
def test_any_shape_and_strides(shape: list[int], order: object, step: int) -> None:
    axes = list(range(len(shape)))
    order.shuffle(axes)  # type: ignore[attr-defined]
    x = tensor(*(step * n for n in shape)).float()[tuple(slice(None, None, step) for _ in shape)]
    x = x.permute(axes)
    weight = tensor(x.shape[-1], seed=1).float()
    y = rms_norm(x, weight, 1e-6)
    assert y.shape == x.shape
    torch.testing.assert_close(y, rms_norm_reference(x, weight, 1e-6))


def test_strided_inputs_and_gradients(kernels: str) -> None:
    base, weight, grad = tensor(7, 63, 4).float(), tensor(2 * 63).float()[::2], tensor(4, 7, 63)
    x, grad = base.permute(2, 0, 1), grad.float().expand(4, 7, 63).transpose(0, 1).transpose(0, 1)
    ours = with_gradients(lambda x, w: rms_norm(x, w, 1e-6), x, weight, grad)
    other = with_gradients(
        lambda x, w: rms_norm(x, w, 1e-6), x.contiguous(), weight.contiguous(), grad
    )
    for got, want in zip(ours, other, strict=True):
        torch.testing.assert_close(got, want)
    leaf = x.contiguous().requires_grad_()
    rms_norm(leaf, weight, 1e-6).sum().backward()  # its gradient is one number, expanded
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_empty_batches(kernels: str) -> None:
    x, weight = torch.empty(0, 5, requires_grad=True), torch.ones(5, requires_grad=True)
    y = rms_norm(x, weight, 1e-6)
    y.sum().backward()
    assert y.shape == (0, 5)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(5))
    assert rms_norm(torch.empty(3, 0), None, 1e-6).shape == (3, 0)


@pytest.mark.parametrize(
    ("x", "weight", "complaint"),
    [
        (torch.ones(2, 3), torch.ones(4), r"gain of shape \(4,\) was given x of shape \(2, 3\)"),
        (torch.ones(2, 3), torch.ones(2, 3), "last dimension"),
        (torch.tensor(1.0), None, r"x of shape \(\)"),
        (torch.ones(2, 3, dtype=torch.int64), None, "torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused(
    kernels: str, x: Tensor, weight: Tensor | None, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        rms_norm(x, weight, 1e-6)


# ------------------------------------------------------------------------------ special numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_a_row_of_zeros_gives_zeros(kernels: str, dtype: torch.dtype, eps: float) -> None:
    x, weight = tensor(3, 63).to(dtype), torch.ones(63, dtype=dtype)
    x[1] = 0
    y, grad_x, grad_w = with_gradients(
        lambda x, w: rms_norm(x, w, eps), x, weight, torch.ones(3, 63)
    )
    assert torch.equal(y[1], torch.zeros(63, dtype=dtype))
    assert grad_w is not None
    assert grad_w.isfinite().all()
    assert grad_x.isfinite().all()


def test_not_a_number_stays_in_its_row(kernels: str) -> None:
    x = tensor(4, 63).float()
    x[1, 5], x[2, 7] = math.nan, math.inf
    y = rms_norm(x, torch.ones(63), 1e-6)
    assert y[1].isnan().all()
    assert y[2, 7].isnan()
    assert torch.equal(y[2, :7], torch.zeros(7))
    torch.testing.assert_close(y, rms_norm_reference(x, None, 1e-6), equal_nan=True)
    all_ones = torch.tensor([0x7FFFFFFF] * 63, dtype=torch.int32).view(torch.float32)
    assert rms_norm(torch.ones(2, 63).bfloat16(), all_ones, 1e-6, cast_first=False).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_and_small_inputs_stay_finite(kernels: str, dtype: torch.dtype) -> None:
    for scale in (6e4, 1e3, 1e-6):
        x = (scale * (tensor(4, 123).clamp(-1, 1))).to(dtype)
        y, grad_x, _ = with_gradients(
            lambda x, w: rms_norm(x, w, 0.0), x, torch.ones(123, dtype=dtype), 1e-6 * tensor(4, 123)
        )
        assert y.isfinite().all()
        assert grad_x.isfinite().all()
        torch.testing.assert_close(y.double(), exact(x.double(), None, 0.0), rtol=4e-3, atol=4e-3)


# ----------------------------------------------------------------------------- exact properties


def orthogonal(dim: int) -> Tensor:
    q: Tensor = torch.linalg.qr(tensor(dim, dim, seed=7))[0]
    return q


def test_scale_rotation_and_shift(kernels: str) -> None:
    x, w = tensor(8, 63), tensor(63, 63, seed=3) / 8
    norm = lambda x: rms_norm(x, None, 0.0)  # noqa: E731
    same = {"rtol": 0, "atol": 4e-15}
    torch.testing.assert_close(norm(3.7 * x), norm(x), **same)
    torch.testing.assert_close(norm(x @ (3.7 * w).T), norm(x @ w.T), **same)
    torch.testing.assert_close(norm(x @ orthogonal(63)), norm(x) @ orthogonal(63), **same)
    assert not torch.allclose(norm(x + 1), norm(x), atol=1e-2)
    scaled = torch.cat([2 * w[:1], w[1:]])
    assert not torch.allclose(norm(x @ scaled.T), norm(x @ w.T), atol=1e-2)


def test_times_a_power_of_two_is_the_same_to_the_bit(kernels: str) -> None:
    x, weight = tensor(8, 123).float(), tensor(123, seed=1).float()
    assert torch.equal(rms_norm(8 * x, weight, 0.0), rms_norm(x, weight, 0.0))


def test_jacobian(kernels: str) -> None:
    x = tensor(16)
    jacobian = torch.autograd.functional.jacobian(lambda x: rms_norm(x, None, 0.0), x)
    r = x.square().mean().sqrt()
    formula = (torch.eye(16) - torch.outer(x, x) / (16 * r**2)) / r
    torch.testing.assert_close(jacobian, formula, rtol=0, atol=4e-15)
    singular = torch.linalg.svdvals(jacobian)
    torch.testing.assert_close(singular[:-1], (1 / r).expand(15))
    assert singular[-1] < 4e-15


def test_gradient_is_orthogonal_to_the_input(kernels: str) -> None:
    x, weight, grad = tensor(5, 63), tensor(63, seed=1), tensor(5, 63, seed=2)
    norm = lambda x, w: rms_norm(x, w, 0.0)  # noqa: E731
    grad_x = with_gradients(norm, x, weight, grad)[1]
    torch.testing.assert_close((x * grad_x).sum(-1), torch.zeros(5).double(), rtol=0, atol=2e-14)
    grad_of_4x = with_gradients(norm, 4 * x, weight, grad)[1]
    torch.testing.assert_close(4 * grad_of_4x, grad_x, rtol=0, atol=4e-15)


# ----------------------------------------------------------------------------- differentiation


@pytest.mark.parametrize(("x_learns", "w_learns"), [(True, True), (True, False), (False, True)])
def test_first_and_second_gradients(kernels: str, x_learns: bool, w_learns: bool) -> None:
    x, weight = tensor(3, 5).requires_grad_(x_learns), tensor(5).requires_grad_(w_learns)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))


def test_gradients_without_a_gain(kernels: str) -> None:
    x = tensor(3, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, 1e-3), (x,))
    assert torch.autograd.gradgradcheck(lambda x: rms_norm(x, None, 1e-3), (x,))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own use
def test_function_transforms(kernels: str) -> None:
    x, weight = tensor(4, 5), tensor(5)
    norm = lambda x: rms_norm(x, weight, 1e-3)  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(norm)(x), norm(x))
    torch.testing.assert_close(torch.func.jacrev(norm)(x[0]), torch.func.jacfwd(norm)(x[0]))
    outer = x.clone().requires_grad_()  # not of the transform, but inside it
    scaled = torch.func.vmap(lambda s: s * norm(outer))(torch.ones(3, dtype=x.dtype))
    torch.testing.assert_close(scaled, norm(x).expand(3, 4, 5))
    (grad,) = torch.autograd.grad(scaled.sum(), outer)
    torch.testing.assert_close(grad, 3 * torch.func.grad(lambda x: norm(x).sum())(x))
    _, tangent = torch.autograd.functional.jvp(norm, x, torch.ones_like(x))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        forward_mode = torch.autograd.forward_ad.unpack_dual(norm(dual)).tangent
    torch.testing.assert_close(forward_mode, tangent)
    one_by_one = torch.autograd.functional.jacobian(norm, x)
    batched = torch.autograd.functional.jacobian(norm, x, vectorize=True)
    torch.testing.assert_close(batched, one_by_one)


def test_keeps_the_input_and_one_number_a_row_for_the_backward_pass(kernels: str) -> None:
    if kernels == "plain":
        pytest.skip("the plain version keeps what autograd likes")
    x, weight = tensor(32, 63).float().requires_grad_(), torch.ones(63, requires_grad=True)
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        rms_norm(x, weight, 1e-6)
    assert sorted(t.numel() for t in kept) == [32, 63, 32 * 63]


def test_changing_the_input_before_the_backward_pass_is_noticed(kernels: str) -> None:
    x, weight = tensor(4, 5).requires_grad_(), torch.ones(5).double().requires_grad_()
    y = rms_norm(x, weight, 1e-6)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("rows", "dim"), [(2048, 64), (1001, 123), (20, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_to_the_bit_on_any_number_of_threads(
    kernels: str, threads: Callable[[int], None], rows: int, dim: int, dtype: torch.dtype
) -> None:
    x, weight = tensor(rows, dim).to(dtype), tensor(dim, seed=1).to(dtype)
    grad = tensor(rows, dim, seed=2).to(dtype)
    results = []
    for n in (1, 1, 2, 2, 3):
        threads(n)
        results.append(with_gradients(lambda x, w: rms_norm(x, w, 1e-6), x, weight, grad))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            if kernels == "compiled":
                assert torch.equal(got, want)  # type: ignore[arg-type]
            else:
                torch.testing.assert_close(got, want)


# ------------------------------------------------------------------------- modes of torch


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(kernels: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    norm = torch.compile(
        lambda x, w: 2 * rms_norm(x + 1, w, 1e-6),
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    eager = lambda x, w: 2 * rms_norm(x + 1, w, 1e-6)  # noqa: E731
    for rows in (3, 0, 5):
        x, weight, grad = (
            tensor(2, rows, 63).float(),
            tensor(63).float(),
            tensor(2, rows, 63, seed=1),
        )
        for got, want in zip(
            with_gradients(norm, x.transpose(0, 1), weight, grad.transpose(0, 1)),
            with_gradients(eager, x.transpose(0, 1), weight, grad.transpose(0, 1)),
            strict=True,
        ):
            torch.testing.assert_close(got, want)


def test_autocast_and_inference_mode(kernels: str) -> None:
    x, weight = tensor(4, 63).bfloat16(), torch.ones(63, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = rms_norm(x, weight, 1e-6)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, weight, 1e-6), y)
    with torch.no_grad():
        assert not rms_norm(x, weight, 1e-6).requires_grad


@pytest.mark.filterwarnings("ignore")  # torch warns of tracing itself
def test_traces_are_not_of_one_input(kernels: str) -> None:
    x, weight = tensor(3, 5), tensor(5)
    traced = torch.jit.trace(lambda x: rms_norm(x, weight, 1e-6), x)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(traced(2 + x), rms_norm(2 + x, weight, 1e-6))


def test_fake_tensors_and_other_devices(kernels: str) -> None:
    with FakeTensorMode():
        assert rms_norm(torch.empty(3, 5), torch.empty(5), 1e-6).shape == (3, 5)
    x = torch.empty(3, 5, device="meta", dtype=torch.bfloat16)
    for weight in (None, torch.empty(5, device="meta")):
        y = rms_norm(x, weight, 1e-6)
        assert (y.device.type, y.shape, y.dtype) == ("meta", (3, 5), torch.bfloat16)


@pytest.mark.parametrize("cast_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [True, False])
def test_the_way_through_torchs_own_rms_norm(
    dtype: torch.dtype, cast_first: bool, affine: bool
) -> None:
    x = torch.randint(-8, 8, (64, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = (1 + 0.1 * tensor(6)).float() if affine else None
    got = _torch_rms_norm(x, weight, 1e-6, cast_first)
    want = rms_norm_reference(x, weight, 1e-6, cast_first)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-7)
