"""Attention of one new position of each sequence to those already in the KV cache.

Shapes: B batch, H query heads, G key/value heads, K features of a head, S places in the cache.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from minillama.model.kernels.attention import attend
from minillama.model.kernels.compiled import load_library
from minillama.model.kernels.dispatch import is_one_dtype, is_plain, needs_gradient
from minillama.model.rope import Rotation, rotate

_PARALLEL_FROM = 1 << 16  # numbers of the cache that are read


def decode_attention_reference(
    qkv_B1MK: Tensor,
    rotation: Rotation,
    keys_BGSK: Tensor,
    values_BGSK: Tensor,
    length: int,
    pad_B: Tensor | None,
) -> Tensor:
    """Put the new key and value at place ``length`` of the cache; return what is attended to.

    Args:
        qkv_B1MK: H heads of queries, G of keys and G of values: (B, 1, H + 2G, K).
        rotation: of the new position of each row.
        keys_BGSK: changed in place, as is ``values_BGSK``.
        values_BGSK: the cache of this layer.
        length: how many places hold something.
        pad_B: int64, how many places at the start of each row hold nothing; None: 0 in all.

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
        place_S = torch.arange(length + 1, device=pad_B.device)
        mask = (place_S >= pad_B[:, None, None, None]) | (place_S == length)
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
    """Do what :func:`decode_attention_reference` does, by the C kernel where it can be used."""
    cos, sin = rotation
    if (
        torch.compiler.is_compiling()
        or needs_gradient(qkv_B1MK)
        or not is_plain(qkv_B1MK, cos, sin, keys_BGSK, values_BGSK, pad_B)
        or not is_one_dtype(
            (torch.float32, torch.float64), qkv_B1MK, cos, sin, keys_BGSK, values_BGSK
        )
        or torch.is_autocast_enabled("cpu")
        or not _fit(qkv_B1MK, rotation, keys_BGSK, values_BGSK, length, pad_B)
        or (kernel := _load(qkv_B1MK.dtype)) is None
    ):
        return decode_attention_reference(qkv_B1MK, rotation, keys_BGSK, values_BGSK, length, pad_B)
    batch, n_kv_heads, capacity, dim = keys_BGSK.shape
    n_heads = qkv_B1MK.shape[2] - 2 * n_kv_heads
    qkv, cos, sin = qkv_B1MK.contiguous(), cos.contiguous(), sin.contiguous()
    pad_B = None if pad_B is None else pad_B.contiguous()
    y = qkv.new_empty(batch, 1, n_heads, dim)
    read = batch * n_kv_heads * length * dim
    status = kernel(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        keys_BGSK.data_ptr(),
        values_BGSK.data_ptr(),
        None if pad_B is None else pad_B.data_ptr(),
        y.data_ptr(),
        batch,
        n_heads,
        n_kv_heads,
        dim,
        capacity,
        length,
        dim // 2 if cos.numel() > dim // 2 else 0,
        torch.get_num_threads() if read >= _PARALLEL_FROM else 1,
    )
    if status != 0:
        raise MemoryError("no memory for attention to the cache")
    return y


def _fit(
    qkv: Tensor, rotation: Rotation, keys: Tensor, values: Tensor, length: int, pad_B: Tensor | None
) -> bool:
    """Tell whether the kernel, which trusts its sizes, can have these; else PyTorch complains."""
    batch, n_kv_heads, capacity, dim = keys.shape
    n_stored = qkv.shape[2]
    n_rotations = {dim // 2, batch * dim // 2}
    return (
        keys.is_contiguous()
        and values.is_contiguous()
        and values.shape == keys.shape
        and qkv.shape == (batch, 1, n_stored, dim)
        and n_stored > 2 * n_kv_heads
        and n_stored % n_kv_heads == dim % 2 == 0
        and length < capacity
        and rotation.cos.shape[-1:] == rotation.sin.shape[-1:] == (dim // 2,)
        and rotation.cos.numel() in n_rotations
        and rotation.sin.numel() == rotation.cos.numel()
        and (pad_B is None or (pad_B.dtype is torch.int64 and pad_B.shape == (batch,)))
    )


@functools.cache
def _load(dtype: torch.dtype) -> Any:
    library = load_library("decode", dtype)
    if library is None:
        return None
    library.decode.argtypes = [*[ctypes.c_void_p] * 7, *[ctypes.c_long] * 7, ctypes.c_int]
    return library.decode
