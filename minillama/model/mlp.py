"""SwiGLU, the gated MLP of Llama (Shazeer 2020, arXiv 2002.05202).

Shapes: B batch, T positions, D width, F inner width.
"""

from __future__ import annotations

from torch import Tensor, nn

from minillama.arguments import check_type
from minillama.config import ModelConfig
from minillama.model.kernels import gated_mlp, swiglu
from minillama.model.projection import Linear, are_plain, packed_linear


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), with silu(z) = z · σ(z)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_type("config", config, ModelConfig)
        self.gate_proj = Linear(config.dim, config.ffn_dim)
        self.up_proj = Linear(config.dim, config.ffn_dim)
        self.down_proj = Linear(config.ffn_dim, config.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map each position on its own; (B, T, D) to (B, T, D)."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if are_plain(gate, up, down):
            return gated_mlp(x_BTD, gate.weight, up.weight, down.weight)
        y_BTD: Tensor = down(swiglu(packed_linear(x_BTD, gate, up)))
        return y_BTD
