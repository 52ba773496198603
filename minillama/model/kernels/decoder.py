"""One token of each sequence through all blocks of a pre-norm Llama in one call, for decoding.

Block by block from Python, the overhead per token is about 0.9 ms at any size of model, where one
of 15 M parameters reads its weights in 3 ms.  Several sequences share one read of the weights.

Shapes: B sequences, V vocabulary, D width, G key/value heads, S positions of the cache, K features
of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillama.model.kernels.frame import c_library, check_shape
from minillama.model.rope import Rotation


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


class FusedDecoder:
    """The blocks and the head of a model, ready to read one token after another.

    Args:
        layers: weights and caches; the caches change as tokens are read.
        final_gain: of the norm before the head, (D,).
        head: (V, D).
        eps: of every norm.
        pad_B: int64, how many positions at the start of each row of the caches are padding; None: 0
            in all.

    Raises:
        ValueError: :meth:`fits` is False of these.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        final_gain: Tensor,
        head: Tensor,
        eps: float,
        pad_B: Tensor | None = None,
    ) -> None:
        c = _library(layers, final_gain, head, pad_B)
        if c is None:
            raise ValueError("the fused decoder cannot read these tensors; check with fits()")
        self._c = c
        rows, groups, capacity, head_dim = layers[0].keys.shape
        vocab_size, dim = head.shape
        heads, inner = layers[0].q.shape[0] // head_dim, layers[0].gate.shape[0]
        self._logits = head.new_empty(rows, vocab_size)
        self._tensors = layers, final_gain, head, pad_B  # the job holds their addresses
        table = [c.decoder_layer_t(*(tensor.data_ptr() for tensor in layer)) for layer in layers]
        self._table = (c.decoder_layer_t * len(layers))(*table)
        self._job = job = c.decoder_t(
            layers=ctypes.addressof(self._table),
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
        job.scratch_size = c.decoder_scratch(job=job)
        width, stored = c.decoder_width(rows=rows), (heads + 2 * groups) * head_dim
        features = {"x": dim, "qkv": stored, "y": heads * head_dim, "h": inner, "gates": 2 * inner}
        sizes = {name: n * width for name, n in features.items()}
        sizes["scratch"] = job.threads * job.scratch_size
        self._scratch = torch.split(head.new_zeros(sum(sizes.values())), list(sizes.values()))
        for name, part in zip(sizes, self._scratch, strict=True):
            setattr(job, name, part.data_ptr())

    @staticmethod
    def fits(
        layers: Sequence[Layer], final_gain: Tensor, head: Tensor, pad_B: Tensor | None
    ) -> bool:
        """Return whether the C kernel can read these, and whether there is one."""
        return _library(layers, final_gain, head, pad_B) is not None

    def read(self, x_BD: Tensor, rotation: Rotation, length: int) -> Tensor:
        """Read a token of each row into position ``length`` of the caches; return logits (B, V).

        Args:
            x_BD: the tokens' embeddings.
            rotation: of their positions, K / 2 numbers for all rows or for each, of x's dtype.
            length: how many positions of the caches are stored.

        The logits are overwritten by the next call.

        Raises:
            ValueError: the caches are full, or the sizes differ.
        """
        job, (cos, sin) = self._job, rotation
        if not 0 <= length < job.capacity:
            raise ValueError(f"position {length}: must be below the caches' {job.capacity}")
        check_shape(x_BD.shape == (job.rows, job.dim), f"({job.rows}, {job.dim})", x_BD)
        x_BD, cos, sin = x_BD.contiguous(), cos.contiguous(), sin.contiguous()
        job.embedded, job.cos, job.sin = x_BD.data_ptr(), cos.data_ptr(), sin.data_ptr()
        job.rotation_stride = 0 if cos.numel() == job.head_dim // 2 else job.head_dim // 2
        job.length = length
        self._c.decode(job=job)
        return self._logits


def _library(
    layers: Sequence[Layer], final_gain: Tensor, head: Tensor, pad_B: Tensor | None
) -> Any:
    tensors = [tensor for layer in layers for tensor in layer] + [final_gain, head]
    if not all(tensor.is_contiguous() for tensor in tensors) or (
        pad_B is not None and (pad_B.dtype is not torch.int64 or not pad_B.is_contiguous())
    ):
        return None
    return c_library(*tensors, others=(pad_B,))
