"""Linear maps without bias, and several of the same input as one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from minillama.model.kernels import linear

_has_any_global_hook: Any = module._has_any_global_hook


class Linear(nn.Linear):
    """x·Wᵀ, as fast as the machine allows (:mod:`minillama.model.kernels.linear`)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return linear(x, self.weight)


def side_by_side(x: Tensor, *layers: nn.Module) -> Tensor:
    """Return [layer₁(x), layer₂(x), …] joined along the last dimension.

    One product does for all, unless a layer is more than its weight: hooked, replaced (an adapter,
    a quantized layer) or given another ``forward``, as whoever changes a model from outside may do.
    """
    if are_plain(*layers):
        return linear(x, *(layer.weight for layer in layers if isinstance(layer, Linear)))
    return torch.cat([layer(x) for layer in layers], dim=-1)


def are_plain(*layers: nn.Module) -> bool:
    """Tell whether each layer is no more than a product with its weight."""
    return all(type(layer) is Linear and not is_hooked(layer) for layer in layers)


def is_hooked(layer: nn.Module) -> bool:
    """Tell whether something watches the calls of ``layer``, or of all modules."""
    return bool(
        "forward" in vars(layer)  # how accelerate wraps a module
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or _has_any_global_hook()
    )
