"""SwiGLU, and the gated MLP as one function whose inner activations stay in the cache.

The MLP's rows go through a few at a time: all products with SwiGLU between them, forward, and all
their gradients, backward.  Only the outputs of gate and up are kept.  Forward and backward take 0.8
to 0.95 of the time of the three layers one after another, up to a width of about 300.  The same
kernel also makes a whole sub-layer of it, x + MLP(RMSNorm(x)), which keeps no normalised x.

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
from minillama.model.kernels.rms_norm import rms_norm_reference

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
        y: Tensor = _GATED_MLP(c, (x, None, gate_FD, up_FD, down_DF), 0.0)
        return y
    return linear(swiglu(linear(x, gate_FD, up_FD)), down_DF)


def residual_mlp(
    x: Tensor, gain_D: Tensor, eps: float, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor
) -> Tensor | None:
    """Return x + MLP(RMSNorm(x)) by one C kernel; None where there is none for these tensors.

    Args:
        x: (..., D).
        gain_D: γ of the norm.
        eps: ε of the norm.
        gate_FD: as ``up_FD`` and ``down_DF`` in :func:`gated_mlp_reference`.
    """
    tensors = x, gain_D, gate_FD, up_FD, down_DF
    if (
        not (c := c_library(*tensors))
        or gate_FD.ndim != 2
        or not (x.shape[-1:] == gain_D.shape == gate_FD.shape[1:])
        or not (gate_FD.shape == up_FD.shape == down_DF.shape[::-1])
        or not _has_kernel(c, *gate_FD.shape)
        or not (needs_gradient(*tensors) or x.numel() > FEW_ROWS * x.shape[-1])
    ):
        return None
    y: Tensor = _GATED_MLP(c, tensors, eps)
    return y


def _plain(
    x: Tensor, gain: Tensor | None, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    if gain is None:
        return gated_mlp_reference(x, gate, up, down)
    return x + gated_mlp_reference(rms_norm_reference(x, gain, eps), gate, up, down)


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
    c: Any,
    needed: tuple[bool, ...],
    x: Tensor,
    gain: Tensor | None,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    eps: float,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Return y; keep the outputs of gate and up, joined, (rows, 2F), and 1/rms of each row."""
    sizes = _sizes(x, gate)
    y = torch.empty_like(x)
    gu = x.new_empty(sizes["rows"], 2 * sizes["inner"]) if needed else None
    r = x.new_empty(sizes["rows"]) if needed and gain is not None else None
    n_scratch = c.mlp_forward_scratch(
        dim=sizes["dim"], inner=sizes["inner"], threads=sizes["threads"]
    )
    c.mlp_forward(
        x=x,
        gain=gain,
        gate=gate,
        up=up,
        down=down,
        y=y,
        gu=gu,
        r=r,
        scratch=x.new_empty(n_scratch),
        eps=eps,
        **sizes,
    )
    return y, (gu, r)


def _backward(
    c: Any,
    needed: tuple[bool, ...],
    dy: Tensor,
    tensors: tuple[Tensor, ...],
    kept: tuple[Tensor, Tensor | None],
    eps: float,
) -> list[Tensor | None]:
    (x, gain, gate, up, down), (gu, r) = tensors, kept
    sizes = _sizes(x, gate)
    has_norm = gain is not None
    wanted = (has_norm or needed[0], has_norm, *needed[2:])  # the norm's are made together
    found = [
        torch.empty_like(tensor) if is_wanted else None
        for tensor, is_wanted in zip(tensors, wanted, strict=True)
    ]
    dx, dgain, dgate, dup, ddown = found
    scratch = dy.new_empty(c.mlp_backward_scratch(normed=has_norm, **sizes))
    c.mlp_backward(
        dy=dy,
        x=x,
        gain=gain,
        gate=gate,
        up=up,
        down=down,
        gu=gu,
        r=r,
        dx=dx,
        dgain=dgain,
        dgate=dgate,
        dup=dup,
        ddown=ddown,
        scratch=scratch,
        **sizes,
    )
    return found


_GATED_MLP = Kernel(_plain, _forward, _backward)
