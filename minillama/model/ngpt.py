"""The parts of the normalised transformer that are not norms (nGPT, Loshchilov 2024, 2410.01131).

All vectors of the model's width have length 1: rows of the embedding and of the head, rows of the
matrices that read the residual stream, columns of those that write to it, and the stream itself.
So a product with a matrix is a list of cosines, and learned scales give back the lost magnitudes:

    x ← N((1 − a)·x + a·N(f(x)))        a ≥ 0 for each feature, 0.05 at the start; N(x) = x / ‖x‖
    q ← s_qk · N(q), k ← s_qk · N(k)    after RoPE; softmax(√K · q·kᵀ) for heads of K features
    MLP: down(silu(gate · s_v·√D) · (up · s_u))
    logits ← s_z · logits

The residual sum is the row ``ngpt`` of :mod:`minillama.config.placement`, N the kind ``l2norm``.
The paper trains without warm-up and without weight decay.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WRITES = ("o_proj.weight", "down_proj.weight")
"""Their columns, not their rows, are vectors of the model's width."""


class LearnedScale(nn.Module):
    """Learned numbers s = w · start / stored, where w is the parameter (section 2.5 of the paper).

    Adam moves w by about the learning rate whatever its size, so a w that is ``stored`` small moves
    s by start / stored times as much.

    Args:
        dim: numbers.
        start: s at the start.
        stored: w at the start.
    """

    def __init__(self, dim: int, start: float, stored: float) -> None:
        super().__init__()
        self.factor = start / stored
        self.weight = nn.Parameter(torch.full((dim,), stored))

    def forward(self) -> Tensor:
        """Return s, of shape (dim,)."""
        return self.weight * self.factor


def scale_rows(weight: Tensor, scale: LearnedScale | None) -> Tensor:
    """Return the matrix with row i times sᵢ: a product with it gives the scaled results."""
    return weight if scale is None else weight * scale().to(weight.dtype)[:, None]


@torch.no_grad()
def normalise_weights(model: nn.Module) -> None:
    """Give all vectors of the model's width length 1 in every matrix, in place."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            dim = 0 if name.endswith(_WRITES) else 1
            length = torch.linalg.vector_norm(weight, dim=dim, keepdim=True)
            weight.div_(length.clamp(min=torch.finfo(weight.dtype).tiny))
