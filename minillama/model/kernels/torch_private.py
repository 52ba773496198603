"""Names of torch that it does not document, all in one place.

They were checked with torch 2.9 to 2.13.  In a version that lacks one of them, the kernels are not
used and the model runs as plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module

MISSING: str | None = None
"""Which name this version of torch lacks; None: it has all."""

try:
    has_storage: Any = torch._C._has_storage
    _functorch_is_active: Any = torch._C._are_functorch_transforms_active
    _n_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
    _jit_trace: Any = torch._C._get_tracing_state
    has_global_hooks: Any = module._has_any_global_hook
    assert isinstance(forward_ad._current_level, int)
except AttributeError as error:
    MISSING = str(error)

    def has_storage(tensor: torch.Tensor) -> bool:
        """Return False, so that no tensor counts as plain."""
        return False

    def has_global_hooks() -> bool:
        """Return True, so that no module counts as plain."""
        return True


def is_transformed() -> bool:
    """Return whether a functorch transform or forward AD is active."""
    return MISSING is None and (_functorch_is_active() or forward_ad._current_level >= 0)


def is_watched() -> bool:
    """Return whether a functorch transform, dispatch mode, forward AD or jit trace is active."""
    return (
        MISSING is not None
        or is_transformed()
        or _n_dispatch_modes() > 0
        or _jit_trace() is not None
    )


def unchecked_apply(function: type[torch.autograd.Function]) -> Any:
    """Return ``function.apply`` without its check for functorch, which takes 1.6 µs a call.

    Call it only where :func:`is_watched` is False.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def find_onednn_linear() -> Any:
    """Return torch's operator for a product by oneDNN, which torch.compile uses; None: not here."""
    try:
        return torch.ops.mkldnn._linear_pointwise.default if torch._C._has_mkldnn else None
    except AttributeError:
        return None
