"""The three products of a linear layer in training: x·Wᵀ, dy·W and dyᵀ·x.

The C kernel makes dyᵀ·x in 0.65 to 0.95 of the time that torch's product takes.  The other two it
makes if W is small, which shortens a step by 2 to 5 %; beyond, oneDNN is as fast.  Where a
machine has too few vector registers for it, or there is no compiler, torch and oneDNN do them all.

Shapes: N tokens, O output and I input features.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.model.kernels.compiled import load_library
from minillama.model.kernels.dispatch import is_one_dtype, is_plain, threads_for

SMALL = 1 << 18  # numbers of a weight: with more, oneDNN's products are as fast or faster
_DTYPES = (torch.float32, torch.float64)


def product(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x·Wᵀ, (..., O), of x (..., I); no gradient is recorded."""
    if x.dtype is not torch.float32 or not is_plain(x, weight_OI) or not x.numel():
        return F.linear(x, weight_OI)
    n_out, n_in = weight_OI.shape
    if (
        weight_OI.numel() <= SMALL
        and weight_OI.dtype is x.dtype
        and x.shape[-1] == n_in
        and (kernel := _load(x.dtype))
    ):
        if weight_OI.is_contiguous():
            return _multiply(kernel, x.contiguous(), weight_OI, n_out, b_is_transposed=True)
        if weight_OI.t().is_contiguous():
            return _multiply(kernel, x.contiguous(), weight_OI, n_out, b_is_transposed=False)
    if _onednn is None:
        return F.linear(x, weight_OI)
    return cast(Tensor, _onednn(x, weight_OI, None, "none", [], ""))


def weight_gradient(grad_NO: Tensor, x_NI: Tensor, into_OI: Tensor | None = None) -> Tensor:
    """Return dyᵀ·x, (O, I), added to ``into`` and in its place if that is given.

    No gradient is recorded.
    """
    tensors = [grad_NO, x_NI] if into_OI is None else [grad_NO, x_NI, into_OI]
    if (
        is_one_dtype(_DTYPES, *tensors)
        and is_plain(*tensors)
        and len(grad_NO) == len(x_NI)
        and (into_OI is None or _is_whole(into_OI, grad_NO, x_NI))
        and (kernel := _load(x_NI.dtype))
    ):
        return _transposed_times(kernel, grad_NO.contiguous(), x_NI.contiguous(), into_OI)
    if into_OI is None:
        return grad_NO.t() @ x_NI
    if into_OI.dtype is grad_NO.dtype:
        return into_OI.addmm_(grad_NO.t(), x_NI)
    return into_OI.add_(grad_NO.t() @ x_NI)


def _is_whole(into_OI: Tensor, grad_NO: Tensor, x_NI: Tensor) -> bool:
    return into_OI.is_contiguous() and into_OI.shape == (grad_NO.shape[1], x_NI.shape[1])


def _find_onednn() -> Any:
    """Return torch's operator for a product by oneDNN, which torch.compile uses; None: not here."""
    try:
        return torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None


_onednn: Any = _find_onednn() if torch._C._has_mkldnn else None


# ------------------------------------------------------------------------------------- the kernel


class _Kernel(NamedTuple):
    matmul: Any
    room: Any


@functools.cache
def _load(dtype: torch.dtype) -> _Kernel | None:
    library = load_library("matmul", dtype)
    if library is None or not library.matmul_pays():
        return None
    pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    library.matmul.argtypes = [*[pointer] * 4, *[long] * 3, *[integer] * 4]
    library.matmul.restype = None
    library.matmul_room.argtypes, library.matmul_room.restype = [long, long, integer], long
    return _Kernel(library.matmul, library.matmul_room)


def _multiply(
    kernel: _Kernel, a: Tensor, b: Tensor, n_columns: int, *, b_is_transposed: bool
) -> Tensor:
    """Return a·b, (..., columns), of contiguous a (..., terms) and of b as it lies in memory."""
    n_terms = a.shape[-1]
    c = a.new_empty(*a.shape[:-1], n_columns)
    room = a.new_empty(kernel.room(n_terms, n_columns, b_is_transposed))
    kernel.matmul(
        a.data_ptr(),
        b.data_ptr(),
        c.data_ptr(),
        room.data_ptr(),
        a.numel() // n_terms,
        n_terms,
        n_columns,
        False,
        b_is_transposed,
        False,
        threads_for(c),
    )
    return c


def _transposed_times(kernel: _Kernel, a: Tensor, b: Tensor, into: Tensor | None) -> Tensor:
    """Return aᵀ·b, or add it to ``into``; all are contiguous."""
    (n_terms, n_rows), n_columns = a.shape, b.shape[1]
    c = b.new_empty(n_rows, n_columns) if into is None else into
    room = b.new_empty(kernel.room(n_terms, n_columns, False))
    kernel.matmul(
        a.data_ptr(),
        b.data_ptr(),
        c.data_ptr(),
        room.data_ptr(),
        n_rows,
        n_terms,
        n_columns,
        True,
        False,
        into is not None,
        threads_for(a),
    )
    return c
