"""Rotary position embedding (Su 2021, arXiv 2104.09864), half-split as in Llama's HF weights.

Feature j of the first half of a head and feature j of the second are a pair, rotated by the angle
position · θ^(−2j / head_dim):

    [x₁, x₂] → [x₁·cos − x₂·sin,  x₂·cos + x₁·sin]

Angles, cosines and sines are always computed in float32: bfloat16 cannot represent
position 257.  Shapes: B batch, T positions, H heads, K features of a head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minillama.arguments import finite_number, whole_number
from minillama.config.model import LinearRopeScaling, Llama3RopeScaling
from minillama.errors import ConfigError


class Rotation(NamedTuple):
    """Cosines and sines of the angles at some positions, broadcastable to (B, H, T, K / 2)."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(
    head_dim: int,
    theta: float,
    scaling: LinearRopeScaling | Llama3RopeScaling | None = None,
) -> Tensor:
    """Return the angle per position of each pair of features, float32 of shape (head_dim / 2,).

    ``linear`` divides all by the factor (Chen 2023, arXiv 2306.15595).  ``llama3`` divides those
    whose wave is longer than the original context over ``low_freq_factor``, keeps those shorter
    than it over ``high_freq_factor``, and blends in between (Llama 3.1).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequency = 1.0 / theta**exponent
    if isinstance(scaling, LinearRopeScaling):
        return frequency / scaling.factor
    if isinstance(scaling, Llama3RopeScaling):
        waves_in_context = scaling.original_max_seq_len * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((waves_in_context - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequency / scaling.factor + kept * frequency
    return frequency


class RotaryEmbedding(nn.Module):
    """The table of rotations for positions 0 … max_seq_len − 1.  It has no state to save.

    Args:
        head_dim: features of a head.
        max_seq_len: positions.
        theta: θ.
        scaling: of the frequencies.
        scale: what is rotated is multiplied with it too.

    Raises:
        ConfigError: a size or θ is out of range, or ``head_dim`` is odd.
    """

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int,
        theta: float = 10_000.0,
        scaling: LinearRopeScaling | Llama3RopeScaling | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        whole_number("max_seq_len", max_seq_len, 1)
        if whole_number("head_dim", head_dim, 2) % 2:
            raise ConfigError(f"head_dim = {head_dim}: must be even, since features turn in pairs")
        if scaling is not None and not isinstance(scaling, LinearRopeScaling | Llama3RopeScaling):
            raise TypeError(
                "scaling must be a LinearRopeScaling or a Llama3RopeScaling, not "
                f"{type(scaling).__name__}"
            )
        finite_number("theta", theta, "must be a finite number above 0", positive=True)
        with torch.device("cpu"):
            angle = torch.outer(
                torch.arange(max_seq_len, dtype=torch.float32),
                inverse_frequencies(head_dim, theta, scaling),
            )
        # A plain attribute, not a buffer: model.to(torch.bfloat16) must leave it in float32.
        self._table = torch.stack((angle.cos(), angle.sin())) * scale

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotations at ``positions``, of shape (T,) or (B, T), rounded to ``dtype``."""
        if self._table.device != positions.device:
            self._table = self._table.to(positions.device)
        cos, sin = self._table[:, positions].to(dtype)
        if positions.ndim == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for all heads
        return Rotation(cos, sin)


def rotate(x_BHTK: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair of features of ``x`` by the angles of its position."""
    first, second = x_BHTK.chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
