"""Attention with its rotary positions: causal over whole sequences, and of one new position.

PyTorch rotates queries and keys in seven passes over memory, repeats the keys and values that
several heads share, and its attention is not made for short rows.  The C kernels read the
projections as they are.

Shapes: B batch, T positions, H query heads, G key/value heads, K features of a head, S positions of
the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minillama.model.kernels.frame import (
    Kernel,
    c_library,
    check_shape,
    needs_gradient,
    threads_for,
)
from minillama.model.kernels.torch_private import is_transformed
from minillama.model.rope import Rotation, rotate


def causal_attention_reference(
    qkv_BTSK: Tensor, rotation: Rotation, n_heads: int, n_kv_heads: int
) -> Tensor:
    """Return softmax(q·kᵀ / √K)·v over the positions up to each one's own, (B, T, H, K).

    Args:
        qkv_BTSK: H heads of queries, G of keys and G of values: (B, T, H + 2G, K).
        rotation: of positions 0 … T − 1, by which queries and keys are rotated.
        n_heads: H.
        n_kv_heads: G, which divides H.
    """
    q, k, v = torch.split(qkv_BTSK.transpose(1, 2), [n_heads, n_kv_heads, n_kv_heads], dim=1)
    y_BHTK = attend(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
    return y_BHTK.transpose(1, 2)


def attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Return softmax(q·kᵀ / √K)·v, (B, H, T, K), where H / G query heads share a key/value head.

    ``mask`` is True where a key may be seen.

    Raises:
        ValueError: the sizes differ.
    """
    n_heads, n_kv_heads = (y.shape[1] if y.ndim == 4 else 0 for y in (q_BHTK, k_BGSK))
    fits = bool(n_kv_heads) and k_BGSK.shape == v_BGSK.shape and n_heads % n_kv_heads == 0
    fits = fits and q_BHTK.shape[::3] == k_BGSK.shape[::3]
    needed = "q (B, H, T, K), k and v (B, G, S, K), G dividing H"
    check_shape(fits, needed, q_BHTK, k_BGSK, v_BGSK)
    group = n_heads // n_kv_heads
    if group > 1:
        k_BGSK, v_BGSK = (y.repeat_interleave(group, dim=1) for y in (k_BGSK, v_BGSK))
    # torch.func may ask for a derivative in forward mode, or a second one, and of torch's kernels
    # only this one has them.
    with sdpa_kernel(SDPBackend.MATH) if is_transformed() else nullcontext():
        return F.scaled_dot_product_attention(
            q_BHTK, k_BGSK, v_BGSK, attn_mask=mask, is_causal=is_causal
        )


def causal_attention(qkv_BTSK: Tensor, rotation: Rotation, n_heads: int, n_kv_heads: int) -> Tensor:
    """Do what :func:`causal_attention_reference` does, by the C kernel where it can be used.

    Raises:
        ValueError: the sizes differ.
    """
    cos, sin = rotation
    is_right = fits(qkv_BTSK.shape, rotation, n_heads, n_kv_heads)
    needed = "qkv (B, T, H + 2G, K), G dividing H, and cos and sin (T, K / 2)"
    check_shape(is_right, needed, qkv_BTSK, cos, sin)
    if c := c_library(qkv_BTSK, cos, sin):
        y_BTHK: Tensor = _CAUSAL(c, (qkv_BTSK, cos, sin), n_heads, n_kv_heads)
        return y_BTHK
    return causal_attention_reference(qkv_BTSK, rotation, n_heads, n_kv_heads)


def fits(shape: Sequence[int], rotation: Rotation, n_heads: int, n_kv_heads: int) -> bool:
    """Return whether q, k and v of this shape match the rest, which the kernel does not check."""
    if len(shape) != 4 or n_heads % n_kv_heads:
        return False
    _, length, n_stored, dim = shape
    rotated = (length, dim // 2)
    return (
        n_stored == n_heads + 2 * n_kv_heads
        and dim % 2 == 0
        and rotation.cos.shape == rotated
        and rotation.sin.shape == rotated
    )


def _plain(qkv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int) -> Tensor:
    return causal_attention_reference(qkv, Rotation(cos, sin), n_heads, n_kv_heads)


def _sizes(qkv: Tensor, n_heads: int, n_kv_heads: int) -> dict[str, int]:
    batch, length, _, dim = qkv.shape
    return {
        "batch": batch,
        "length": length,
        "heads": n_heads,
        "groups": n_kv_heads,
        "dim": dim,
        "threads": torch.get_num_threads(),
    }


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("no memory for attention; lower train.micro_batch_size or data.seq_len")


def forward(
    c: Any,
    needed: tuple[bool, ...],
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    n_heads: int,
    n_kv_heads: int,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Return y (B, T, H, K) by the C kernel; keep it and the log of each row's sum, (B, H, T)."""
    batch, length, _, dim = qkv.shape
    y = qkv.new_empty(batch, length, n_heads, dim)
    log_sum = qkv.new_empty(batch, n_heads, length) if needed else None
    sizes = _sizes(qkv, n_heads, n_kv_heads)
    _check(c.attention_forward(qkv=qkv, cos=cos, sin=sin, y=y, log_sum=log_sum, **sizes))
    return y, (y, log_sum)


def backward(
    c: Any,
    needed: tuple[bool, ...],
    dy: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    n_heads: int,
    n_kv_heads: int,
) -> tuple[Tensor, None, None]:
    """Return the gradients of q, k and v, joined, and none of the rotation's."""
    (qkv, cos, sin), (y, log_sum) = tensors, kept
    dqkv = torch.empty_like(qkv)
    sizes = _sizes(qkv, n_heads, n_kv_heads)
    status = c.attention_backward(
        dy=dy, qkv=qkv, cos=cos, sin=sin, y=y, log_sum=log_sum, dqkv=dqkv, **sizes
    )
    _check(status)
    return dqkv, None, None


_CAUSAL = Kernel(_plain, forward, backward)


# ------------------------------------------------------------------------------- one new position

_PARALLEL_FROM = 1 << 16  # numbers of the cache that are read


def decode_attention_reference(
    qkv_B1MK: Tensor,
    rotation: Rotation,
    keys_BGSK: Tensor,
    values_BGSK: Tensor,
    length: int,
    pad_B: Tensor | None,
) -> Tensor:
    """Store the new key and value at position ``length`` of the cache; attend from it to all.

    Args:
        qkv_B1MK: H heads of queries, G of keys and G of values: (B, 1, H + 2G, K).
        rotation: of the new position of each row.
        keys_BGSK: changed in place, as is ``values_BGSK``.
        values_BGSK: the cache of this layer.
        length: how many positions are stored.
        pad_B: int64, how many positions at the start of each row are padding; None: 0 in all.

    Returns:
        (B, 1, H, K).
    """
    n_kv_heads = keys_BGSK.shape[1]
    n_heads = qkv_B1MK.shape[2] - 2 * n_kv_heads
    q, k, v = torch.split(qkv_B1MK.transpose(1, 2), [n_heads, n_kv_heads, n_kv_heads], dim=1)
    keys_BGSK[:, :, length : length + 1] = rotate(k, rotation)
    values_BGSK[:, :, length : length + 1] = v
    mask = None
    if pad_B is not None:
        position_S = torch.arange(length + 1, device=pad_B.device)
        mask = (position_S >= pad_B[:, None, None, None]) | (position_S == length)
    end = length + 1
    y = attend(rotate(q, rotation), keys_BGSK[:, :, :end], values_BGSK[:, :, :end], mask)
    return y.transpose(1, 2)


def decode_attention(
    qkv_B1MK: Tensor,
    rotation: Rotation,
    keys_BGSK: Tensor,
    values_BGSK: Tensor,
    length: int,
    pad_B: Tensor | None,
) -> Tensor:
    """Do what :func:`decode_attention_reference` does, by the C kernel where it can be used.

    Raises:
        ValueError: the sizes differ, or the cache is full.
    """
    cos, sin = rotation
    tensors = qkv_B1MK, cos, sin, keys_BGSK, values_BGSK
    needed = (
        "qkv (B, 1, H + 2G, K), cos and sin for K / 2 pairs of one row or all, keys and values "
        f"(B, G, S, K) with S > {length}, and padding (B,)"
    )
    fits = _fits_cache(qkv_B1MK, rotation, keys_BGSK, values_BGSK, length, pad_B)
    check_shape(fits, needed, *tensors, *([] if pad_B is None else [pad_B]))
    if (
        needs_gradient(qkv_B1MK)
        or not (keys_BGSK.is_contiguous() and values_BGSK.is_contiguous())
        or not (pad_B is None or pad_B.dtype is torch.int64)
        or not (c := c_library(*tensors, others=(pad_B,)))
    ):
        return decode_attention_reference(qkv_B1MK, rotation, keys_BGSK, values_BGSK, length, pad_B)
    batch, n_kv_heads, capacity, dim = keys_BGSK.shape
    n_heads = qkv_B1MK.shape[2] - 2 * n_kv_heads
    y = qkv_B1MK.new_empty(batch, 1, n_heads, dim)
    status = c.decode_attention(
        qkv=qkv_B1MK.contiguous(),
        cos=cos.contiguous(),
        sin=sin.contiguous(),
        keys=keys_BGSK,
        values=values_BGSK,
        first=None if pad_B is None else pad_B.contiguous(),
        y=y,
        batch=batch,
        heads=n_heads,
        groups=n_kv_heads,
        dim=dim,
        capacity=capacity,
        length=length,
        rotation_stride=dim // 2 if cos.numel() > dim // 2 else 0,
        threads=threads_for(batch * n_kv_heads * length * dim, _PARALLEL_FROM),
    )
    if status != 0:
        raise MemoryError("no memory for attention to the cache")
    return y


def _fits_cache(
    qkv: Tensor, rotation: Rotation, keys: Tensor, values: Tensor, length: int, pad_B: Tensor | None
) -> bool:
    """Return whether the sizes match, which the kernel does not check."""
    if qkv.ndim != 4 or keys.ndim != 4:
        return False
    batch, n_kv_heads, capacity, dim = keys.shape
    n_stored = qkv.shape[2]
    n_rotations = {dim // 2, batch * dim // 2}
    return (
        values.shape == keys.shape
        and qkv.shape == (batch, 1, n_stored, dim)
        and n_stored > 2 * n_kv_heads
        and n_stored % n_kv_heads == dim % 2 == 0
        and length < capacity
        and rotation.cos.shape[-1:] == rotation.sin.shape[-1:] == (dim // 2,)
        and rotation.cos.numel() in n_rotations
        and rotation.sin.numel() == rotation.cos.numel()
        and (pad_B is None or pad_B.shape == (batch,))
    )
