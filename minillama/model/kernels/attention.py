"""Causal attention over whole sequences, with its rotary positions: one kernel each way.

PyTorch turns queries and keys in seven passes over memory, repeats the keys and values that several
heads share, and its attention knows nothing of rows that are short.  The C kernel reads the
projections as they are.

Shapes: B batch, T positions, H query heads, G key/value heads, K features of a head.
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
    differentiable_gradients,
    is_one_dtype,
    is_plain,
    needs_gradient,
)
from minillama.model.rope import Rotation, rotate


def causal_attention_reference(
    qkv_BTSK: Tensor, rotation: Rotation, n_heads: int, n_kv_heads: int
) -> Tensor:
    """Return softmax(q·kᵀ / √K)·v over the positions up to each one's own, (B, T, H, K).

    Args:
        qkv_BTSK: H heads of queries, G of keys and G of values: (B, T, H + 2G, K).
        rotation: of positions 0 … T − 1, by which queries and keys are turned.
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
    """Return softmax(q·kᵀ / √K)·v, (B, H, T, K), where H / G query heads share a key/value head."""
    group = q_BHTK.shape[1] // k_BGSK.shape[1]
    if group > 1:
        k_BGSK, v_BGSK = (y.repeat_interleave(group, dim=1) for y in (k_BGSK, v_BGSK))
    return F.scaled_dot_product_attention(
        q_BHTK, k_BGSK, v_BGSK, attn_mask=mask, is_causal=is_causal
    )


def causal_attention(qkv_BTSK: Tensor, rotation: Rotation, n_heads: int, n_kv_heads: int) -> Tensor:
    """Do what :func:`causal_attention_reference` does, by the C kernel where it can be used."""
    cos, sin = rotation
    if (
        not torch.compiler.is_compiling()
        and is_plain(qkv_BTSK, cos, sin)
        and is_one_dtype((torch.float32, torch.float64), qkv_BTSK, cos, sin)
        and not torch.is_autocast_enabled("cpu")
        and _fit(qkv_BTSK, rotation, n_heads, n_kv_heads)
        and (kernel := _load(qkv_BTSK.dtype))
    ):
        how = _How(kernel, n_heads, n_kv_heads)
        tensors = qkv_BTSK.contiguous(), cos.contiguous(), sin.contiguous()
        if needs_gradient(qkv_BTSK):
            return cast(Tensor, _apply(*tensors, how))
        return _forward(*tensors, how, keep=False)[0]
    return causal_attention_reference(qkv_BTSK, rotation, n_heads, n_kv_heads)


def _fit(qkv: Tensor, rotation: Rotation, n_heads: int, n_kv_heads: int) -> bool:
    """Tell whether the kernel, which trusts its sizes, can have these; else PyTorch complains."""
    if qkv.numel() == 0 or qkv.ndim != 4 or n_heads % n_kv_heads:
        return False
    _, length, n_stored, dim = qkv.shape
    rotated = (length, dim // 2)
    return (
        n_stored == n_heads + 2 * n_kv_heads
        and dim % 2 == 0
        and rotation.cos.shape == rotated
        and rotation.sin.shape == rotated
    )


class _Kernel(NamedTuple):
    forward: Any
    backward: Any


class _How(NamedTuple):
    kernel: _Kernel
    n_heads: int
    n_kv_heads: int


@functools.cache
def _load(dtype: torch.dtype) -> _Kernel | None:
    library = load_library("attention", dtype)
    if library is None:
        return None
    sizes = [*[ctypes.c_long] * 5, ctypes.c_int]
    library.attention_forward.argtypes = [*[ctypes.c_void_p] * 5, *sizes]
    library.attention_backward.argtypes = [*[ctypes.c_void_p] * 7, *sizes]
    return _Kernel(library.attention_forward, library.attention_backward)


def _sizes(qkv: Tensor, how: _How) -> tuple[int, ...]:
    batch, length, _, dim = qkv.shape
    return batch, length, how.n_heads, how.n_kv_heads, dim, torch.get_num_threads()


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("no memory for attention; lower train.micro_batch_size or data.seq_len")


def _forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, how: _How, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return y (B, T, H, K) and, if it is to be kept, the log of each row's sum (B, H, T)."""
    batch, length, _, dim = qkv.shape
    y = qkv.new_empty(batch, length, how.n_heads, dim)
    log_sum = qkv.new_empty(batch, how.n_heads, length) if keep else None
    status = how.kernel.forward(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        y.data_ptr(),
        None if log_sum is None else log_sum.data_ptr(),
        *_sizes(qkv, how),
    )
    _check(status)
    return y, log_sum


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, how: _How) -> Tensor:
        y, log_sum = _forward(qkv, cos, sin, how, keep=True)
        ctx.save_for_backward(qkv, cos, sin, y, log_sum)
        ctx.how = how
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, cos, sin, y, log_sum), (grad,), how = ctx.saved_tensors, grads, ctx.how
        if torch.is_grad_enabled() or not is_plain(grad):

            def plain(qkv: Tensor) -> Tensor:
                rotation = Rotation(cos, sin)
                return causal_attention_reference(qkv, rotation, how.n_heads, how.n_kv_heads)

            return *differentiable_gradients(plain, [qkv], grad), None, None, None
        grad, grad_qkv = grad.contiguous(), torch.empty_like(qkv)
        status = how.kernel.backward(
            grad.data_ptr(),
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            y.data_ptr(),
            log_sum.data_ptr(),
            grad_qkv.data_ptr(),
            *_sizes(qkv, how),
        )
        _check(status)
        return grad_qkv, None, None, None


_apply: Any = _CausalAttention.apply
