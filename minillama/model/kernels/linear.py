"""x·Wᵀ for one weight, or for several that share x as one product.

training on a CPU      the products of matmul.py
decoding on a CPU      the C kernel for up to 64 rows: it reads weights as fast as the memory gives
                       them, and takes half of oneDNN's time for 16 rows, 0.7 for 64
elsewhere              F.linear
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.model.kernels.compiled import load_library
from minillama.model.kernels.dispatch import (
    differentiable_gradients,
    is_one_dtype,
    is_plain,
    needs_gradient,
)
from minillama.model.kernels.matmul import product, weight_gradient

FEW_ROWS = 64  # with so few, copying the weights side by side would cost more than it gains


def linear(x: Tensor, *weights: Tensor) -> Tensor:
    """Return [x·W₁ᵀ, x·W₂ᵀ, …] side by side.

    Args:
        x: (..., in).
        weights: (out₁, in), (out₂, in), …

    Returns:
        (..., out₁ + out₂ + …).
    """
    if (
        torch.compiler.is_compiling()
        or not is_one_dtype((torch.float32,), x, *weights)
        or not is_plain(x, *weights)
        or torch.is_autocast_enabled("cpu")
        or not x.numel()
    ):
        return F.linear(x, _together(weights))
    rows = x.numel() // x.shape[-1]
    if needs_gradient(x, *weights):
        return cast(Tensor, _apply(x, _together(weights)))
    if rows <= FEW_ROWS:
        if kernel := _load(x.dtype):
            return _few_rows(x.contiguous(), weights, rows, kernel)
        return torch.cat([product(x, weight) for weight in weights], dim=-1)
    return product(x, _together(weights))


def _together(weights: tuple[Tensor, ...]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        if torch.is_grad_enabled() or not is_plain(grad):
            return tuple(differentiable_gradients(F.linear, [x, weight], grad))
        for_x, for_weight = ctx.needs_input_grad
        grad_x = product(grad, weight.t()) if for_x else None
        grad_weight = None
        if for_weight:
            rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
            grad_weight = weight_gradient(*rows)
        return grad_x, grad_weight


_apply: Any = _Linear.apply


@functools.cache
def _load(dtype: torch.dtype) -> Any:
    library = load_library("linear", dtype)
    if library is None:
        return None
    library.linear.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_long] * 4, ctypes.c_int]
    library.linear.restype = None
    return library.linear


def _few_rows(x: Tensor, weights: tuple[Tensor, ...], rows: int, kernel: Any) -> Tensor:
    n_in, n_out = x.shape[-1], sum(weight.shape[0] for weight in weights)
    y = x.new_empty(*x.shape[:-1], n_out)
    room = x.new_empty(FEW_ROWS * n_in if rows > 1 else 0)
    place, threads = y.data_ptr(), torch.get_num_threads()
    for weight in weights:
        weight = weight.contiguous()
        n, width = weight.shape
        if width != n_in:  # the kernel would read beyond it; torch says what is wrong
            return F.linear(x, weight)
        kernel(
            x.data_ptr(),
            weight.data_ptr(),
            place,
            room.data_ptr(),
            rows,
            n_in,
            n,
            n_out,
            threads,
        )
        place += n * y.element_size()
    return y
