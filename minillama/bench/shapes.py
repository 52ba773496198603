"""The models and batches whose training step is timed, and the step itself.

Shapes: B windows, T positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillama.config import ModelConfig
from minillama.config.norms import NormConfig
from minillama.config.run import OptimConfig
from minillama.model.transformer import Transformer
from minillama.training.optim import build_optimizer, clip_gradients


class Shape(NamedTuple):
    """A model and a batch."""

    dim: int
    n_layers: int
    vocab_size: int
    batch: int
    length: int
    n_heads: int = 4

    def config(self, **norm: Any) -> ModelConfig:
        """Return the model's config, with these fields of ``model.norm``."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            dim=self.dim,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            max_seq_len=self.length,
            norm=NormConfig(**norm),
        )

    def tokens(self) -> Tensor:
        """Return random ids, (B, T + 1), the same at each call."""
        draw = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (self.batch, self.length + 1), generator=draw)

    def __str__(self) -> str:
        return (
            f"d {self.dim}, {self.n_layers} layers ({self.vocab_size}, {self.batch}×{self.length})"
        )


SHAPES = (
    Shape(64, 4, 512, 16, 128),
    Shape(128, 4, 1024, 16, 128),
    Shape(256, 6, 2048, 8, 256),
)
WIDE_SHAPES = (Shape(512, 2, 2048, 4, 256), Shape(1024, 1, 2048, 4, 256))


def training_step(model: Transformer, tokens: Tensor) -> Callable[[], object]:
    """Return what makes one update, as the trainer does, on windows of T + 1 ``tokens``."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    optim = OptimConfig()
    optimizer, parameters = build_optimizer(model, optim), list(model.parameters())
    count = targets.numel()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(model.loss_sums(inputs, targets).objective / count)
        clip_gradients(parameters, optim.grad_clip)
        optimizer.step()

    return step
