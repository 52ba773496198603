"""Decoding with a KV cache: the logits behind one more token of each row.

Shapes: B batch, V vocabulary, D width, K features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minillama.model.attention import Attention
from minillama.model.kernels import FusedDecoder, Layer
from minillama.model.kv_cache import KVCache
from minillama.model.mlp import MLP
from minillama.model.norms import RMSNorm
from minillama.model.projection import are_plain, is_hooked
from minillama.model.transformer import Block, Transformer


class Decoder:
    """Reads one token of each row into ``cache`` and returns the logits after it.

    A plain pre-norm Llama on a CPU takes all its blocks in one call of the C kernel; any other
    model reads as it trains.

    Args:
        model: only its weights may change while this is used, and only in place.
        cache: with the tokens before; its rows must not change either.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._shifted: list[tuple[Tensor, Tensor]] = []  # gains 1 + w, each with its w
        self._fused = _fused(model, cache, self._shifted)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return logits (B, V), which the next call may overwrite."""
        model, cache = self._model, self._cache
        ids_B = torch.tensor(tokens, device=model.embed.weight.device)
        if self._fused is None:
            return model.head(model.hidden(ids_B[:, None], cache)[:, -1])
        x_BD = model.embed.weight[ids_B] * model.fixed_embed_scale
        if model.embed_scale is not None:
            x_BD *= model.embed_scale
        rotation = model.rope(cache.positions(1), x_BD.dtype)
        for gain, weight in self._shifted:  # weights may be changed in place between two tokens
            torch.add(weight, 1, out=gain)
        logits_BV = self._fused.read(x_BD, rotation, cache.length)
        if model.logit_factor != 1:
            logits_BV = model.logit_factor * logits_BV
        cache.advance(1)
        cap = model.config.logit_softcap
        return cap * torch.tanh(logits_BV / cap) if cap else logits_BV


def _fused(
    model: Transformer, cache: KVCache, shifted: list[tuple[Tensor, Tensor]]
) -> FusedDecoder | None:
    """Return the blocks for the C kernel; None if it does not support them.

    Gains that are not a norm's weight itself are added to ``shifted``, with the weight.
    """
    if (
        any(map(is_hooked, model.modules()))
        or type(model) is not Transformer
        or type(model.embed) is not nn.Embedding
        or model.embed.max_norm is not None
        or type(model.embed_norm) is not nn.Identity
        or not model.head_is_plain
    ):
        return None
    layers, eps = [], model.config.norm.eps
    for block in model.blocks:
        layer = _layer(block, cache, eps, shifted)
        if layer is None:
            return None
        layers.append(layer)
    gain = _gain(model.final_norm, cache.k_LBGSK.dtype, eps, shifted)
    head = model.head_weight.detach()
    if gain is None or not FusedDecoder.fits(layers, gain, head, cache.pad_B):
        return None
    return FusedDecoder(layers, gain, head, eps, cache.pad_B)


def _layer(
    block: nn.Module, cache: KVCache, eps: float, shifted: list[tuple[Tensor, Tensor]]
) -> Layer | None:
    if type(block) is not Block:
        return None
    attention, mlp = block.attention, block.mlp
    if type(attention) is not Attention or type(mlp) is not MLP:
        return None
    around = (
        block.attention_output_norm,
        block.attention_residual_norm,
        block.mlp_output_norm,
        block.mlp_residual_norm,
    )
    attention_norms = (attention.q_norm, attention.k_norm, attention.v_norm)
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    projections += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    dtype = cache.k_LBGSK.dtype
    attention_gain = _gain(block.attention_input_norm, dtype, eps, shifted)
    mlp_gain = _gain(block.mlp_input_norm, dtype, eps, shifted)
    if (
        attention_gain is None
        or mlp_gain is None
        or not all(type(norm) is nn.Identity for norm in around)
        or not are_plain(*projections)
        or not all(type(norm) is nn.Identity for norm in attention_norms)
        or attention.g_proj is not None
        or (block.s, block.alpha, block.a, block.output_scale) != (1, 1, None, 1)
    ):
        return None
    q, k, v, o, gate, up, down = (projection.weight.detach() for projection in projections)
    keys, values = cache.k_LBGSK[attention.layer], cache.v_LBGSK[attention.layer]
    return Layer(attention_gain, q, k, v, o, mlp_gain, gate, up, down, keys, values)


def _gain(
    norm: nn.Module, dtype: torch.dtype, eps: float, shifted: list[tuple[Tensor, Tensor]]
) -> Tensor | None:
    """Return the gain of an RMSNorm with this ε over all features; None for any other norm."""
    if type(norm) is not RMSNorm or norm.n_measured < norm.dim or norm.bias is not None:
        return None
    if norm.eps != eps:  # a norm that was put in after the model was built
        return None
    if norm.weight is None:
        return torch.ones(norm.dim, dtype=dtype)
    weight = norm.weight.detach()
    if not norm.unit_offset:
        return weight
    gain = 1 + weight
    shifted.append((gain, weight))
    return gain
