"""When a compiled kernel may take the place of plain PyTorch, and with how many threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel

PARALLEL_FROM = 32768  # numbers; torch's own kernels draw the line here too

# Names of this module, since a call at the smallest shapes takes some 10 µs in all.
_has_storage = torch._C._has_storage
_functorch_is_active = torch._C._are_functorch_transforms_active
_n_dispatch_modes = torch._C._len_torch_dispatch_stack
_jit_trace = torch._C._get_tracing_state


def is_plain(*tensors: Tensor | None) -> bool:
    """Tell whether these are no more than memory here: no subclass, transform or mode watches."""
    for tensor in tensors:
        if tensor is not None and not (
            (type(tensor) is Tensor or type(tensor) is Parameter)
            and tensor.is_cpu
            and _has_storage(tensor)
        ):
            return False
    return (
        not _functorch_is_active()
        and _n_dispatch_modes() == 0
        and forward_ad._current_level < 0
        and _jit_trace() is None
    )


def is_one_dtype(dtypes: Sequence[torch.dtype], *tensors: Tensor) -> bool:
    """Tell whether all ``tensors`` have the same dtype, and that among ``dtypes``."""
    dtype = tensors[0].dtype
    return dtype in dtypes and all(tensor.dtype is dtype for tensor in tensors)


def threads_for(x: Tensor) -> int:
    """Return how many threads work on ``x`` is worth."""
    return torch.get_num_threads() if x.numel() >= PARALLEL_FROM else 1


def needs_gradient(*tensors: Tensor) -> bool:
    """Tell whether what is made of ``tensors`` will be differentiated."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def differentiable_gradients(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients for ``inputs`` through the ``plain`` version, to be differentiated.

    None where an input needs no gradient.
    """
    # Of torch's kernels for attention only this one has a second derivative.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        # Where one input is computed from another (x from a tied weight), the inputs themselves
        # would also collect what flows from one into the other.  Nothing is computed from an alias.
        aliases = [x.view_as(x) for x in inputs]
        wanted = [x for x in aliases if x.requires_grad]
        found = iter(torch.autograd.grad(plain(*aliases), wanted, grad, create_graph=True))
    return [next(found) if x.requires_grad else None for x in inputs]
