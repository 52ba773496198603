"""One token through all blocks of a pre-norm Llama in one call, for decoding one sequence.

Block by block from Python a token costs some 0.9 ms beside its products, at any size of model; a
model of 15 M parameters reads its weights in 3 ms.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillama.model.kernels.compiled import load_library
from minillama.model.kernels.dispatch import is_one_dtype, is_plain

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class Layer(NamedTuple):
    """One block's weights, each (out, in) or a gain (D,), and its cache, (G, capacity, K) each."""

    attention_gain: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    mlp_gain: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    keys: Tensor
    values: Tensor


class _Layer(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in Layer._fields]


class _Job(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *[(name, _POINTER) for name in ("cos", "sin", "final_gain", "head", "x", "logits")],
        *[(name, _POINTER) for name in ("qkv", "y", "h", "gates", "room")],
        *[(name, _LONG) for name in ("n_layers", "dim", "heads", "groups", "head_dim", "inner")],
        *[(name, _LONG) for name in ("vocab", "capacity", "length", "room_size")],
        ("eps", ctypes.c_double),
        ("threads", ctypes.c_int),
    ]


class Stack:
    """The blocks and the head of a model, ready to take one token after another.

    Args:
        layers: weights and caches; the caches change as tokens are read.
        final_gain: of the norm before the head, (D,).
        head: (V, D).
        eps: of every norm.
    """

    def __init__(self, layers: Sequence[Layer], final_gain: Tensor, head: Tensor, eps: float):
        self._kernel = _load(head.dtype)
        first = layers[0]
        groups, capacity, head_dim = first.keys.shape
        self._dim, heads = head.shape[1], first.q.shape[0] // head_dim
        inner, n_threads = first.gate.shape[0], torch.get_num_threads()
        room_size = self._kernel.room(self._dim, head_dim, capacity)
        self._logits = head.new_empty(1, head.shape[0])
        self._scratch = head.new_empty(
            (2 * heads + 2 * groups) * head_dim + 3 * inner + n_threads * room_size
        )
        self._kept = (layers, final_gain, head)  # the job holds their addresses
        table = (_Layer * len(layers))(
            *(_Layer(*(tensor.data_ptr() for tensor in layer)) for layer in layers)
        )
        place, size = self._scratch.data_ptr(), head.element_size()
        qkv_out = (heads + 2 * groups) * head_dim
        starts = [0, qkv_out, qkv_out + heads * head_dim]
        starts += [starts[-1] + inner, starts[-1] + 3 * inner]
        qkv, y, h, gates, room = (place + start * size for start in starts)
        self._job = _Job(
            layers=table,
            final_gain=final_gain.data_ptr(),
            head=head.data_ptr(),
            logits=self._logits.data_ptr(),
            qkv=qkv,
            y=y,
            h=h,
            gates=gates,
            room=room,
            n_layers=len(layers),
            dim=self._dim,
            heads=heads,
            groups=groups,
            head_dim=head_dim,
            inner=inner,
            vocab=head.shape[0],
            capacity=capacity,
            room_size=room_size,
            eps=eps,
            threads=n_threads,
        )

    @staticmethod
    def fits(layers: Sequence[Layer], final_gain: Tensor, head: Tensor) -> bool:
        """Tell whether these are what the C kernel can read, and whether there is one."""
        tensors = [tensor for layer in layers for tensor in layer] + [final_gain, head]
        return (
            is_one_dtype((torch.float32, torch.float64), *tensors)
            and is_plain(*tensors)
            and all(tensor.is_contiguous() for tensor in tensors)
            and _load(head.dtype) is not None
        )

    def read(self, x_D: Tensor, cos: Tensor, sin: Tensor, length: int) -> Tensor:
        """Read a token into place ``length`` of the caches; return its logits, (1, V).

        Args:
            x_D: its embedding; is overwritten.
            cos: of its position, (K / 2,), as is ``sin``.
            sin: contiguous, of x's dtype.
            length: how many tokens the caches hold.

        The logits are overwritten by the next call.
        """
        job = self._job
        assert 0 <= length < job.capacity
        job.x, job.cos, job.sin = x_D.data_ptr(), cos.data_ptr(), sin.data_ptr()
        job.length = length
        self._kernel.stack(ctypes.byref(job))
        return self._logits


class _Kernel(NamedTuple):
    stack: Any
    room: Any


@functools.cache
def _load(dtype: torch.dtype) -> Any:
    library = load_library("stack", dtype)
    if library is None:
        return None
    library.stack.argtypes, library.stack.restype = [ctypes.POINTER(_Job)], None
    library.stack_room.argtypes, library.stack_room.restype = [_LONG] * 3, _LONG
    return _Kernel(library.stack, library.stack_room)
