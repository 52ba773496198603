"""How many parameters a model has, part by part.

One block of each kind that the placement has is built on the meta device, where nothing of its size
is allocated; so norms of the user's own are counted as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from minillama.config import ModelConfig
from minillama.config.placement import PLACEMENTS, Slots
from minillama.errors import ConfigError
from minillama.model.norms import build_norm, norm_parameter_names
from minillama.model.transformer import Block


@dataclass(frozen=True)
class Parameters:
    """Parameters by part; ``head`` is 0 where it is the embedding."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int
    other: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(vars(self).values())


def block_matrices(config: ModelConfig) -> tuple[int, int]:
    """Return the parameters of the matrices of one block's attention and MLP."""
    heads = 2 * config.n_heads + 2 * config.n_kv_heads  # q, o; k, v
    gates = {"none": 0, "head": 1, "element": config.head_dim}[config.attention_gate]
    attention = config.dim * (heads * config.head_dim + config.n_heads * gates)
    return attention, 3 * config.dim * config.ffn_dim


def layer_kinds(config: ModelConfig) -> list[tuple[int, int]]:
    """Return one layer, from 0, of each kind that the placement has, and how many there are."""
    placement = PLACEMENTS.get(config.norm.placement)
    layers: dict[Slots | None, list[int]] = {}
    for layer in range(config.n_layers):
        slots = _without_scales(placement.slots(layer, config.n_layers))
        layers.setdefault(slots, []).append(layer)
    return [(same[0], len(same)) for same in layers.values()]


def _without_scales(slots: Slots | None) -> Slots | None:
    """Replace scales, which differ from layer to layer, by 0 or 1: whether there is one."""
    if slots is None:
        return None
    s, alpha = float(slots.s != 1), float(slots.alpha != 1)
    return replace(slots, s=s, alpha=alpha, output_gain=1.0, mlp=_without_scales(slots.mlp))


def count_parameters(config: ModelConfig) -> Parameters:
    """Count the parameters of ``config`` without allocating them.

    Raises:
        ConfigError: a size is beyond any tensor.
        UnknownNameError: the norm or the placement is not registered.
    """
    parts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head", "other"), 0)

    try:
        with torch.device("meta"):
            for layer, times in layer_kinds(config):
                block = Block(config, layer)
                norms = norm_parameter_names(block)
                for name, parameter in block.named_parameters():
                    module = "norms" if name in norms else name.split(".")[0]
                    parts[module if module in parts else "other"] += times * parameter.numel()
            for site in _norms_around_blocks(config):
                norm = build_norm(config.norm, config.dim, site)
                parts["norms"] += sum(parameter.numel() for parameter in norm.parameters())
    except RuntimeError as error:  # more numbers than 64 bits can count
        raise ConfigError(f"model: too large for any machine ({error})") from None
    parts["embedding"] = config.known_vocab_size * config.dim
    parts["head"] = 0 if config.tie_embeddings else parts["embedding"]
    parts["other"] += config.embed_scale == "learned"
    if PLACEMENTS.get(config.norm.placement).unit_weights:
        parts["other"] += config.known_vocab_size  # a scale for each logit
    return Parameters(**parts)


def _norms_around_blocks(config: ModelConfig) -> list[str]:
    norm = config.norm
    has_final = norm.final_norm
    if has_final is None:
        has_final = PLACEMENTS.get(norm.placement).final_norm
    return ["embed"] * norm.embed_norm + ["final"] * has_final
