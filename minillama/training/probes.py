"""Measurements inside the model at one step, layer by layer.

    residual_rms          √mean x² of the block's output x
    kurtosis              mean_j s_j⁴ / (mean_j s_j²)², s_j² the mean over tokens of x_j²:
                          1 where all features are equally large, D where one has everything
    attention_logit_max   largest |q·k| / √K that the causal mask lets through
    attention_entropy     −Σ p log p in nats, mean over heads and positions
    saturation            share of the features that the block's DyT and Derf norms squash nearly
                          flat, |α·x| > 2 (Verma 2026, 2604.23434); only where there are such norms
    grad_rms              √mean g² over the block's parameters, before clipping
    update_ratio          ‖Δθ‖ / ‖θ‖ over the block's parameters, decay included
    output: log_z_sq      mean (log Z)² of the softmax over the vocabulary

All but grad_rms and update_ratio are read by hooks in a separate forward pass, over a few windows
and without gradients.  The training pass is not touched, so it keeps every bit, compiled or not.

Shapes: B windows, T positions, R some of them, D width, H query heads, G key heads, K features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minillama.model.attention import Attention
from minillama.model.norms import Derf, DyT
from minillama.model.transformer import Transformer
from minillama.training.optim import total_norm

WINDOWS = 2
"""The extra forward pass reads this many windows of the batch."""

SATURATED = 2.0
"""|α·x| from which a tanh counts as saturated: there it is above 0.96, and its slope below 0.07."""

_LOGITS_AT_ONCE = 1 << 22  # bounds the memory that attention's logits take

Probe = dict[str, dict[str, float]]


class StepProbe:
    """Measures one training step: its activations, its gradients, its update.

    Reads the activations at once, in a forward pass over the first windows of ``tokens_BT``: before
    the training pass, because FSDP keeps the gathered weights until the next backward pass, which
    must not come after the update.
    """

    @torch.no_grad()
    def __init__(self, model: Transformer, tokens_BT: Tensor) -> None:
        self._model = model
        self._before = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._measured = _activations(model, tokens_BT[:WINDOWS])

    @torch.no_grad()
    def before_update(self) -> None:
        """Read the gradients, before they are clipped."""
        for name, block in _blocks(self._model):
            gradients = [p.grad for p in block.parameters() if p.grad is not None]
            count = sum(gradient.numel() for gradient in gradients)
            norm = total_norm(gradients)
            self._measured[name]["grad_rms"] = norm / math.sqrt(max(1, count))

    @torch.no_grad()
    def after_update(self) -> Probe:
        """Return all measurements by ``layer_0``, ``layer_1``, … and ``output``."""
        for index, (name, block) in enumerate(_blocks(self._model)):
            before = {n: self._before[f"blocks.{index}.{n}"] for n, _ in block.named_parameters()}
            change = [p.detach() - before[n] for n, p in block.named_parameters()]
            size = total_norm(before.values())
            self._measured[name]["update_ratio"] = total_norm(change) / size
        return _numbers(self._measured)


def _blocks(model: Transformer) -> list[tuple[str, nn.Module]]:
    return [(f"layer_{index}", block) for index, block in enumerate(model.blocks)]


def _activations(model: Transformer, tokens_BT: Tensor) -> dict[str, dict[str, Tensor]]:
    measured: dict[str, dict[str, Tensor]] = {}
    handles = []
    for name, block in _blocks(model):
        layer = measured[name] = {}
        attention = block.attention
        assert isinstance(attention, Attention)
        handles.append(attention.register_forward_pre_hook(_attention_hook(layer)))
        handles.append(block.register_forward_hook(_residual_hook(layer)))
        squashing = [module for module in block.modules() if isinstance(module, DyT | Derf)]
        for norm in squashing:
            hook = _saturation_hook(layer, len(squashing))
            handles.append(norm.register_forward_pre_hook(hook))
    try:
        log_z_BT = model(tokens_BT).float().logsumexp(-1)
    finally:
        for handle in handles:
            handle.remove()
    return {**measured, "output": {"log_z_sq": log_z_BT.square().mean()}}


def _residual_hook(layer: dict[str, Tensor]) -> Callable[[nn.Module, Any, Tensor], None]:
    def hook(block: nn.Module, args: Any, x_BTD: Tensor) -> None:
        s2_D = x_BTD.float().square().mean((0, 1))
        layer["residual_rms"] = s2_D.mean().sqrt()
        layer["kurtosis"] = s2_D.square().mean() / s2_D.mean().square()

    return hook


def _saturation_hook(layer: dict[str, Tensor], n_norms: int) -> Callable[[nn.Module, Any], None]:
    """Add one norm's share of saturated features to the mean over the ``n_norms`` of a block."""

    def hook(norm: nn.Module, args: Any) -> None:
        assert isinstance(norm, DyT | Derf)
        share = (norm.argument(args[0]).abs() > SATURATED).float().mean()
        layer["saturation"] = layer.get("saturation", torch.zeros_like(share)) + share / n_norms

    return hook


def _attention_hook(layer: dict[str, Tensor]) -> Callable[[nn.Module, Any], None]:
    def hook(attention: nn.Module, args: Any) -> None:
        assert isinstance(attention, Attention)
        x_BTD, rotation = args[:2]
        q_BHTK, k_BGTK, _ = attention.qkv(x_BTD, rotation)
        group = attention.n_heads // attention.n_kv_heads
        k_BHTK = k_BGTK.repeat_interleave(group, dim=1)
        maximum, entropy = _attention_extremes(q_BHTK.float(), k_BHTK.float())
        layer["attention_logit_max"], layer["attention_entropy"] = maximum, entropy

    return hook


def _attention_extremes(q_BHTK: Tensor, k_BHTK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest unmasked |logit| and the mean entropy, a bounded part at a time."""
    n_heads, n_tokens, head_dim = q_BHTK.shape[1:]
    rows = max(1, _LOGITS_AT_ONCE // (n_heads * n_tokens))
    position_T = torch.arange(n_tokens, device=q_BHTK.device)
    maxima, entropies = [], []
    for q_HTK, k_HTK in zip(q_BHTK, k_BHTK, strict=True):
        for start in range(0, n_tokens, rows):
            logits_HRT = q_HTK[:, start : start + rows] @ k_HTK.mT / math.sqrt(head_dim)
            hidden_RT = position_T > position_T[start : start + rows, None]
            maxima.append(logits_HRT.abs().masked_fill(hidden_RT, 0).max())
            log_p_HRT = logits_HRT.masked_fill(hidden_RT, -math.inf).log_softmax(-1)
            # p·log p is 0 where p is 0; there log p is −∞, which would make it NaN.
            entropy_HR = -(log_p_HRT.exp() * log_p_HRT.masked_fill(hidden_RT, 0)).sum(-1)
            entropies.append(entropy_HR.sum())
    n_rows = q_BHTK.shape[0] * n_heads * n_tokens
    return torch.stack(maxima).max(), torch.stack(entropies).sum() / n_rows


def _numbers(measured: dict[str, dict[str, Tensor]]) -> Probe:
    """Copy all values from the device in one transfer."""
    keys = [(group, name) for group, values in measured.items() for name in values]
    values = torch.stack([measured[group][name].float() for group, name in keys]).tolist()
    probe: Probe = {group: {} for group in measured}
    for (group, name), value in zip(keys, values, strict=True):
        probe[group][name] = value
    return probe
