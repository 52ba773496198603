"""RMSNorm's kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool = True) -> Tensor:
    """Plain version, until the fused one is here."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    return y.to(x.dtype) * weight.to(x.dtype) if cast_first else (y * weight).to(x.dtype)
