"""One token of each sequence through all blocks of a pre-norm Llama in one call, for decoding.

Block by block from Python a token costs some 0.9 ms beside its products, at any size of model; a
model of 15 M parameters reads its weights in 3 ms.  Several sequences read them once for all.

Shapes: B sequences, V vocabulary, D width, G key/value heads, S places of the cache, K features of
a head.
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
from minillama.model.rope import Rotation

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class Layer(NamedTuple):
    """One block's weights, each (out, in) or a gain (D,), and its cache, (B, G, S, K) each."""

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
        *[(name, _POINTER) for name in ("final_gain", "head", "first", "cos", "sin")],
        *[(name, _POINTER) for name in ("embedded", "logits")],
        *[(name, _POINTER) for name in ("x", "qkv", "y", "h", "gates", "room")],
        *[(name, _LONG) for name in ("n_layers", "rows", "dim", "heads", "groups", "head_dim")],
        *[(name, _LONG) for name in ("inner", "vocab", "capacity", "length", "room_size")],
        ("rotation_stride", _LONG),
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
        pad_B: int64, how many places at the start of each row of the caches hold nothing; None: 0
            in all.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        final_gain: Tensor,
        head: Tensor,
        eps: float,
        pad_B: Tensor | None = None,
    ) -> None:
        self._kernel = _load(head.dtype)
        rows, groups, capacity, head_dim = layers[0].keys.shape
        vocab_size, dim = head.shape
        heads, inner = layers[0].q.shape[0] // head_dim, layers[0].gate.shape[0]
        self._logits = head.new_empty(rows, vocab_size)
        self._kept = (layers, final_gain, head, pad_B)  # the job holds their addresses
        table = [_Layer(*(tensor.data_ptr() for tensor in layer)) for layer in layers]
        self._job = _Job(
            layers=(_Layer * len(layers))(*table),
            final_gain=final_gain.data_ptr(),
            head=head.data_ptr(),
            first=None if pad_B is None else pad_B.data_ptr(),
            logits=self._logits.data_ptr(),
            n_layers=len(layers),
            rows=rows,
            dim=dim,
            heads=heads,
            groups=groups,
            head_dim=head_dim,
            inner=inner,
            vocab=vocab_size,
            capacity=capacity,
            eps=eps,
            threads=torch.get_num_threads(),
        )
        self._job.room_size = self._kernel.room(self._job)
        width, stored = self._kernel.width(rows), (heads + 2 * groups) * head_dim
        features = {"x": dim, "qkv": stored, "y": heads * head_dim, "h": inner, "gates": 2 * inner}
        sizes = {name: n * width for name, n in features.items()}
        sizes["room"] = self._job.threads * self._job.room_size
        self._scratch = torch.split(head.new_zeros(sum(sizes.values())), list(sizes.values()))
        for name, part in zip(sizes, self._scratch, strict=True):
            setattr(self._job, name, part.data_ptr())

    @staticmethod
    def fits(
        layers: Sequence[Layer], final_gain: Tensor, head: Tensor, pad_B: Tensor | None
    ) -> bool:
        """Tell whether these are what the C kernel can read, and whether there is one."""
        tensors = [tensor for layer in layers for tensor in layer] + [final_gain, head]
        return (
            is_one_dtype((torch.float32, torch.float64), *tensors)
            and is_plain(*tensors, pad_B)
            and all(tensor.is_contiguous() for tensor in tensors)
            and (pad_B is None or (pad_B.dtype is torch.int64 and pad_B.is_contiguous()))
            and _load(head.dtype) is not None
        )

    def read(self, x_BD: Tensor, rotation: Rotation, length: int) -> Tensor:
        """Read a token of each row into place ``length`` of the caches; return the logits (B, V).

        Args:
            x_BD: the tokens' embeddings.
            rotation: of their positions, K / 2 numbers for all rows or for each, of x's dtype.
            length: how many places of the caches are taken.

        The logits are overwritten by the next call.
        """
        job, (cos, sin) = self._job, rotation
        assert 0 <= length < job.capacity
        assert x_BD.shape == (job.rows, job.dim)
        x_BD, cos, sin = x_BD.contiguous(), cos.contiguous(), sin.contiguous()
        job.embedded, job.cos, job.sin = x_BD.data_ptr(), cos.data_ptr(), sin.data_ptr()
        job.rotation_stride = 0 if cos.numel() == job.head_dim // 2 else job.head_dim // 2
        job.length = length
        self._kernel.stack(job)
        return self._logits


class _Kernel(NamedTuple):
    stack: Any
    room: Any
    width: Any


@functools.cache
def _load(dtype: torch.dtype) -> Any:
    library = load_library("stack", dtype)
    if library is None:
        return None
    library.stack.argtypes, library.stack.restype = [ctypes.POINTER(_Job)], None
    library.stack_room.argtypes, library.stack_room.restype = [ctypes.POINTER(_Job)], _LONG
    library.stack_width.argtypes, library.stack_width.restype = [_LONG], _LONG
    return _Kernel(library.stack, library.stack_room, library.stack_width)
