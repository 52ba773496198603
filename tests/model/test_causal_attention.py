"""Causal attention's kernel against float64, and against what must hold exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import tensor, with_gradient
from torch import Tensor

from minillama.model.kernels import causal_attention, causal_attention_reference
from minillama.model.rope import RotaryEmbedding, Rotation

LENGTHS = [1, 2, 7, 33, 100, 129]
HEAD_DIMS = [2, 6, 16, 24, 48, 80]
HEADS = [(1, 1), (2, 1), (4, 2), (6, 6), (6, 1)]


def rotation_of(length: int, dim: int, dtype: torch.dtype) -> Rotation:
    rotation: Rotation = RotaryEmbedding(dim, max(1, length))(torch.arange(length), dtype)
    return rotation


def exact(qkv: Tensor, rotation: Rotation, n_heads: int, n_kv_heads: int) -> Tensor:
    """Turned as complex numbers, one head and one query at a time."""
    half = qkv.shape[-1] // 2
    turns = torch.complex(*(y.double() for y in rotation))[:, None]
    pairs = torch.complex(qkv[..., :half], qkv[..., half:]) * turns
    turned = torch.cat((pairs.real, pairs.imag), dim=-1)
    ys = []
    for head in range(n_heads):
        kv = n_heads + head // (n_heads // n_kv_heads)
        q, k, v = turned[:, :, head], turned[:, :, kv], qkv[:, :, kv + n_kv_heads]
        rows = []
        for t in range(qkv.shape[1]):
            scores = (k[:, : t + 1] @ q[:, t, :, None])[..., 0] / math.sqrt(qkv.shape[-1])
            rows.append((scores.softmax(-1)[..., None] * v[:, : t + 1]).sum(1))
        ys.append(torch.stack(rows, dim=1))
    return torch.stack(ys, dim=2)


# ------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("place", range(len(HEAD_DIMS)))
def test_values_and_gradients_are_those_of_float64(kernels: str, length: int, place: int) -> None:
    dim, (n_heads, n_kv_heads) = HEAD_DIMS[place], HEADS[(place + length) % len(HEADS)]
    for dtype in (torch.float32, torch.float64):
        qkv = tensor(2, length, n_heads + 2 * n_kv_heads, dim).to(dtype)
        grad = tensor(2, length, n_heads, dim, seed=1).to(dtype)
        rotation = rotation_of(length, dim, dtype)
        how = rotation, n_heads, n_kv_heads
        ours = with_gradient(causal_attention, qkv, grad, *how)
        true = with_gradient(exact, qkv.double(), grad.double(), *how)
        tolerance = 64 * torch.finfo(dtype).eps
        for got, want in zip(ours, true, strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
        assert torch.equal(causal_attention(qkv, *how), ours[0])


@pytest.mark.parametrize("heads", HEADS)
def test_grouped_heads(kernels: str, heads: tuple[int, int]) -> None:
    qkv, grad = tensor(3, 9, heads[0] + 2 * heads[1], 6), tensor(3, 9, heads[0], 6, seed=1)
    how = rotation_of(9, 6, torch.float64), *heads
    ours = with_gradient(causal_attention, qkv, grad, *how)
    torch.testing.assert_close(ours, with_gradient(exact, qkv, grad, *how))


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(0, 3),
    length=st.integers(0, 20),
    half=st.integers(1, 20),
    n_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    strided=st.booleans(),
)
def test_any_shape_and_strides(
    batch: int, length: int, half: int, n_kv_heads: int, group: int, strided: bool
) -> None:
    n_heads = n_kv_heads * group
    qkv = tensor(batch, 2 * length, n_heads + 2 * n_kv_heads, 2 * half)[:, ::2]
    grad = tensor(batch, n_heads, length, 2 * half, seed=1).transpose(1, 2)
    if not strided:
        qkv, grad = qkv.contiguous(), grad.contiguous()
    how = rotation_of(length, 2 * half, torch.float64), n_heads, n_kv_heads
    ours = with_gradient(causal_attention, qkv, grad, *how)
    plain = with_gradient(causal_attention_reference, qkv, grad, *how)
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_torchs(kernels: str, dtype: torch.dtype) -> None:
    qkv, grad = tensor(2, 9, 8, 6).to(dtype), tensor(2, 9, 4, 6, seed=1).to(dtype)
    how = rotation_of(9, 6, dtype), 4, 2
    ours = with_gradient(causal_attention, qkv, grad, *how)
    torchs = with_gradient(causal_attention_reference, qkv, grad, *how)
    for got, want in zip(ours, torchs, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want)


def test_autocast_gives_torchs_dtype(kernels: str) -> None:
    how = rotation_of(9, 6, torch.float32), 4, 2
    qkv = tensor(2, 9, 8, 6).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = causal_attention(qkv, *how)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), causal_attention(qkv, *how), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("heads", "length"),
    [((1, 1), 5), ((2, 1), 4), ((3, 2), 4)],
    ids=["too few rotations", "too many heads", "heads that cannot be grouped"],
)
def test_sizes_that_do_not_fit_are_refused(
    kernels: str, heads: tuple[int, int], length: int
) -> None:
    n_kv_heads = heads[1]
    n_stored = 3 if heads == (2, 1) else heads[0] + 2 * n_kv_heads
    for learns in (False, True):
        qkv = tensor(2, length, n_stored, 6).requires_grad_(learns)
        with pytest.raises(ValueError, match="must be qkv"):
            causal_attention(qkv, rotation_of(4, 6, torch.float64), *heads)


# ----------------------------------------------------------------------------- exact properties


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [6, 48])
def test_no_position_sees_a_later_one(kernels: str, dtype: torch.dtype, dim: int) -> None:
    qkv, rotation = tensor(2, 40, 6, dim).to(dtype), rotation_of(40, dim, dtype)
    y = causal_attention(qkv, rotation, 2, 2)
    for t in (1, 7, 8, 9, 31, 39):
        changed = torch.cat((qkv[:, :t], 5 + tensor(2, 40 - t, 6, dim, seed=t).to(dtype)), dim=1)
        other = causal_attention(changed, rotation, 2, 2)
        assert not torch.equal(other[:, t], y[:, t])
        start = causal_attention(qkv[:, :t], rotation_of(t, dim, dtype), 2, 2)
        if kernels == "compiled":
            assert torch.equal(other[:, :t], y[:, :t])
            assert torch.equal(start, y[:, :t])
        else:
            torch.testing.assert_close(other[:, :t], y[:, :t])
        learning = qkv.clone().requires_grad_()
        loss = causal_attention(learning, rotation, 2, 2)[:, :t].square().sum()
        (grad,) = torch.autograd.grad(loss, learning)
        assert grad[:, :t].abs().sum((0, 2, 3)).min() > 0
        assert not grad[:, t:].any()


def test_rows_of_a_batch_and_heads_do_not_see_each_other(kernels: str) -> None:
    qkv, grad = tensor(3, 33, 8, 24).float(), tensor(3, 33, 4, 24, seed=1).float()
    rotation = rotation_of(33, 24, torch.float32)
    whole = with_gradient(causal_attention, qkv, grad, rotation, 4, 2)
    for row in range(3):
        alone = with_gradient(causal_attention, qkv[[row]], grad[[row]], rotation, 4, 2)
        for got, want in zip(alone, whole, strict=True):
            if kernels == "compiled":
                assert torch.equal(got[0], want[row])
            else:
                torch.testing.assert_close(got[0], want[row])
    group = [2, 3, 5, 7]  # the second key/value head, its queries and its values
    alone = with_gradient(causal_attention, qkv[:, :, group], grad[:, :, 2:], rotation, 2, 1)
    torch.testing.assert_close(alone[0], whole[0][:, :, 2:])
    torch.testing.assert_close(alone[1], whole[1][:, :, group])


@pytest.mark.parametrize(("batch", "length"), [(1, 200), (7, 33)])
def test_the_same_to_the_bit_on_any_number_of_threads(
    kernels: str, threads: Callable[[int], None], batch: int, length: int
) -> None:
    qkv, grad = tensor(batch, length, 8, 24).float(), tensor(batch, length, 4, 24, seed=1).float()
    how = rotation_of(length, 24, torch.float32), 4, 2
    results = []
    for n in (1, 1, 2, 2, 3):
        threads(n)
        results.append(with_gradient(causal_attention, qkv, grad, *how))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            if kernels == "compiled":
                assert torch.equal(got, want)
            else:
                torch.testing.assert_close(got, want)


def test_equal_keys_give_the_mean_of_the_values(kernels: str) -> None:
    qkv = tensor(2, 50, 3, 6)
    qkv[:, :, 0] = 0
    y = causal_attention(qkv, rotation_of(50, 6, torch.float64), 1, 1)[:, :, 0]
    mean = qkv[:, :, 2].cumsum(1) / torch.arange(1, 51)[:, None]
    torch.testing.assert_close(y, mean)


# ------------------------------------------------------------------------------- hostile numbers


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", range(3))
def test_what_is_not_a_number_reaches_all_that_depend_on_it(
    kernels: str, number: float, part: int
) -> None:
    t, rotation = 18, rotation_of(40, 6, torch.float64)
    qkv, grad = tensor(2, 40, 3, 6), tensor(2, 40, 1, 6, seed=1)
    clean = causal_attention(qkv, rotation, 1, 1)
    qkv[0, t, part, 2] = number
    y, grad_qkv = with_gradient(causal_attention, qkv, grad, rotation, 1, 1)
    want, want_grad = with_gradient(exact, qkv, grad, rotation, 1, 1)
    at_or_after = torch.arange(40) >= t
    assert torch.equal(y[0, at_or_after].isfinite(), want[0, at_or_after].isfinite())
    assert not grad_qkv[0][~want_grad[0].isfinite()].isfinite().any()
    # Of earlier rows torch's own kernels spoil some or all, by 0 times what is not a number.
    if part < 2:
        torch.testing.assert_close(y[0, :16], clean[0, :16])
    torch.testing.assert_close(y[1], clean[1])
    assert grad_qkv[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_scores_do_not_overflow(kernels: str, dtype: torch.dtype) -> None:
    qkv, grad = tensor(2, 40, 3, 6).to(dtype), tensor(2, 40, 1, 6, seed=1).to(dtype)
    qkv[:, :, :2] *= 100  # scores of some 10⁴
    how = rotation_of(40, 6, dtype), 1, 1
    ours = with_gradient(causal_attention, qkv, grad, *how)
    true = with_gradient(exact, qkv.double(), grad.double(), *how)
    for got, want, scale in zip(ours, true, (1, 100), strict=True):
        assert got.isfinite().all()
        tolerance = 4e5 * torch.finfo(dtype).eps  # of a score, which an exponential passes on
        error = (got.double() - want).abs().max()
        assert error < scale * tolerance * max(1, want.abs().max().item())
    qkv[:, :, :2] *= 1e8 if dtype == torch.float32 else 1e60
    y, grad_qkv = with_gradient(causal_attention, qkv, grad, *how)
    assert y.isfinite().all()
    if kernels == "compiled":  # torch's own gradient is NaN here
        assert grad_qkv.isfinite().all()


# ----------------------------------------------------------------------------- differentiation


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (4, 2)])
def test_first_and_second_gradients(kernels: str, heads: tuple[int, int]) -> None:
    rotation = rotation_of(4, 4, torch.float64)
    qkv = tensor(2, 4, heads[0] + 2 * heads[1], 4).requires_grad_()
    function = lambda qkv: causal_attention(qkv, rotation, *heads)  # noqa: E731
    assert torch.autograd.gradcheck(function, (qkv,))
    # Of torch's own kernels only this one has a second derivative.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(function, (qkv,), fast_mode=True)


def test_the_backward_pass_can_be_run_twice(kernels: str) -> None:
    qkv = tensor(2, 9, 4, 6).float().requires_grad_()
    y = causal_attention(qkv, rotation_of(9, 6, torch.float32), 2, 1).sum()
    first, second = (torch.autograd.grad(y, qkv, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_keeps_no_matrix_of_probabilities(kernels: str) -> None:
    if kernels == "plain":
        pytest.skip("the plain version keeps what torch likes")
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    qkv = tensor(2, 64, 8, 6).float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        causal_attention(qkv, rotation_of(64, 6, torch.float32), 4, 2)
    rotations, log_sum, y = 64 * 3, 2 * 4 * 64, 2 * 64 * 4 * 6
    assert sorted(t.numel() for t in kept) == sorted([rotations] * 2 + [log_sum, y, qkv.numel()])


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own use
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of vmap
def test_function_transforms(kernels: str) -> None:
    rotation = rotation_of(5, 4, torch.float64)
    qkv, direction = tensor(3, 2, 5, 4, 4), tensor(2, 5, 4, 4, seed=1)
    function = lambda qkv: causal_attention(qkv, rotation, 2, 1)  # noqa: E731
    true = lambda qkv: exact(qkv, rotation, 2, 1)  # noqa: E731
    want = torch.stack([true(row) for row in qkv])
    torch.testing.assert_close(torch.func.vmap(function)(qkv), want)
    ones = torch.ones(2, 5, 2, 4)
    torch.testing.assert_close(
        torch.func.grad(lambda qkv: function(qkv).sum())(qkv[0]),
        with_gradient(true, qkv[0], ones)[1],
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        value, tangent = torch.func.jvp(function, (qkv[0],), (direction,))
    _, want_tangent = torch.autograd.functional.jvp(true, qkv[0], direction)
    torch.testing.assert_close((value, tangent), (want[0], want_tangent))
