"""The frame of every kernel: when C may be used, with how many threads, and how autograd sees it.

    c_library(tensors)  ──None──▶  the plain formula, in torch
        │
        ▼
    Kernel.forward ─▶ y, kept     backward: Kernel.backward(dy, tensors, kept)
                                  differentiated again: through the plain formula

torch.compile and torch.export meet the plain formulas only.  RMSNorm as a registered operator was
measured against that: a compiled step took 1.41 of eager mode's time with it and 1.38 without at
d 64, 1.28 and 1.29 at d 128 (one thread), since inductor fuses the formula with its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel

from minillama.model.kernels.library import load
from minillama.model.kernels.torch_private import has_storage, is_watched, unchecked_apply

PARALLEL_FROM = 32768  # numbers; torch's own kernels use this limit too
_FULL_PRECISION = (torch.float32, torch.float64)
_PLAIN_TYPES = (Tensor, Parameter)


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether these are ordinary memory of the CPU: no subclass, and no mode is active."""
    for tensor in tensors:
        if tensor is not None and not (
            type(tensor) in _PLAIN_TYPES and tensor.is_cpu and has_storage(tensor)
        ):
            return False
    return not is_watched()


def is_eligible(
    *tensors: Tensor,
    others: Sequence[Tensor | None] = (),
    half: bool = False,
    under_autocast: bool = False,
) -> bool:
    """Return whether a kernel may work on the memory of these tensors.

    It may not where something traces or transforms the call, a tensor is not ordinary CPU memory,
    dtypes differ, or there is no kernel for the dtype.

    Args:
        tensors: of one dtype and with at least one number.
        others: tensors of any dtype.
        half: there is a kernel for float16 and bfloat16 too.
        under_autocast: autocast changes nothing about this operation.
    """
    dtype = tensors[0].dtype
    if (
        torch.compiler.is_compiling()
        or not (half or dtype in _FULL_PRECISION)
        or not is_plain(*tensors, *others)
        or not (under_autocast or not torch.is_autocast_enabled("cpu"))
    ):
        return False
    for tensor in tensors:  # noqa: SIM110  an expression takes twice the time
        if tensor.dtype is not dtype or not tensor.numel():
            return False
    return True


def c_library(
    *tensors: Tensor,
    others: Sequence[Tensor | None] = (),
    half: bool = False,
    under_autocast: bool = False,
) -> Any:
    """Return the C kernels for these tensors; None where plain PyTorch must do it.

    That is where they are not eligible (:func:`is_eligible`), there is no compiler, or
    MINILLAMA_KERNELS=0.
    """
    if not is_eligible(*tensors, others=others, half=half, under_autocast=under_autocast):
        return None
    return load(tensors[0].dtype)


def check_shape(is_right: bool, needed: str, *tensors: Tensor) -> None:
    """Raise ValueError with the tensors' shapes and those ``needed``, unless they are right."""
    if not is_right:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"tensors of shapes {shapes}: must be {needed}")


def threads_for(n_numbers: int, parallel_from: int = PARALLEL_FROM) -> int:
    """Return how many threads work on ``n_numbers`` is worth."""
    return torch.get_num_threads() if n_numbers >= parallel_from else 1


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether the result of an operation on ``tensors`` will be differentiated."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110  an expression takes twice the time
        if tensor is not None and tensor.requires_grad:
            return True
    return False


@dataclass(frozen=True)
class Kernel:
    """A differentiable function by C, and the same function in plain PyTorch."""

    plain: Callable[..., Any]
    """``(*tensors, *options) -> y``, or several outputs, of which the first has a gradient."""
    forward: Callable[..., Any]
    """``(c, needed, *tensors, *options) -> (y, kept)``: with what the backward pass needs beside
    the tensors, which are contiguous.  ``needed``: which of them get a gradient; empty: none."""
    backward: Callable[..., Sequence[Tensor | None]]
    """``(c, needed, dy, tensors, kept, *options) -> gradients`` of the tensors."""

    def __call__(self, c: Any, tensors: Sequence[Tensor | None], *options: Any) -> Any:
        """Run it on ``tensors`` with the library ``c``; what needs gradients is recorded."""
        tensors = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        if needs_gradient(*tensors):
            return _apply(self, c, options, *tensors)
        return self.forward(c, (), *tensors, *options)[0]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, c: Any, options: tuple[Any, ...], *tensors: Tensor | None
    ) -> Any:
        y, kept = kernel.forward(c, ctx.needs_input_grad[3:], *tensors, *options)
        ctx.save_for_backward(*tensors, *kept)
        ctx.how = kernel, c, options
        if isinstance(y, tuple):
            ctx.mark_non_differentiable(*y[1:])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (kernel, c, options), dy, needed = ctx.how, grads[0], ctx.needs_input_grad[3:]
        saved = ctx.saved_tensors
        tensors, kept = saved[: len(needed)], saved[len(needed) :]
        if torch.is_grad_enabled() or (c is not None and not is_plain(dy)):

            def plain(*tensors: Tensor | None) -> Tensor:
                y = kernel.plain(*tensors, *options)
                first: Tensor = y[0] if isinstance(y, tuple) else y
                return first

            gradients = differentiable_gradients(plain, tensors, dy)
        else:
            gradients = kernel.backward(c, needed, dy.contiguous(), tensors, kept, *options)
        return None, None, None, *gradients


_apply = unchecked_apply(_Function)


def differentiable_gradients(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradients for ``inputs`` through the ``plain`` version, to be differentiated.

    None where an input needs no gradient.
    """
    # Of torch's kernels for attention only this one has a second derivative.
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        # Where one input is computed from another (x from a tied weight), the inputs themselves
        # would also collect what flows from one into the other.  Nothing is computed from an alias.
        aliases = [None if x is None else x.view_as(x) for x in inputs]
        wanted = [x for x in aliases if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(plain(*aliases), wanted, grad, create_graph=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]
