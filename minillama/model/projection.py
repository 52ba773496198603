"""Linear maps without bias, and several of the same input as one product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillama.model.kernels import linear
from minillama.model.kernels.torch_private import has_global_hooks


class Linear(nn.Linear):
    """x·Wᵀ, as fast as the machine allows (:mod:`minillama.model.kernels.linear`)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return linear(x, self.weight)


def packed_linear(x: Tensor, *layers: nn.Module) -> Tensor:
    """Return [layer₁(x), layer₂(x), …] joined along the last dimension.

    One product computes all, unless a layer is more than its weight: hooked, replaced (an adapter,
    a quantized layer) or given another ``forward``.
    """
    if are_plain(*layers):
        return linear(x, *(layer.weight for layer in layers if isinstance(layer, Linear)))
    return torch.cat([layer(x) for layer in layers], dim=-1)


def are_plain(*layers: nn.Module) -> bool:
    """Return whether each layer is only a product with its weight."""
    return all(type(layer) is Linear and not is_hooked(layer) for layer in layers)


def are_identities(*modules: nn.Module) -> bool:
    """Return whether each module is an identity without hooks."""
    return all(type(module) is nn.Identity and not is_hooked(module) for module in modules)


def is_hooked(layer: nn.Module) -> bool:
    """Return whether ``layer``, or every module, has hooks or a replaced ``forward``."""
    return bool(
        "forward" in vars(layer)  # how accelerate wraps a module
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or has_global_hooks()
    )
