"""x·Wᵀ, for one weight or for several that share x, and the products of its gradients.

training on a CPU      x·Wᵀ and dy·W by C if W is small, which shortens a step by 2 to 5 %, else by
                       oneDNN; dyᵀ·x by C, in 0.65 to 0.95 of the time of torch's product
decoding on a CPU      a C kernel for up to 64 rows: it reads weights as fast as the memory delivers
                       them, and takes half of oneDNN's time for 16 rows, 0.7 for 64
elsewhere              F.linear

With few vector registers oneDNN and torch do all products but those of decoding.

Shapes: N tokens, O output and I input features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.model.kernels.frame import (
    Kernel,
    c_library,
    check_shape,
    is_eligible,
    needs_gradient,
    threads_for,
)
from minillama.model.kernels.library import load
from minillama.model.kernels.torch_private import find_onednn_linear

FEW_ROWS = 64  # with so few, joining the weights would cost more than it gains
SMALL = 1 << 18  # numbers of a weight: with more, oneDNN's products are as fast or faster

_onednn_linear: Any = find_onednn_linear()


def linear(x: Tensor, *weights: Tensor) -> Tensor:
    """Return [x·W₁ᵀ, x·W₂ᵀ, …] joined along the last dimension.

    Args:
        x: (..., in).
        weights: (out₁, in), (out₂, in), …

    Returns:
        (..., out₁ + out₂ + …).

    Raises:
        ValueError: the sizes differ.
    """
    for weight in weights:
        fits = weight.ndim == 2 and x.shape[-1:] == weight.shape[1:]
        check_shape(fits, "x (..., in) and weights (out, in)", x, weight)
    if x.dtype is not torch.float32 or not is_eligible(x, *weights):
        return F.linear(x, _join(weights))
    c = load(x.dtype)
    if needs_gradient(x, *weights):
        y: Tensor = _LINEAR(c, (x, _join(weights)))
        return y
    if c is not None and x.numel() <= FEW_ROWS * x.shape[-1]:
        return _few_rows(c, x.contiguous(), weights)
    return product(x, _join(weights))


def _join(weights: tuple[Tensor, ...]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _few_rows(c: Any, x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    n_in, n_out = x.shape[-1], sum(weight.shape[0] for weight in weights)
    rows = x.numel() // n_in
    y = x.new_empty(*x.shape[:-1], n_out)
    scratch = x.new_empty(FEW_ROWS * n_in if rows > 1 else 0)
    first, threads = 0, torch.get_num_threads()
    for weight in weights:
        n = len(weight)
        c.linear_few_rows(
            x=x,
            w=weight.contiguous(),
            y=y.narrow(-1, first, n),
            scratch=scratch,
            rows=rows,
            n_in=n_in,
            n_out=n,
            stride=n_out,
            threads=threads,
        )
        first += n
    return y


def _forward(
    c: Any, needed: tuple[bool, ...], x: Tensor, weight: Tensor
) -> tuple[Tensor, tuple[()]]:
    return product(x, weight), ()


def _backward(
    c: Any,
    needed: tuple[bool, ...],
    dy: Tensor,
    tensors: tuple[Tensor, Tensor],
    kept: tuple[()],
) -> tuple[Tensor | None, Tensor | None]:
    (x, weight), (for_x, for_weight) = tensors, needed
    dx = product(dy, weight.t()) if for_x else None
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return dx, weight_gradient(dy, x) if for_weight else None


_LINEAR = Kernel(F.linear, _forward, _backward)


# ------------------------------------------------------------------------------------- products


def product(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x·Wᵀ, (..., O), of x (..., I); no gradient is recorded."""
    if x.dtype is not torch.float32 or not is_eligible(x, weight_OI):
        return F.linear(x, weight_OI)
    c = load(x.dtype)
    if (
        c is not None
        and weight_OI.numel() <= SMALL
        and x.shape[-1] == weight_OI.shape[1]
        and c.matmul_pays()
        and ((is_transposed := weight_OI.is_contiguous()) or weight_OI.t().is_contiguous())
    ):
        n_columns, n_terms = weight_OI.shape
        y = x.new_empty(*x.shape[:-1], n_columns)
        n_rows = x.numel() // n_terms
        return matmul(c, x.contiguous(), weight_OI, y, n_rows, n_terms, b=is_transposed)
    if _onednn_linear is None:
        return F.linear(x, weight_OI)
    by_onednn: Tensor = _onednn_linear(x, weight_OI, None, "none", [], "")
    return by_onednn


def weight_gradient(dy_NO: Tensor, x_NI: Tensor, into_OI: Tensor | None = None) -> Tensor:
    """Return dyᵀ·x, (O, I), added to ``into`` and written there if that is given.

    No gradient is recorded.

    Raises:
        ValueError: the sizes differ.
    """
    tensors = [dy_NO, x_NI] if into_OI is None else [dy_NO, x_NI, into_OI]
    fits = all(tensor.ndim == 2 for tensor in tensors) and len(dy_NO) == len(x_NI)
    fits = fits and (into_OI is None or into_OI.shape == (dy_NO.shape[1], x_NI.shape[1]))
    check_shape(fits, "dy (N, out), x (N, in) and the result (out, in)", *tensors)
    is_contiguous = into_OI is None or into_OI.is_contiguous()
    if is_contiguous and (c := c_library(*tensors)) is not None and c.matmul_pays():
        (n_terms, n_rows), n_columns = dy_NO.shape, x_NI.shape[1]
        y = x_NI.new_empty(n_rows, n_columns) if into_OI is None else into_OI
        dy_NO, x_NI = dy_NO.contiguous(), x_NI.contiguous()
        return matmul(c, dy_NO, x_NI, y, n_rows, n_terms, a=True, addend=into_OI)
    if into_OI is None:
        return dy_NO.t() @ x_NI
    if into_OI.dtype is dy_NO.dtype:
        return into_OI.addmm_(dy_NO.t(), x_NI)
    return into_OI.add_(dy_NO.t() @ x_NI)


def matmul(
    c: Any,
    left: Tensor,
    right: Tensor,
    y: Tensor,
    n_rows: int,
    n_terms: int,
    *,
    a: bool = False,
    b: bool = False,
    addend: Tensor | None = None,
) -> Tensor:
    """Write left·right, plus ``addend``, to ``y``, (..., columns), and return it.

    ``a``, ``b``: left, right are transposed.  All are contiguous; ``addend`` may be ``y``.
    """
    n_columns = y.shape[-1]
    c.matmul(
        a=left,
        b=right,
        addend=addend,
        c=y,
        scratch=y.new_empty(c.matmul_scratch(terms=n_terms, columns=n_columns, b_is_transposed=b)),
        rows=n_rows,
        terms=n_terms,
        columns=n_columns,
        a_is_transposed=a,
        b_is_transposed=b,
        threads=threads_for(left.numel() if a else y.numel()),
    )
    return y
