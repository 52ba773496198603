"""AdamW (Loshchilov 2019, arXiv 1711.05101) in two groups, and the clipping of its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minillama.config.run import OptimConfig
from minillama.model.transformer import is_norm_parameter

FUSED_DEVICES = ("cpu", "cuda")
"""Where one fused kernel updates all weights; on two CPU cores it takes 0.2 to 0.4 of the time of
the loop over tensors."""


class AdamW(torch.optim.AdamW):
    """torch's, except that no method tells torch.compile to keep out.

    To tell it, torch imports its compiler at the first call: a second at the start of every run.
    """

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """Return AdamW with weight decay on matrices and none on norms, gains and biases.

    The first group decays: every parameter of two or more dimensions that is no norm's, embeddings
    and the head included (nanoGPT's choice; OLMo 2 spares its embeddings).  The second does not:
    all the rest.  Tied weights are one parameter and count once.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim >= 2 and not is_norm_parameter(name)].append(parameter)
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


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients together so that their norm is at most ``max_norm``; 0: leave them.

    Returns the L2 norm of all gradients as it was before.  Reading it is the one wait for the
    device; the gradients are passed over a second time only where they are too long.
    """
    parameters = [p for p in parameters if p.grad is not None]
    total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = total.item()
    if max_norm and norm > max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return norm
