"""The attention sub-layer of a pre-norm block as one function: x + attention(RMSNorm(x)).

The norm is applied where the product with the weights of queries, keys and values reads its rows,
again in the backward pass, and what the norm and the residual sum give the gradient of x is written
in one pass.  So the normalised x is never kept: beside x only 1/rms is.

Shapes: B batch, T positions, D width, H query heads, G key/value heads, K features of a head, M =
H + 2G.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.model.kernels import attention
from minillama.model.kernels.attention import causal_attention_reference
from minillama.model.kernels.frame import Kernel, c_library, needs_gradient, threads_for
from minillama.model.kernels.linear import FEW_ROWS, SMALL, matmul
from minillama.model.kernels.rms_norm import rms_norm_reference
from minillama.model.rope import Rotation


def residual_attention_reference(
    x_BTD: Tensor,
    gain_D: Tensor,
    qkv_weight: Tensor,
    o_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    n_heads: int,
    n_kv_heads: int,
    eps: float,
) -> Tensor:
    """Return x + o(attention(qkv(RMSNorm(x)))), (B, T, D), causal and with rotary positions.

    Args:
        x_BTD: the residual stream.
        gain_D: γ of the norm.
        qkv_weight: (M·K, D), of queries, keys and values.
        o_weight: (D, H·K).
        cos: of the rotations of positions 0 … T − 1, as ``sin``, (T, K / 2).
        sin: see ``cos``.
        n_heads: H.
        n_kv_heads: G, which divides H.
        eps: ε of the norm.
    """
    qkv = F.linear(rms_norm_reference(x_BTD, gain_D, eps), qkv_weight)
    qkv_BTMK = torch.unflatten(qkv, -1, (n_heads + 2 * n_kv_heads, -1))
    y_BTHK = causal_attention_reference(qkv_BTMK, Rotation(cos, sin), n_heads, n_kv_heads)
    return x_BTD + F.linear(y_BTHK.flatten(2), o_weight)


def residual_attention(
    x_BTD: Tensor,
    gain_D: Tensor,
    qkv_weights: Sequence[Tensor],
    o_weight: Tensor,
    rotation: Rotation,
    n_heads: int,
    n_kv_heads: int,
    eps: float,
) -> Tensor | None:
    """Do what :func:`residual_attention_reference` does, by C kernels; None where they cannot.

    ``qkv_weights`` are those of queries, keys and values, (H·K, D), (G·K, D) and (G·K, D).
    """
    tensors = x_BTD, gain_D, *qkv_weights, o_weight, *rotation
    if not (c := c_library(*tensors)) or x_BTD.ndim != 3 or o_weight.ndim != 2:
        return None
    (batch, length, dim), (n_out, q_dim) = x_BTD.shape, o_weight.shape
    head_dim, n_stored = q_dim // n_heads, n_heads + 2 * n_kv_heads
    heads = (batch, length, n_stored, head_dim)
    if (
        n_out != dim
        or gain_D.shape != (dim,)
        or [weight.shape for weight in qkv_weights]
        != [(n * head_dim, dim) for n in (n_heads, n_kv_heads, n_kv_heads)]
        or not attention.fits(heads, rotation, n_heads, n_kv_heads)
        or n_stored * head_dim * dim > SMALL
        or not c.normed_linear_fits(dim=dim)
        or not (needs_gradient(*tensors) or batch * length > FEW_ROWS)
    ):
        return None
    joined = x_BTD, gain_D, torch.cat(tuple(qkv_weights)), o_weight, *rotation
    y_BTD: Tensor = _KERNEL(c, joined, n_heads, n_kv_heads, eps)
    return y_BTD


def _sizes(x: Tensor, qkv_weight: Tensor) -> dict[str, int]:
    n_out, dim = qkv_weight.shape
    rows = x.numel() // dim
    return {"rows": rows, "dim": dim, "out": n_out, "threads": threads_for(rows * n_out)}


def _forward(
    c: Any,
    needed: tuple[bool, ...],
    x: Tensor,
    gain: Tensor,
    qkv_weight: Tensor,
    o_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    n_heads: int,
    n_kv_heads: int,
    eps: float,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return y; keep 1/rms of each row, q, k and v, and what attention keeps."""
    sizes = _sizes(x, qkv_weight)
    n_stored = n_heads + 2 * n_kv_heads
    qkv = x.new_empty(*x.shape[:2], n_stored, sizes["out"] // n_stored)
    r = x.new_empty(sizes["rows"]) if needed else None
    scratch = x.new_empty(c.normed_linear_scratch(backward=False, **sizes))
    c.normed_linear_forward(
        x=x, gain=gain, w=qkv_weight, y=qkv, r=r, scratch=scratch, eps=eps, **sizes
    )
    heads, kept = attention.forward(c, needed, qkv, cos, sin, n_heads, n_kv_heads)
    y = x.new_empty(x.shape)
    matmul(c, heads, o_weight, y, sizes["rows"], o_weight.shape[1], b=True, addend=x)
    return y, (r, qkv, *kept)


def _backward(
    c: Any,
    needed: tuple[bool, ...],
    dy: Tensor,
    tensors: tuple[Tensor, ...],
    kept: tuple[Tensor, ...],
    n_heads: int,
    n_kv_heads: int,
    eps: float,
) -> tuple[Tensor | None, ...]:
    x, gain, qkv_weight, o_weight, cos, sin = tensors
    r, qkv, heads, log_sum = kept
    sizes = _sizes(x, qkv_weight)
    rows, (dim, q_dim) = sizes["rows"], o_weight.shape
    do_weight = None
    if needed[3]:
        do_weight = o_weight.new_empty(o_weight.shape)
        matmul(c, dy, heads, do_weight, dim, rows, a=True)
    dheads = dy.new_empty(heads.shape)
    matmul(c, dy, o_weight, dheads.view(rows, q_dim), rows, dim)
    dqkv = attention.backward(
        c, needed, dheads, (qkv, cos, sin), (heads, log_sum), n_heads, n_kv_heads
    )[0]
    dx, dgain = x.new_empty(x.shape), gain.new_empty(gain.shape)
    dqkv_weight = qkv_weight.new_empty(qkv_weight.shape) if needed[2] else None
    scratch = dy.new_empty(c.normed_linear_scratch(backward=True, **sizes))
    c.normed_linear_backward(
        dy=dqkv,
        d=dy,
        x=x,
        gain=gain,
        w=qkv_weight,
        r=r,
        dx=dx,
        dgain=dgain,
        dw=dqkv_weight,
        scratch=scratch,
        **sizes,
    )
    return dx, dgain, dqkv_weight, do_weight, None, None


_KERNEL = Kernel(residual_attention_reference, _forward, _backward)
