"""Cross-entropy of x·Wᵀ that never holds all logits, nor a gradient of their size.

Rows of x go through in chunks: logits, loss, the gradient in the logits' place, and at once what
that gives for x and W (Wijmans 2024, "Cut Your Losses"; Hsu 2024, Liger kernels).  So the forward
pass does the work of both, and the backward pass multiplies by one number.

Shapes: N tokens, R of them in a chunk, D width, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from minillama.model.kernels.compiled import load_library
from minillama.model.kernels.dispatch import (
    differentiable_gradients,
    is_plain,
    needs_gradient,
    threads_for,
)
from minillama.model.kernels.matmul import product, weight_gradient

IGNORED = -100
"""A target that does not count."""

CHUNK_NUMBERS = 1 << 19  # logits in a chunk: about what a core's cache holds …
CHUNK_ROWS = 256  # … but no fewer rows, since each chunk reads all of W


class Options(NamedTuple):
    """What is added to plain cross-entropy."""

    z_loss: float = 0.0
    """Weight of (log Z)² (Chowdhery 2022, PaLM)."""
    softcap: float | None = None
    """c: the logits l become c·tanh(l / c) (Gemma 2)."""


_PLAIN = Options()


def linear_cross_entropy_reference(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, options: Options = _PLAIN
) -> tuple[Tensor, Tensor]:
    """Return the sums of −log p(target) + z_loss·(log Z)², and of −log p(target) alone.

    Sums are over the targets that are not −100, p = softmax(x·Wᵀ), in nats; at least float32.

    Args:
        x_ND: what the head reads.
        weight_VD: the head.
        targets_N: int64, in 0 … V − 1 or −100.
        options: z-loss and soft-cap.
    """
    logits_NV = F.linear(x_ND, weight_VD)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if options.softcap:
        logits_NV = options.softcap * torch.tanh(logits_NV / options.softcap)
    cross_entropy = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")
    if not options.z_loss:
        return cross_entropy, cross_entropy
    log_z_N = logits_NV.logsumexp(-1)
    z = (log_z_N.square() * (targets_N != IGNORED)).sum()
    return cross_entropy + options.z_loss * z, cross_entropy


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, options: Options = _PLAIN
) -> tuple[Tensor, Tensor]:
    """Do what :func:`linear_cross_entropy_reference` does, in chunks; the second has no gradient.

    Raises:
        IndexError: a target is out of range.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        objective, cross_entropy = linear_cross_entropy_reference(
            x_ND, weight_VD, targets_N, options
        )
        return objective, cross_entropy.detach()
    device = x_ND.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_ND, weight_VD = x_ND.to(dtype), weight_VD.to(dtype)
    if needs_gradient(x_ND, weight_VD):
        return cast(
            tuple[Tensor, Tensor],
            _apply(x_ND, weight_VD, targets_N, options),
        )
    return _in_chunks(x_ND, weight_VD, targets_N, options, None, None)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, options: Options
    ) -> tuple[Tensor, Tensor]:
        for_x, for_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_ND) if for_x else None
        wide = torch.promote_types(weight_VD.dtype, torch.float32)  # for a sum over chunks
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if for_weight else None
        objective, cross_entropy = _in_chunks(
            x_ND, weight_VD, targets_N, options, grad_x, grad_weight
        )
        ctx.save_for_backward(x_ND, weight_VD, targets_N, grad_x, grad_weight)
        ctx.options = options
        ctx.mark_non_differentiable(cross_entropy)
        return objective, cross_entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_VD, targets_N, grad_x, grad_weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated

            def plain(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
                return linear_cross_entropy_reference(x_ND, weight_VD, targets_N, ctx.options)[0]

            return *differentiable_gradients(plain, [x_ND, weight_VD], grads[0]), None, None
        scale = grads[0]
        return (
            None if grad_x is None else grad_x * scale.to(grad_x.dtype),
            None if grad_weight is None else (grad_weight * scale).to(weight_VD.dtype),
            None,
            None,
        )


_apply: Any = _LinearCrossEntropy.apply


def _in_chunks(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    options: Options,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return both sums; where a gradient is wanted, fill it in (the weight's: add to it)."""
    n_tokens, (n_vocab, _) = len(x_ND), weight_VD.shape
    rows = max(1, CHUNK_ROWS, CHUNK_NUMBERS // n_vocab)
    with_gradient = grad_x is not None or grad_weight is not None
    losses, squares = [], []
    for start in range(0, n_tokens, rows):
        x_RD, targets_R = x_ND[start : start + rows], targets_N[start : start + rows]
        logits_RV = product(x_RD, weight_VD)
        logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
        slope_RV = None
        if options.softcap:
            capped_RV = torch.tanh(logits_RV / options.softcap)
            logits_RV, slope_RV = options.softcap * capped_RV, 1 - capped_RV.square()
        loss_R, log_z_R = _loss_and_gradient_(logits_RV, targets_R, options.z_loss, with_gradient)
        losses.append(loss_R)
        squares.append(log_z_R.square())
        if not with_gradient:
            continue
        if slope_RV is not None:
            logits_RV *= slope_RV
        grad_RV = logits_RV.to(x_ND.dtype)
        if grad_x is not None:
            grad_x[start : start + rows] = product(grad_RV, weight_VD.t())
        if grad_weight is not None:
            weight_gradient(grad_RV, x_RD, grad_weight)
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    zero = x_ND.new_zeros((), dtype=wide)
    cross_entropy = torch.cat(losses).sum() if losses else zero
    if not options.z_loss:
        return cross_entropy, cross_entropy.clone()
    z = torch.cat(squares).sum() if squares else zero
    return cross_entropy + options.z_loss * z, cross_entropy


def _loss_and_gradient_(
    logits_RV: Tensor, targets_R: Tensor, z_loss: float, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return each row's −log p(target) and log Z; its gradient takes the place of the logits."""
    plain = is_plain(logits_RV, targets_R)
    if plain and (kernel := _load(logits_RV.dtype)):
        targets_R = targets_R.contiguous()
        loss_R, log_z_R = logits_RV.new_empty(2, len(logits_RV))
        status = kernel(
            logits_RV.data_ptr(),
            targets_R.data_ptr(),
            loss_R.data_ptr(),
            log_z_R.data_ptr(),
            *logits_RV.shape,
            IGNORED,
            z_loss,
            with_gradient,
            threads_for(logits_RV),
        )
        if status != 0:
            raise _out_of_range(logits_RV)
        return loss_R, log_z_R
    counted_R = targets_R != IGNORED
    if plain and bool((counted_R & ((targets_R < 0) | (targets_R >= logits_RV.shape[1]))).any()):
        raise _out_of_range(logits_RV)
    place_R1 = targets_R.where(counted_R, 0)[:, None]
    log_z_R = logits_RV.logsumexp(-1)
    loss_R = (log_z_R - logits_RV.gather(1, place_R1)[:, 0]).where(counted_R, 0)
    if with_gradient:
        logits_RV.sub_(log_z_R[:, None]).exp_()
        logits_RV.mul_((1 + 2 * z_loss * log_z_R)[:, None])
        logits_RV.masked_fill_(~counted_R[:, None], 0)  # where it may be NaN, times 0 is no zero
        logits_RV.scatter_add_(1, place_R1, -counted_R[:, None].to(logits_RV.dtype))
    return loss_R, log_z_R.where(counted_R, 0)


def _out_of_range(logits_RV: Tensor) -> IndexError:
    return IndexError(f"a target is neither {IGNORED} nor below {logits_RV.shape[1]}")


@functools.cache
def _load(dtype: torch.dtype) -> Any:
    library = load_library("cross_entropy", dtype)
    if library is None:
        return None
    pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    library.cross_entropy.argtypes = [
        *[pointer] * 4,
        *[long] * 3,
        ctypes.c_double,
        integer,
        integer,
    ]
    return library.cross_entropy
