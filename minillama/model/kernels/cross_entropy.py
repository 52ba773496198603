"""Cross-entropy of x·Wᵀ that never holds all logits, nor a gradient of their size.

Rows of x go through in chunks: logits, loss, the gradient written over the logits, and at once the
gradients for x and W (Wijmans 2024, "Cut Your Losses"; Hsu 2024, Liger kernels).  So the forward
pass does the work of both, and the backward pass multiplies by one number.

Shapes: N tokens, R of them in a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.model.kernels.frame import Kernel, c_library, check_shape, is_plain, threads_for
from minillama.model.kernels.linear import product, weight_gradient
from minillama.model.kernels.torch_private import is_watched

IGNORED = -100
"""A target that does not count."""

CHUNK_NUMBERS = 1 << 19  # logits in a chunk: about what a core's cache holds …
CHUNK_ROWS = 256  # … but no fewer rows, since each chunk reads all of W


class LossOptions(NamedTuple):
    """What is added to plain cross-entropy."""

    z_loss: float = 0.0
    """Weight of (log Z)² (Chowdhery 2022, PaLM)."""
    softcap: float | None = None
    """c: the logits l become c·tanh(l / c) (Gemma 2)."""


_PLAIN = LossOptions()


def linear_cross_entropy_reference(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, options: LossOptions = _PLAIN
) -> tuple[Tensor, Tensor]:
    """Return the sums of −log p(target) + z_loss·(log Z)², and of −log p(target) alone.

    Sums are over the targets that are not −100, p = softmax(x·Wᵀ), in nats; at least float32.

    Args:
        x_ND: the head's input.
        weight_VD: the head.
        targets_N: int64, in 0 … V − 1 or −100.
        options: z-loss and soft-cap.
    """
    return logits_cross_entropy(F.linear(x_ND, weight_VD), targets_N, options)


def logits_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, options: LossOptions = _PLAIN
) -> tuple[Tensor, Tensor]:
    """Return the sums of :func:`linear_cross_entropy_reference`, of logits before the soft-cap."""
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
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, options: LossOptions = _PLAIN
) -> tuple[Tensor, Tensor]:
    """Do what :func:`linear_cross_entropy_reference` does, in chunks; the second has no gradient.

    Raises:
        IndexError: a target is out of range.
        TypeError: the targets are not int64.
        ValueError: the sizes differ.
    """
    fits = (
        x_ND.ndim == weight_VD.ndim == 2
        and x_ND.shape[1] == weight_VD.shape[1]
        and targets_N.shape == x_ND.shape[:1]
    )
    check_shape(fits, "x (N, D), the weight (V, D) and targets (N,)", x_ND, weight_VD, targets_N)
    if targets_N.dtype is not torch.int64:
        raise TypeError(f"targets are {targets_N.dtype}; convert them to torch.int64 (.long())")
    if torch.compiler.is_compiling() or is_watched() or x_ND.is_meta:
        objective, cross_entropy = linear_cross_entropy_reference(
            x_ND, weight_VD, targets_N, options
        )
        return objective, cross_entropy.detach()
    device = x_ND.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_ND, weight_VD = x_ND.to(dtype), weight_VD.to(dtype)
    sums: tuple[Tensor, Tensor] = _CROSS_ENTROPY(None, (x_ND, weight_VD, targets_N), options)
    return sums


def _forward(
    c: None,
    needed: tuple[bool, ...],
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    options: LossOptions,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]:
    """Return both sums; keep the gradients of the first for x and W."""
    for_x, for_weight, _ = needed or (False, False, False)
    grad_x = torch.empty_like(x_ND) if for_x else None
    wide = torch.promote_types(weight_VD.dtype, torch.float32)  # for a sum over chunks
    grad_weight = torch.zeros_like(weight_VD, dtype=wide) if for_weight else None
    sums = _in_chunks(x_ND, weight_VD, targets_N, options, grad_x, grad_weight)
    return sums, (grad_x, grad_weight)


def _backward(
    c: None,
    needed: tuple[bool, ...],
    scale: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    kept: tuple[Tensor | None, Tensor | None],
    options: LossOptions,
) -> tuple[Tensor | None, Tensor | None, None]:
    (_, weight_VD, _), (grad_x, grad_weight) = tensors, kept
    return (
        None if grad_x is None else grad_x * scale.to(grad_x.dtype),
        None if grad_weight is None else (grad_weight * scale).to(weight_VD.dtype),
        None,
    )


_CROSS_ENTROPY = Kernel(linear_cross_entropy_reference, _forward, _backward)


def _in_chunks(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    options: LossOptions,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return both sums; fill in the gradients that are given (the weight's is added to)."""
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
    """Return each row's −log p(target) and log Z; its gradient replaces the logits."""
    if c := c_library(logits_RV, others=(targets_R,), under_autocast=True):
        loss_R, log_z_R = logits_RV.new_empty(2, len(logits_RV))
        rows, dim = logits_RV.shape
        status = c.cross_entropy(
            logits=logits_RV,
            targets=targets_R.contiguous(),
            loss=loss_R,
            log_z=log_z_R,
            rows=rows,
            dim=dim,
            ignored=IGNORED,
            z_loss=z_loss,
            with_gradient=with_gradient,
            threads=threads_for(logits_RV.numel()),
        )
        if status != 0:
            raise _out_of_range(logits_RV)
        return loss_R, log_z_R
    counted_R = targets_R != IGNORED
    if is_plain(logits_RV, targets_R) and bool(
        (counted_R & ((targets_R < 0) | (targets_R >= logits_RV.shape[1]))).any()
    ):
        raise _out_of_range(logits_RV)
    place_R1 = targets_R.where(counted_R, 0)[:, None]
    log_z_R = logits_RV.logsumexp(-1)
    loss_R = (log_z_R - logits_RV.gather(1, place_R1)[:, 0]).where(counted_R, 0)
    if with_gradient:
        logits_RV.sub_(log_z_R[:, None]).exp_()
        logits_RV.mul_((1 + 2 * z_loss * log_z_R)[:, None])
        logits_RV.masked_fill_(~counted_R[:, None], 0)  # where it may be NaN, times 0 is not zero
        logits_RV.scatter_add_(1, place_R1, -counted_R[:, None].to(logits_RV.dtype))
    return loss_R, log_z_R.where(counted_R, 0)


def _out_of_range(logits_RV: Tensor) -> IndexError:
    return IndexError(f"a target is neither {IGNORED} nor below {logits_RV.shape[1]}")
