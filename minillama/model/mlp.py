"""SwiGLU, the gated MLP of Llama (Shazeer 2020, arXiv 2002.05202).

Shapes: B batch, T positions, D width, F inner width.
"""

from __future__ import annotations

from torch import Tensor, nn

from minillama.config import ModelConfig
from minillama.model.kernels import swiglu
from minillama.model.projection import Linear, side_by_side


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), with silu(z) = z · σ(z)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config = config.resolve()
        self.gate_proj = Linear(config.dim, config.ffn_dim)
        self.up_proj = Linear(config.dim, config.ffn_dim)
        self.down_proj = Linear(config.ffn_dim, config.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map each position on its own; (B, T, D) to (B, T, D)."""
        gate_and_up = side_by_side(x_BTD, self.gate_proj, self.up_proj)
        y_BTD: Tensor = self.down_proj(swiglu(gate_and_up))
        return y_BTD
