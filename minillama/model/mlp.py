"""SwiGLU, the gated MLP of Llama (Shazeer 2020, arXiv 2002.05202).

Shapes: B batch, T positions, D width, F inner width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minillama.arguments import check_type
from minillama.config import ModelConfig
from minillama.config.placement import PLACEMENTS
from minillama.model.kernels import gated_mlp, swiglu
from minillama.model.ngpt import LearnedScale, scale_rows
from minillama.model.projection import are_plain, packed_linear


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)), with silu(z) = z · σ(z).

    In an nGPT the results of gate and up have learned scales (:mod:`minillama.model.ngpt`).
    """

    gate_scale: LearnedScale | None
    up_scale: LearnedScale | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_type("config", config, ModelConfig)
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.gate_scale = self.up_scale = None
        if PLACEMENTS.get(config.norm.placement).unit_weights:
            self.gate_scale = LearnedScale(config.ffn_dim, start=math.sqrt(config.dim), stored=1.0)
            self.up_scale = LearnedScale(config.ffn_dim, start=1.0, stored=1.0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map each position on its own; (B, T, D) to (B, T, D).

        Raises:
            ValueError: the width is not D.
        """
        check_type("x", x_BTD, Tensor)
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if are_plain(gate, up, down):
            scaled_gate = scale_rows(gate.weight, self.gate_scale)
            scaled_up = scale_rows(up.weight, self.up_scale)
            return gated_mlp(x_BTD, scaled_gate, scaled_up, down.weight)
        packed = packed_linear(x_BTD, gate, up)
        if self.gate_scale is not None and self.up_scale is not None:
            packed = packed * torch.cat((self.gate_scale(), self.up_scale()))
        return packed_linear(swiglu(packed), down)
