"""Keys and values of the tokens already read, so that decoding reads each token once.

Shapes: B batch, G key/value heads, S positions held, T new positions, K features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillama.arguments import check_type, whole_number
from minillama.config import ModelConfig
from minillama.errors import ConfigError
from minillama.model.kernels import decode_attention
from minillama.model.rope import Rotation


class KVCache:
    """Space for ``capacity`` positions of a batch, for every layer.

    Prompts of unequal length are right-aligned: ``pad_B`` of shape (B,) is the padding on the left
    of each row.  It is masked out, and positions count from its end, so that a row is computed as
    if it were alone.

    Raises:
        ConfigError: ``batch``, ``capacity``, ``pad_B`` or ``dtype`` is not as said.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        pad_B: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        check_type("config", config, ModelConfig)
        batch, capacity = whole_number("batch", batch, 1), whole_number("capacity", capacity, 1)
        check_type("dtype", dtype, torch.dtype)
        if not dtype.is_floating_point:
            raise ConfigError(f"dtype = {dtype}: must be a floating-point one, the model's")
        if pad_B is not None:
            check_type("pad_B", pad_B, Tensor)
            if pad_B.shape != (batch,) or pad_B.is_floating_point():
                raise ConfigError(
                    f"pad_B of {pad_B.dtype} and shape {tuple(pad_B.shape)}: must be one whole "
                    f"number for each of the {batch} rows"
                )
            if not pad_B.is_meta and bool(((pad_B < 0) | (pad_B >= capacity)).any()):
                raise ConfigError(
                    f"pad_B = {pad_B.tolist()}: must be at least 0 and below the capacity, "
                    f"{capacity}"
                )
        shape = (config.n_layers, batch, config.n_kv_heads, capacity, config.head_dim)
        self.k_LBGSK = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LBGSK = torch.zeros(shape, dtype=dtype, device=device)
        self.pad_B = pad_B if pad_B is not None and bool(pad_B.any()) else None
        self.capacity = capacity
        self.length = 0

    def append(self, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of ``layer``; return all so far, (B, G, S, K) each.

        Raises:
            ValueError: the cache is full.
        """
        end = self.length + k_BGTK.shape[2]
        if end > self.capacity:
            raise ValueError(f"{end} positions are more than the cache's {self.capacity}")
        self.k_LBGSK[layer, :, :, self.length : end] = k_BGTK
        self.v_LBGSK[layer, :, :, self.length : end] = v_BGTK
        return self.k_LBGSK[layer, :, :, :end], self.v_LBGSK[layer, :, :, :end]

    def attend(self, layer: int, heads_B1MK: Tensor, rotation: Rotation) -> Tensor:
        """Store one new position of ``layer`` and attend from it to all, (B, 1, H, K).

        ``heads`` are its queries, keys and values, before RoPE, (B, 1, H + 2G, K).

        Raises:
            ValueError: the cache is full.
        """
        k_BGSK, v_BGSK = self.k_LBGSK[layer], self.v_LBGSK[layer]
        return decode_attention(heads_B1MK, rotation, k_BGSK, v_BGSK, self.length, self.pad_B)

    def advance(self, n_tokens: int) -> None:
        """Count ``n_tokens`` as read, once all layers have stored them."""
        self.length += n_tokens

    def keep(self, rows: list[int]) -> None:
        """Keep only these ``rows`` of the batch."""
        self.k_LBGSK, self.v_LBGSK = self.k_LBGSK[:, rows], self.v_LBGSK[:, rows]
        if self.pad_B is not None:
            self.pad_B = self.pad_B[rows]

    def positions(self, n_tokens: int) -> Tensor:
        """Return the positions of the next ``n_tokens``, (T,), or (B, T) for unequal prompts."""
        place_T = torch.arange(self.length, self.length + n_tokens, device=self.k_LBGSK.device)
        if self.pad_B is None:
            return place_T
        return (place_T - self.pad_B[:, None]).clamp(min=0)

    def mask(self, n_tokens: int) -> Tensor | None:
        """Return what the next ``n_tokens`` may see, broadcastable to (B, H, T, S).

        None where :class:`~minillama.model.attention.Attention` needs no mask.  A row's padding
        sees itself, since a softmax over nothing is not a number.
        """
        if self.pad_B is None and (n_tokens == 1 or self.length == 0):
            return None
        device = self.k_LBGSK.device
        query_T1 = torch.arange(self.length, self.length + n_tokens, device=device)[:, None]
        key_S = torch.arange(self.length + n_tokens, device=device)
        seen_TS = key_S <= query_T1
        if self.pad_B is None:
            return seen_TS
        real_B11S = key_S >= self.pad_B[:, None, None, None]
        return (seen_TS & real_B11S) | (key_S == query_T1)
