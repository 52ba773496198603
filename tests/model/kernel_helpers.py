"""What several tests of kernels share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw normal numbers, the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_gradient(
    function: Callable[..., Tensor], x: Tensor, grad: Tensor, *args: object
) -> tuple[Tensor, Tensor]:
    """Return y = function(x, *args), and the gradient of x where that of y is ``grad``."""
    x = x.detach().requires_grad_()
    y = function(x, *args)
    y.backward(grad.to(y.dtype))
    assert x.grad is not None
    return y.detach(), x.grad
