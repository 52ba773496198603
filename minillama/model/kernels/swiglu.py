"""SwiGLU's element-wise part: silu(gate) · up, from the two side by side.

In plain PyTorch the forward pass keeps four tensors for the backward pass; here it keeps one.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.model.kernels.compiled import load_library
from minillama.model.kernels.dispatch import (
    differentiable_gradients,
    is_one_dtype,
    is_plain,
    needs_gradient,
    threads_for,
)


def swiglu_reference(x: Tensor) -> Tensor:
    """Return silu(g) · u for x = [g, u] of shape (..., 2F): (..., F), with silu(z) = z · σ(z)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(x: Tensor) -> Tensor:
    """Do what :func:`swiglu_reference` does, by the C kernel where it can be used."""
    if (
        not torch.compiler.is_compiling()
        and is_plain(x)
        and is_one_dtype((torch.float32, torch.float64), x)
        and x.numel()
        and x.shape[-1] % 2 == 0
        and (kernel := _load(x.dtype))
    ):
        x = x.contiguous()
        if needs_gradient(x):
            return cast(Tensor, _apply(x, kernel))
        return _forward(x, kernel)
    return swiglu_reference(x)


class _Kernel(NamedTuple):
    forward: Any
    backward: Any


@functools.cache
def _load(dtype: torch.dtype) -> _Kernel | None:
    library = load_library("swiglu", dtype)
    if library is None:
        return None
    pointer, sizes = ctypes.c_void_p, [ctypes.c_long, ctypes.c_long, ctypes.c_int]
    library.swiglu_forward.argtypes = [*[pointer] * 2, *sizes]
    library.swiglu_backward.argtypes = [*[pointer] * 3, *sizes]
    library.swiglu_forward.restype = library.swiglu_backward.restype = None
    return _Kernel(library.swiglu_forward, library.swiglu_backward)


def _forward(x: Tensor, kernel: _Kernel) -> Tensor:
    dim = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], dim)
    kernel.forward(x.data_ptr(), y.data_ptr(), y.numel() // dim, dim, threads_for(y))
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: _Kernel) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kernel = kernel
        return _forward(x, kernel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (grad,) = ctx.saved_tensors, grads
        if torch.is_grad_enabled() or not is_plain(grad):
            return *differentiable_gradients(swiglu_reference, [x], grad), None
        grad, grad_x, dim = grad.contiguous(), torch.empty_like(x), x.shape[-1] // 2
        ctx.kernel.backward(
            grad.data_ptr(),
            x.data_ptr(),
            grad_x.data_ptr(),
            grad.numel() // dim,
            dim,
            threads_for(grad),
        )
        return grad_x, None


_apply: Any = _SwiGLU.apply
