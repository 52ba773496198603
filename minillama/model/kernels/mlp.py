"""SwiGLU, and the gated MLP as one function whose inner activations stay in the cache.

The MLP's rows go through a few at a time: all products with SwiGLU between them, forward, and all
their gradients, backward.  Only the outputs of gate and up are kept.  Forward and backward take 0.8
to 0.95 of the time of the three layers one after another, up to a width of about 300.

Shapes: D width, F inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.model.kernels.frame import (
    PARALLEL_FROM,
    Kernel,
    c_library,
    check_shape,
    needs_gradient,
    threads_for,
)
from minillama.model.kernels.library import load
from minillama.model.kernels.linear import FEW_ROWS, SMALL, linear

# -------------------------------------------------------------------------------------- SwiGLU


def swiglu_reference(x: Tensor) -> Tensor:
    """Return silu(g) · u for x = [g, u] of shape (..., 2F): (..., F), with silu(z) = z · σ(z)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu(x: Tensor) -> Tensor:
    """Do what :func:`swiglu_reference` does, by the C kernel where it can be used.

    PyTorch keeps four tensors for the backward pass, this one.

    Raises:
        ValueError: the last dimension is odd.
    """
    check_shape(x.ndim > 0 and x.shape[-1] % 2 == 0, "x (..., 2F)", x)
    if c := c_library(x):
        y: Tensor = _SWIGLU(c, (x,))
        return y
    return swiglu_reference(x)


def _swiglu_forward(c: Any, needed: tuple[bool, ...], x: Tensor) -> tuple[Tensor, tuple[()]]:
    dim = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], dim)
    n = y.numel()
    c.swiglu_forward(x=x, y=y, rows=n // dim, dim=dim, threads=threads_for(n))
    return y, ()


def _swiglu_backward(
    c: Any, needed: tuple[bool, ...], dy: Tensor, tensors: tuple[Tensor], kept: tuple[()]
) -> tuple[Tensor]:
    (x,), dim, n = tensors, dy.shape[-1], dy.numel()
    dx = torch.empty_like(x)
    c.swiglu_backward(dy=dy, x=x, dx=dx, rows=n // dim, dim=dim, threads=threads_for(n))
    return (dx,)


_SWIGLU = Kernel(swiglu_reference, _swiglu_forward, _swiglu_backward)


# --------------------------------------------------------------------------------- the whole MLP


def gated_mlp_reference(x: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """Return (silu(x·Gᵀ) · x·Uᵀ)·Wᵀ, (..., D), of x (..., D), with silu(z) = z · σ(z)."""
    return F.linear(F.silu(F.linear(x, gate_FD)) * F.linear(x, up_FD), down_DF)


def gated_mlp(x: Tensor, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """Do what :func:`gated_mlp_reference` does, by the C kernel where that is faster.

    Raises:
        ValueError: the sizes differ.
    """
    tensors = x, gate_FD, up_FD, down_DF
    fits = (
        gate_FD.ndim == 2
        and x.shape[-1:] == gate_FD.shape[1:]
        and gate_FD.shape == up_FD.shape == down_DF.shape[::-1]
    )
    check_shape(fits, "x (..., D), gate and up (F, D) and down (D, F)", *tensors)
    if (
        (c := c_library(*tensors))
        and _has_kernel(c, *gate_FD.shape)
        and (needs_gradient(*tensors) or x.numel() > FEW_ROWS * x.shape[-1])
    ):
        y: Tensor = _GATED_MLP(c, tensors)
        return y
    return linear(swiglu(linear(x, gate_FD, up_FD)), down_DF)


def is_one_kernel(dim: int, inner: int) -> bool:
    """Return whether an MLP of these sizes, in float32 on a CPU, is one C kernel here."""
    c = load(torch.float32)
    return c is not None and _has_kernel(c, inner, dim)


def _has_kernel(c: Any, inner: int, dim: int) -> bool:
    return inner * dim <= SMALL and bool(c.mlp_fits(dim=dim, inner=inner))


def _sizes(x: Tensor, gate: Tensor) -> dict[str, int]:
    inner, dim = gate.shape
    rows = x.numel() // dim
    threads = threads_for(rows * inner, PARALLEL_FROM)
    return {"rows": rows, "dim": dim, "inner": inner, "threads": threads}


def _forward(
    c: Any, needed: tuple[bool, ...], x: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, tuple[Tensor | None]]:
    """Return y; keep the outputs of gate and up, joined, (rows, 2F)."""
    sizes = _sizes(x, gate)
    y = torch.empty_like(x)
    gu = x.new_empty(sizes["rows"], 2 * sizes["inner"]) if needed else None
    n_scratch = c.mlp_forward_scratch(
        dim=sizes["dim"], inner=sizes["inner"], threads=sizes["threads"]
    )
    c.mlp_forward(
        x=x, gate=gate, up=up, down=down, y=y, gu=gu, scratch=x.new_empty(n_scratch), **sizes
    )
    return y, (gu,)


def _backward(
    c: Any,
    needed: tuple[bool, ...],
    dy: Tensor,
    tensors: tuple[Tensor, ...],
    kept: tuple[Tensor],
) -> list[Tensor | None]:
    (x, gate, up, down), (gu,) = tensors, kept
    sizes = _sizes(x, gate)
    found = [
        torch.empty_like(tensor) if wanted else None
        for tensor, wanted in zip(tensors, needed, strict=True)
    ]
    dx, dgate, dup, ddown = found
    scratch = dy.new_empty(c.mlp_backward_scratch(**sizes))
    c.mlp_backward(
        dy=dy,
        x=x,
        gate=gate,
        up=up,
        down=down,
        gu=gu,
        dx=dx,
        dgate=dgate,
        dup=dup,
        ddown=ddown,
        scratch=scratch,
        **sizes,
    )
    return found


_GATED_MLP = Kernel(gated_mlp_reference, _forward, _backward)
