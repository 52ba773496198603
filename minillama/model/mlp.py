"""SwiGLU, the gated MLP of Llama (Shazeer 2020, arXiv 2002.05202).

Shapes: B batch, T positions, D width, F inner width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from minillama.config import ModelConfig


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), with silu(z) = z · σ(z)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config = config.resolve()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map each position on its own; (B, T, D) to (B, T, D)."""
        y_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return y_BTD
