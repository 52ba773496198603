"""The gated MLP as one function, whose inner activations stay in the cache.

Rows go through a few at a time: both products with SwiGLU between them, forward, and all that is
theirs, backward.  Of what lies between only gate and up are kept.  Forward and backward take 0.8 to
0.95 of the time of the three layers one after another, up to a width of some 300.

Shapes: D width, F inner width.
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
    PARALLEL_FROM,
    differentiable_gradients,
    is_one_dtype,
    is_plain,
    needs_gradient,
)
from minillama.model.kernels.linear import FEW_ROWS, linear
from minillama.model.kernels.matmul import SMALL
from minillama.model.kernels.swiglu import swiglu


def gated_mlp_reference(x: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """Return (silu(x·Gᵀ) · x·Uᵀ)·Wᵀ, (..., D), of x (..., D), with silu(z) = z · σ(z)."""
    return F.linear(F.silu(F.linear(x, gate_FD)) * F.linear(x, up_FD), down_DF)


def gated_mlp(x: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """Do what :func:`gated_mlp_reference` does, by the C kernel where it can be used and pays."""
    tensors = x, gate_FD, up_FD, down_DF
    if (
        not torch.compiler.is_compiling()
        and is_one_dtype((torch.float32, torch.float64), *tensors)
        and is_plain(*tensors)
        and not torch.is_autocast_enabled("cpu")
        and _fit(*tensors)
        and (kernel := _kernel_for(x.dtype, *gate_FD.shape))
    ):
        x, gate_FD, up_FD, down_DF = (tensor.contiguous() for tensor in tensors)
        if needs_gradient(*tensors):
            return cast(Tensor, _apply(x, gate_FD, up_FD, down_DF, kernel))
        if x.numel() > FEW_ROWS * x.shape[-1]:
            return _forward(x, gate_FD, up_FD, down_DF, kernel, keep=False)[0]
    return linear(swiglu(linear(x, gate_FD, up_FD)), down_DF)


def _fit(x: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> bool:
    """Tell whether the kernel, which trusts its sizes, can have these; else PyTorch complains."""
    return (
        gate_FD.ndim == 2
        and x.shape[-1:] == gate_FD.shape[1:]
        and gate_FD.shape == up_FD.shape == down_DF.shape[::-1]
        and x.numel() > 0
    )


def is_one_kernel(dim: int, inner: int) -> bool:
    """Tell whether an MLP of these sizes, in float32 on a CPU, is done by the C kernel here."""
    return _kernel_for(torch.float32, inner, dim) is not None


def _kernel_for(dtype: torch.dtype, inner: int, dim: int) -> _Kernel | None:
    kernel = _load(dtype) if inner * dim <= SMALL else None
    return kernel if kernel and kernel.fits(dim, inner) else None


class _Kernel(NamedTuple):
    forward: Any
    backward: Any
    fits: Any
    forward_room: Any
    backward_room: Any


@functools.cache
def _load(dtype: torch.dtype) -> _Kernel | None:
    library = load_library("mlp", dtype)
    if library is None:
        return None
    pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    library.mlp_forward.argtypes = [*[pointer] * 7, *[long] * 3, integer]
    library.mlp_backward.argtypes = [*[pointer] * 11, *[long] * 3, integer]
    library.mlp_forward.restype = library.mlp_backward.restype = None
    library.mlp_fits.argtypes = [long, long]
    library.mlp_forward_room.argtypes = [long, long, integer]
    library.mlp_backward_room.argtypes = [long, long, long, integer]
    library.mlp_forward_room.restype = library.mlp_backward_room.restype = long
    return _Kernel(
        library.mlp_forward,
        library.mlp_backward,
        library.mlp_fits,
        library.mlp_forward_room,
        library.mlp_backward_room,
    )


def _sizes(x: Tensor, gate: Tensor) -> tuple[int, int, int, int]:
    """Return rows, D, F and how many threads they are worth."""
    inner, dim = gate.shape
    rows = x.numel() // dim
    return rows, dim, inner, torch.get_num_threads() if rows * inner >= PARALLEL_FROM else 1


def _forward(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, kernel: _Kernel, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return y and, if it is to be kept, gate's and up's outputs side by side, (rows, 2F)."""
    rows, dim, inner, threads = sizes = _sizes(x, gate)
    y = torch.empty_like(x)
    gate_and_up = x.new_empty(rows, 2 * inner) if keep else None
    room = x.new_empty(kernel.forward_room(dim, inner, threads))
    kernel.forward(
        x.data_ptr(),
        gate.data_ptr(),
        up.data_ptr(),
        down.data_ptr(),
        y.data_ptr(),
        None if gate_and_up is None else gate_and_up.data_ptr(),
        room.data_ptr(),
        *sizes,
    )
    return y, gate_and_up


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, kernel: _Kernel
    ) -> Tensor:
        y, gate_and_up = _forward(x, gate, up, down, kernel, keep=True)
        ctx.save_for_backward(x, gate, up, down, gate_and_up)
        ctx.kernel = kernel
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (*inputs, gate_and_up), (grad,), kernel = ctx.saved_tensors, grads, ctx.kernel
        if torch.is_grad_enabled() or not is_plain(grad):
            return *differentiable_gradients(gated_mlp_reference, inputs, grad), None
        grad, sizes = grad.contiguous(), _sizes(*inputs[:2])
        found = [
            torch.empty_like(tensor) if wanted else None
            for tensor, wanted in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        room = grad.new_empty(kernel.backward_room(*sizes))
        kernel.backward(
            grad.data_ptr(),
            *(tensor.data_ptr() for tensor in inputs),
            gate_and_up.data_ptr(),
            *(None if tensor is None else tensor.data_ptr() for tensor in found),
            room.data_ptr(),
            *sizes,
        )
        return *found, None


_apply: Any = _GatedMLP.apply
