"""RMSNorm as fast as the machine allows, chosen by where the tensor is.

    CPU         the C kernel (compiled.py): one pass each way, keeps x and 1/rms only
    elsewhere   torch's own F.rms_norm, fused on CUDA since torch 2.9
    neither     the plain reference: no compiler, another dtype, torch.func, a tensor subclass

In eager mode an autograd.Function calls the kernel, which costs the least per call; what traces
(torch.compile, torch.export) meets the same kernel as the operator ``minillama::rms_norm``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.errors import ConfigError
from minillama.model.kernels.compiled import MACROS, Kernel, load
from minillama.model.kernels.dispatch import is_plain, threads_for
from minillama.model.kernels.reference import (
    inverse_rms,
    rms_norm_backward_reference,
    rms_norm_reference,
    wide_dtype,
)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool = True) -> Tensor:
    """Return x / √(mean(x²) + ε) · γ over the last dimension, in x's shape and dtype.

    The same function as :func:`~minillama.model.kernels.reference.rms_norm_reference`, which says
    what the arguments mean and in which order casts are done; equal to it to rounding.

    Raises:
        ConfigError: ``weight`` is not of shape (d,), d the size of x's last dimension, or x has no
            dimension or is not floating point.
    """
    shape = x.shape[-1:]
    if not shape or (weight is not None and weight.shape != shape):
        raise ConfigError(
            f"an RMSNorm with a gain of shape {None if weight is None else tuple(weight.shape)} "
            f"was given x of shape {tuple(x.shape)}; build it for the size of x's last dimension"
        )
    if torch.compiler.is_compiling():
        if x.is_cpu and shape[0] > 0 and x.dtype in MACROS:
            y: Tensor = torch.ops.minillama.rms_norm(x, weight, eps, cast_first)[0]
            return y
    elif is_plain(x, weight) and x.numel() > 0 and (kernel := load(x.dtype)):
        x = x.contiguous()
        if torch.is_grad_enabled() and (
            x.requires_grad or (weight is not None and weight.requires_grad)
        ):
            return cast(Tensor, _apply(x, weight, (kernel, eps, cast_first)))
        return _forward(kernel, x, weight, eps, cast_first, keep_r=False)[0]
    if not x.is_floating_point():
        raise ConfigError(f"an RMSNorm was given x of dtype {x.dtype}; give it floating point")
    if x.is_cpu or eps == 0:  # F.rms_norm makes NaN of a row of zeros if ε is 0
        return rms_norm_reference(x, weight, eps, cast_first)
    return _torch_rms_norm(x, weight, eps, cast_first)


def _torch_rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool) -> Tensor:
    """Do it with torch's F.rms_norm, which multiplies by the gain before it casts."""
    dim, wide = x.shape[-1:], wide_dtype(x.dtype)
    if weight is None or x.dtype == weight.dtype == wide:
        return F.rms_norm(x, dim, weight, eps)
    if cast_first:
        return F.rms_norm(x, dim, None, eps) * weight.to(x.dtype)
    return F.rms_norm(x.to(wide), dim, weight.to(wide), eps).to(x.dtype)


def _gain(kernel: Kernel, x: Tensor, weight: Tensor | None, cast_first: bool) -> Tensor:
    """Return γ as the kernel reads it: contiguous, in the wide dtype, rounded as it should be."""
    if weight is None:
        return torch.ones(x.shape[-1], dtype=kernel.wide)
    if weight.dtype is not kernel.wide or x.dtype is not kernel.wide:
        weight = (weight.to(x.dtype) if cast_first else weight).to(kernel.wide)
    return weight.contiguous()


def _forward(
    kernel: Kernel, x: Tensor, weight: Tensor | None, eps: float, cast_first: bool, keep_r: bool
) -> tuple[Tensor, Tensor | None]:
    """Return y for contiguous ``x`` and, if it is to be kept, 1 / rms of each row, flat."""
    y, gain, dim = torch.empty_like(x), _gain(kernel, x, weight, cast_first), x.shape[-1]
    n_rows = x.numel() // dim
    r = gain.new_empty(n_rows) if keep_r else None
    kernel.forward(
        x.data_ptr(),
        gain.data_ptr(),
        y.data_ptr(),
        None if r is None else r.data_ptr(),
        n_rows,
        dim,
        eps,
        cast_first,
        threads_for(x),
    )
    return y, r


def _backward(
    kernel: Kernel, grad: Tensor, x: Tensor, weight: Tensor | None, r: Tensor, cast_first: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients for contiguous ``x`` and, in the wide dtype, for the gain."""
    grad, gain = grad.contiguous(), _gain(kernel, x, weight, cast_first)
    grad_x, grad_gain, dim = torch.empty_like(x), torch.empty_like(gain), x.shape[-1]
    status = kernel.backward(
        grad.data_ptr(),
        x.data_ptr(),
        gain.data_ptr(),
        r.data_ptr(),
        grad_x.data_ptr(),
        grad_gain.data_ptr(),
        x.numel() // dim,
        dim,
        threads_for(x),
    )
    if status != 0:
        raise MemoryError("no memory for the gradient of an RMSNorm's gain")
    return grad_x, grad_gain


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, how: tuple[Kernel, float, bool]
    ) -> Tensor:
        kernel, eps, cast_first = ctx.how = how
        y, r = _forward(kernel, x, weight, eps, cast_first, keep_r=True)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (x, weight, r), (kernel, eps, cast_first) = grads[0], ctx.saved_tensors, ctx.how
        if torch.is_grad_enabled() or not is_plain(grad):  # the gradient is to be differentiated
            r = inverse_rms(x.to(kernel.wide), eps)  # again: it depends on x
            grad_x, grad_gain = rms_norm_backward_reference(grad, x, weight, r)
        else:
            grad_x, grad_gain = _backward(kernel, grad, x, weight, r, cast_first)
        return grad_x, None if weight is None else grad_gain, None  # autograd casts to their dtypes


# Function.apply itself, which first looks for what is_plain has excluded, adds 1.6 µs.
_apply: Any = super(torch.autograd.Function, _RMSNorm).apply


# ------------------------------------------------------------------------- the traced operator


torch.library.define(
    "minillama::rms_norm",
    "(Tensor x, Tensor? weight, float eps, bool cast_first) -> (Tensor, Tensor)",
)
torch.library.define(
    "minillama::rms_norm_backward",
    "(Tensor grad, Tensor x, Tensor? weight, Tensor r, bool cast_first) -> (Tensor, Tensor)",
)


@torch.library.impl("minillama::rms_norm", "CPU")
def _op(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool) -> tuple[Tensor, Tensor]:
    x, kernel = x.contiguous(), load(x.dtype)
    if kernel:
        y, r = _forward(kernel, x, weight, eps, cast_first, keep_r=True)
        assert r is not None
        return y, r
    r = inverse_rms(x.to(wide_dtype(x.dtype)), eps)
    return rms_norm_reference(x, weight, eps, cast_first), r.flatten()


@torch.library.register_fake("minillama::rms_norm")  # type: ignore[untyped-decorator]
def _op_fake(
    x: Tensor, weight: Tensor | None, eps: float, cast_first: bool
) -> tuple[Tensor, Tensor]:
    r = x.new_empty(x.numel() // x.shape[-1], dtype=wide_dtype(x.dtype))
    return torch.empty_like(x, memory_format=torch.contiguous_format), r


@torch.library.impl("minillama::rms_norm_backward", "CPU")
def _op_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, r: Tensor, cast_first: bool
) -> tuple[Tensor, Tensor]:
    x, kernel = x.contiguous(), load(x.dtype)
    if kernel:
        return _backward(kernel, grad, x, weight, r, cast_first)
    return rms_norm_backward_reference(grad, x, weight, r.view(*x.shape[:-1], 1))


@torch.library.register_fake("minillama::rms_norm_backward")  # type: ignore[untyped-decorator]
def _op_backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor | None, r: Tensor, cast_first: bool
) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, x.new_empty(x.shape[-1], dtype=wide_dtype(x.dtype))


def _op_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.cast_first = inputs
    ctx.save_for_backward(x, weight, output[1])


def _op_autograd(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, r = ctx.saved_tensors
    grad_x, grad_gain = torch.ops.minillama.rms_norm_backward(grad, x, weight, r, ctx.cast_first)
    return grad_x, None if weight is None else grad_gain.to(weight.dtype), None, None


torch.library.register_autograd("minillama::rms_norm", _op_autograd, setup_context=_op_setup)
