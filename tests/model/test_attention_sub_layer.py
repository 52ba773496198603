"""x + attention(RMSNorm(x)) in one, against the formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kernel_helpers import tensor
from torch import Tensor

from minillama.model.kernels import library, residual_attention, residual_attention_reference
from minillama.model.rope import RotaryEmbedding, Rotation

EPS = 1e-6


class Sizes(NamedTuple):
    batch: int
    length: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int


SIZES = [
    Sizes(1, 1, 16, 1, 1, 2),
    Sizes(2, 37, 64, 4, 2, 16),
    Sizes(3, 65, 48, 3, 1, 10),  # projections that fill no whole vectors
    Sizes(1, 97, 32, 2, 2, 48),
    Sizes(2, 300, 1024, 1, 1, 16),  # three groups of rows
]


def inputs(s: Sizes) -> list[Tensor]:
    """Return x, the gain, the weights of q, k and v, and o's."""
    stored, read = (s.n_heads + 2 * s.n_kv_heads) * s.head_dim, s.n_heads * s.head_dim
    return [
        tensor(s.batch, s.length, s.dim),
        tensor(s.dim, seed=1),
        tensor(stored, s.dim, seed=2) / s.dim**0.5,
        tensor(s.dim, read, seed=3) / read**0.5,
    ]


def rotation(s: Sizes, dtype: torch.dtype) -> Rotation:
    return RotaryEmbedding(s.head_dim, s.length)(torch.arange(s.length), dtype)


def fused(s: Sizes, *tensors: Tensor) -> Tensor | None:
    x, gain, qkv, o = tensors
    read, shared = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    weights = qkv[:read], qkv[read : read + shared], qkv[read + shared :]
    return residual_attention(
        x, gain, weights, o, rotation(s, x.dtype), s.n_heads, s.n_kv_heads, EPS
    )


def reference(s: Sizes, *tensors: Tensor) -> Tensor:
    cos, sin = rotation(s, torch.float32)  # rounded as for the kernel
    turned = cos.to(tensors[0].dtype), sin.to(tensors[0].dtype)
    return residual_attention_reference(*tensors, *turned, s.n_heads, s.n_kv_heads, EPS)


def with_gradients(
    function: Callable[..., Tensor | None], s: Sizes, grad: Tensor, *tensors: Tensor
) -> list[Tensor]:
    tensors = tuple(x.detach().requires_grad_() for x in tensors)
    y = function(s, *tensors)
    assert y is not None
    return [y.detach(), *torch.autograd.grad(y, tensors, grad)]


@pytest.fixture
def _has_kernel() -> None:
    c = library.load(torch.float32)
    if c is None or not c.normed_linear_fits(dim=64):
        pytest.skip("no C compiler, or few vector registers")


@pytest.mark.usefixtures("_has_kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("s", SIZES, ids=str)
def test_values_and_gradients_are_those_of_float64(s: Sizes, dtype: torch.dtype) -> None:
    grad = tensor(s.batch, s.length, s.dim, seed=4)
    true = with_gradients(reference, s, grad, *inputs(s))
    ours = with_gradients(fused, s, grad.to(dtype), *(x.to(dtype) for x in inputs(s)))
    for got, want in zip(ours, true, strict=True):
        tolerance = (64 if dtype is torch.float32 else 1024) * torch.finfo(dtype).eps
        assert got.dtype == dtype
        assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.usefixtures("_has_kernel")
@pytest.mark.parametrize("s", [Sizes(4, 129, 64, 4, 2, 16), SIZES[-1]], ids=str)
def test_any_number_of_threads_gives_the_same_to_the_bit(
    threads: Callable[[int], None], s: Sizes
) -> None:
    tensors, grad = [x.float() for x in inputs(s)], tensor(s.batch, s.length, s.dim, seed=4).float()
    threads(1)
    one = with_gradients(fused, s, grad, *tensors)
    for n in (2, 3):
        threads(n)
        for got, want in zip(with_gradients(fused, s, grad, *tensors), one, strict=True):
            assert torch.equal(got, want)
        without = fused(s, *tensors)  # keeps nothing for a backward pass
        assert without is not None
        assert torch.equal(without, one[0])


@pytest.mark.usefixtures("_has_kernel")
@pytest.mark.parametrize("learns", range(4))
def test_what_learns_alone_gets_the_same_gradient(learns: int) -> None:
    s = SIZES[1]
    tensors, grad = [x.float() for x in inputs(s)], tensor(s.batch, s.length, s.dim, seed=4).float()
    whole = with_gradients(fused, s, grad, *tensors)[1 + learns]
    tensors[learns].requires_grad_()
    y = fused(s, *tensors)
    assert y is not None
    assert torch.equal(torch.autograd.grad(y, tensors[learns], grad)[0], whole)


@pytest.mark.usefixtures("_has_kernel")
def test_gradients_can_be_differentiated() -> None:
    s = Sizes(1, 3, 16, 2, 1, 4)
    tensors = [x.requires_grad_() for x in inputs(s)]
    assert torch.autograd.gradcheck(lambda *x: fused(s, *x), tensors)
    assert torch.autograd.gradgradcheck(lambda *x: fused(s, *x), tensors)


def test_what_no_kernel_can_do_is_left_to_the_caller() -> None:
    s = SIZES[1]
    tensors = [x.float().requires_grad_() for x in inputs(s)]
    x, gain, qkv, o = tensors
    assert fused(s, *(t.bfloat16() for t in tensors)) is None
    assert fused(s, x, gain.double(), qkv, o) is None
    assert fused(s, x[..., :60], gain[:60], qkv[:, :60], o[:60]) is None  # no whole vectors
    assert fused(s, x, gain[:1], qkv, o) is None
    assert fused(s, x, gain, qkv[:-1], o) is None
    assert fused(s, x, gain, qkv, o[:-1]) is None
    assert fused(s._replace(length=3), *tensors) is None  # rotations of other positions
    assert fused(s, *(t.to("meta") for t in tensors)) is None
    with torch.no_grad():
        assert fused(s._replace(length=9), x[:1, :9], gain, qkv, o) is None  # few rows
    with torch.autocast("cpu"):
        assert fused(s, *tensors) is None
