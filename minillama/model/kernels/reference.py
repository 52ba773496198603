"""RMSNorm in plain PyTorch: what the compiled kernel is tested against, and its stand-in."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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


def rms_norm_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor | None, r: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients for x, (..., d), and for the gain, (d,); both can be differentiated.

    With r = 1 / √(mean(x²) + ε), (..., 1), and n = x·r:
    ∂x = r·(g⊙γ − n·mean(g⊙γ⊙n)),  ∂γ = Σ g⊙n.
    """
    normed = x.to(wide_dtype(x.dtype)) * r
    grad_normed = grad if weight is None else grad * weight
    grad_x = r * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
    grad_gain = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
    return grad_x.to(x.dtype), grad_gain


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that statistics of ``dtype`` are taken in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / √(mean(x²) + ε) over the last dimension, kept; 0 where that is 1/0."""
    mean_square = x.square().mean(-1, keepdim=True) + eps
    return mean_square.masked_fill(mean_square == 0, math.inf).rsqrt()
