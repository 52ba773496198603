"""How initial weights, rates and outputs change with the size of a model.

``standard`` changes the initial weights alone.  ``mup``, the maximal update parametrization (Yang
2022, arXiv 2203.03466, table 8, for Adam), lets a learning rate that is best at one width be best
at every width.  With a base depth it follows CompleteP too (Dey 2025, arXiv 2505.01618, α = 1),
which does the same for depth.  With m = dim / base_dim and n = n_layers / base_n_layers (1 if
there is no base depth):

                    initial std     rate     weight decay   Adam's ε     output
    embed           as at the base  η        λ              ε / m
    head            as at the base  η        λ              ε / m        logits / m
    hidden          base / √m       η / m    λ · m          ε / (m·n)    of a sub-layer / n
    gains, others   1, …            η        as standard    ε / (m·n), outside of blocks ε / m

All sizes of a model are to grow with its width: heads or their features, and the MLP.  With
``base_head_dim`` attention's logits are q·k / K, times √base_head_dim, in place of q·k / √K: for
models whose heads grow wider.  At the base all of this is the standard parametrization, to the bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from minillama.config import ModelConfig
from minillama.model.roles import Role


class GroupFactors(NamedTuple):
    """What the optimizer's settings are multiplied with, for one group of parameters."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


def width_ratio(config: ModelConfig) -> float:
    """Return m: the width over the base width; 1 in the standard parametrization."""
    return config.dim / config.mup.base_dim if config.parametrization == "mup" else 1.0


def depth_ratio(config: ModelConfig) -> float:
    """Return n: the depth over the base depth; 1 where depth changes nothing."""
    base = config.mup.base_n_layers
    return 1.0 if config.parametrization == "standard" or base is None else config.n_layers / base


def attention_factor(config: ModelConfig) -> float:
    """Return the factor of q·k / √K."""
    base = config.mup.base_head_dim
    if config.parametrization == "standard" or base is None:
        return 1.0
    return math.sqrt(base / config.head_dim)


def group_factors(config: ModelConfig, role: Role, *, in_block: bool) -> GroupFactors:
    """Return the factors of one group of parameters."""
    m, n = width_ratio(config), depth_ratio(config)
    eps = 1 / (m * n) if in_block else 1 / m
    return GroupFactors(1 / m, m, eps) if role == "hidden" else GroupFactors(eps=eps)


def initial_std(config: ModelConfig, name: str, fan_in: int) -> float:
    """Return the standard deviation of a matrix's initial weights, before any placement's divisor.

    Args:
        config: of the model.
        name: of the parameter.
        fan_in: its columns; those of an embedding are the model's width.
    """
    m = width_ratio(config)
    outside = name in ("embed.weight", "lm_head.weight")
    if config.init == "fan_in":
        return math.sqrt(m if outside else 1.0) * float(fan_in**-0.5)
    std = 0.02 if outside else 0.02 / math.sqrt(m)
    if config.init == "normal" and name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * config.n_layers / depth_ratio(config))
    return std
