"""RMSNorm, as fast as the machine allows.

CPU         the C kernel: one pass each way, keeps x and 1/rms only
elsewhere   torch's own F.rms_norm, fused on CUDA since torch 2.9
neither     the plain formula: no compiler, another dtype, torch.func, a tensor subclass
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.model.kernels.frame import Kernel, c_library, threads_for


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cast_first: bool = True,
    n_measured: int | None = None,
) -> Tensor:
    """Return y = x / √(mean(x²) + ε) · γ over the last dimension, in x's shape and dtype.

    Zhang & Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv 1910.07467); ε inside the
    root as in Llama.  A row of zeros gives zeros, with ε = 0 too.

    Casts: x to float32 (float64 stays), normalised there; then with ``cast_first`` to x's dtype and
    times γ in that dtype (Hugging Face's Llama), else times γ in float32 and then to x's dtype
    (Gemma).

    Args:
        x: (..., d), floating point.
        weight: the gain γ, (d,); None is 1.
        eps: ε, at least 0.
        cast_first: the order of the last two steps.
        n_measured: the mean is over this many of the first features (pRMSNorm, section 4 of the
            paper); None is all.
    """
    wide = x.to(wide_dtype(x.dtype))
    normed = wide * inverse_rms(wide[..., :n_measured], eps)
    if weight is None:
        return normed.to(x.dtype)
    if cast_first:
        return normed.to(x.dtype) * weight.to(x.dtype)
    return (normed * weight).to(x.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that statistics of ``dtype`` are computed in: at least float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / √(mean(x²) + ε) over the last dimension, kept; 0 where that is 1/0."""
    mean_square = x.square().mean(-1, keepdim=True) + eps
    return mean_square.masked_fill(mean_square == 0, math.inf).rsqrt()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool = True) -> Tensor:
    """Return x / √(mean(x²) + ε) · γ over the last dimension, in x's shape and dtype.

    The same function as :func:`rms_norm_reference`, which documents the arguments and the order of
    casts; equal to it to rounding.

    Raises:
        ValueError: ``weight`` is not of shape (d,), d the size of x's last dimension, or x has no
            dimension or is not floating point.
    """
    shape = x.shape[-1:]
    if not shape or (weight is not None and weight.shape != shape):
        raise ValueError(
            f"an RMSNorm with a gain of shape {None if weight is None else tuple(weight.shape)} "
            f"was given x of shape {tuple(x.shape)}; build it for the size of x's last dimension"
        )
    if c := c_library(x, others=(weight,), half=True, under_autocast=True):
        y: Tensor = _RMS_NORM(c, (x, weight), eps, cast_first)
        return y
    if not x.is_floating_point():
        raise ValueError(f"an RMSNorm was given x of dtype {x.dtype}; give it floating point")
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


def _wide_gain(x: Tensor, weight: Tensor | None, cast_first: bool) -> Tensor:
    """Return γ as the kernel reads it: in the wide dtype, rounded as the order of casts asks."""
    wide = wide_dtype(x.dtype)
    if weight is None:
        return torch.ones(x.shape[-1], dtype=wide)
    if weight.dtype is x.dtype is wide:
        return weight
    return (weight.to(x.dtype) if cast_first else weight).to(wide)


def _forward(
    c: Any,
    needed: tuple[bool, ...],
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cast_first: bool,
) -> tuple[Tensor, tuple[Tensor | None]]:
    y, gain, dim = torch.empty_like(x), _wide_gain(x, weight, cast_first), x.shape[-1]
    n_rows = x.numel() // dim
    r = gain.new_empty(n_rows) if needed else None
    c.rms_norm_forward(
        x=x,
        gain=gain,
        y=y,
        r=r,
        rows=n_rows,
        dim=dim,
        eps=eps,
        cast_first=cast_first,
        threads=threads_for(x.numel()),
    )
    return y, (r,)


def _backward(
    c: Any,
    needed: tuple[bool, ...],
    dy: Tensor,
    tensors: tuple[Tensor, Tensor | None],
    kept: tuple[Tensor],
    eps: float,
    cast_first: bool,
) -> tuple[Tensor, Tensor | None]:
    (x, weight), (r,) = tensors, kept
    gain = _wide_gain(x, weight, cast_first)
    dx, dgain, dim = torch.empty_like(x), torch.empty_like(gain), x.shape[-1]
    status = c.rms_norm_backward(
        dy=dy,
        x=x,
        gain=gain,
        r=r,
        dx=dx,
        dgain=dgain,
        rows=x.numel() // dim,
        dim=dim,
        threads=threads_for(x.numel()),
    )
    if status != 0:
        raise MemoryError("no memory for the gradient of an RMSNorm's gain")
    return dx, None if weight is None else dgain  # autograd casts it to the gain's dtype


_RMS_NORM = Kernel(rms_norm_reference, _forward, _backward)
