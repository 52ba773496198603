"""Linear maps without bias, and several of the same input as one product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillama.model.kernels import linear
from minillama.model.kernels.torch_private import has_global_hooks


def packed_linear(x: Tensor, *layers: nn.Module) -> Tensor:
    """Return [layer₁(x), layer₂(x), …] joined along the last dimension.

    One product computes all (:mod:`minillama.model.kernels.linear`), unless a layer is more than
    its weight: hooked, replaced (an adapter), quantized or given another ``forward``.
    """
    if are_plain(*layers):
        return linear(x, *(layer.weight for layer in layers if isinstance(layer, nn.Linear)))
    outputs: list[Tensor] = [layer(x) for layer in layers]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def are_plain(*layers: nn.Module) -> bool:
    """Return whether each layer is only a product with its weight."""
    return all(
        type(layer) is nn.Linear
        and layer.bias is None
        and type(layer.weight) in (nn.Parameter, Tensor)  # torchao puts a subclass in its place
        and not is_hooked(layer)
        for layer in layers
    )


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
