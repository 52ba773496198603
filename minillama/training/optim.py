"""The optimizer: AdamW (Loshchilov 2019, arXiv 1711.05101), gradient clipping, the schedule.

rate                      cosine, linear   fall from the peak over all the remaining steps
 peak ┤   ╭────────╮      constant         keeps the peak
      │  ╱          ╲     wsd              keeps the peak, then falls over the last fifth
  min ┤ ╱            ╲                     (warm-up, stable, decay: Hu 2024, 2404.06395)
      └─┬──┬─────────┬─
        1  warm-up   steps
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minillama.config.run import OptimConfig
from minillama.model.norms import norm_parameter_names

FUSED_DEVICES = ("cpu", "cuda")
"""Where one fused kernel updates all weights; on two CPU cores it takes 0.2 to 0.4 of the time of
the loop over tensors."""

WSD_DECAY = 5
"""``wsd`` falls over the last 1/WSD_DECAY of the run."""


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the decorators that exclude its methods from torch.compile.

    They import torch's compiler at the first call, which takes a second at the start of every run.
    """

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """Return AdamW with weight decay on matrices and none on norms, gains and biases.

    The first group decays: every parameter of two or more dimensions that is no norm's, embeddings
    and the head included (nanoGPT's choice; OLMo 2 excludes its embeddings).  The second group is
    the rest, without decay.  Tied weights are one parameter and count once.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    norms = norm_parameter_names(model)
    for name, parameter in model.named_parameters():
        groups[parameter.ndim >= 2 and name not in norms].append(parameter)
    devices = {parameter.device.type for group in groups.values() for parameter in group}
    return AdamW(
        [
            {"params": groups[True], "weight_decay": config.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=devices <= set(FUSED_DEVICES),
    )


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, of which this rank has a part."""
    return hasattr(tensor, "full_tensor")  # importing DTensor to ask for it takes half a second


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor``, gathered from all ranks if it is sharded; then all of them must call."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``; all of it if it is not sharded."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all ``tensors`` together; sharded and whole ones may be mixed."""
    norms = [nn.utils.get_total_norm(kind) for kind in _by_kind(tensors) if kind]
    whole = [whole_tensor(norm) for norm in norms]
    if len(whole) < 2:
        return whole[0] if whole else torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(whole))
    return norm


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients together so that their norm is at most ``max_norm``; 0: leave them.

    Returns the L2 norm of all gradients before clipping.  Reading it is the only wait for the
    device; the gradients are read a second time only if they are too long.
    """
    parameters = [p for p in parameters if p.grad is not None]
    total = total_norm([p.grad for p in parameters if p.grad is not None])
    norm = total.item()
    if max_norm and norm > max_norm:
        for kind in _by_kind(parameters):
            nn.utils.clip_grads_with_norm_(kind, max_norm, total)
    return norm


def _by_kind(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sharded tensors and the whole ones, which torch cannot reduce in one call."""
    kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
    for tensor in tensors:
        kinds[0 if is_sharded(tensor) else 1].append(tensor)
    return kinds


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """Return the learning rate of update ``step``, which counts from 1 to ``steps``.

    The warm-up is linear, ``lr · step / warmup_steps``, and reaches the peak at its last step;
    without one the first step has the peak.  The last step has ``lr · min_lr_ratio`` exactly,
    except with ``constant`` or where the warm-up fills the run.

    Raises:
        ValueError: ``step`` is outside the run.
    """
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is not in 1 … {steps}")
    peak, last = config.lr, config.lr * config.min_lr_ratio
    warmup = max(1, config.warmup_steps)
    if step <= warmup:
        return peak * (step / warmup)
    if config.schedule == "constant":
        return peak
    start = warmup
    if config.schedule == "wsd":
        start = max(warmup, steps - max(1, steps // WSD_DECAY))
        if step <= start:
            return peak
    t = (step - start) / (steps - start)
    share = 0.5 * (1 + math.cos(math.pi * t)) if config.schedule == "cosine" else 1 - t
    return last + (peak - last) * share
