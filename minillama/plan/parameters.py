"""How many parameters a model has, part by part, by arithmetic: nothing of its size is built.

Only the norms are built, one of each kind and width on the meta device, since a norm of the user's
own has as many parameters as it likes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from minillama.config import ModelConfig
from minillama.model.norms import build_norm
from minillama.model.placement import PLACEMENTS, Slots


@dataclass(frozen=True)
class NormSite:
    """Norms of one kind and width: where they stand, over how many features of a token."""

    site: str
    width: int
    heads: int = 1
    """The norm acts on so many rows of ``width`` features a token."""
    rms: bool = False
    """An RMSNorm whatever the model's kind: the norm of queries and keys."""
    of_product: bool = False
    """It reads what a matrix product gave, not the residual stream."""


@dataclass(frozen=True)
class Layout:
    """What stands how often in the model, by its placement.

    Attributes:
        norms: each norm, with how many there are.
        gates: learned numbers a, one a block.
    """

    norms: Counter[NormSite]
    gates: int

    @classmethod
    def of(cls, config: ModelConfig) -> Layout:
        """Read the layout of ``config`` (resolved)."""
        placement = PLACEMENTS.get(config.norm.placement)
        blocks = Counter(
            _kind_of_block(placement.slots(layer + 1, config.n_layers))
            for layer in range(config.n_layers)
        )
        norms: Counter[NormSite] = Counter()
        for (attention, mlp, qkv, _), count in blocks.items():
            for site, (of_stream, of_product) in (("attention", attention), ("mlp", mlp)):
                norms[NormSite(site, config.dim)] += of_stream * count
                norms[NormSite(site, config.dim, of_product=True)] += of_product * count
            for norm in _head_norms(config, qkv):
                norms[norm] += count
        wants_final = config.norm.final_norm
        norms[NormSite("final", config.dim)] += (
            placement.final_norm if wants_final is None else wants_final
        )
        norms[NormSite("embed", config.dim)] += config.norm.embed_norm
        gates = sum(count for (_, _, _, gated), count in blocks.items() if gated)
        return cls(+norms, gates)


_Around = tuple[int, int]
"""Norms of the residual stream and norms of what the sub-layer gives."""


def _kind_of_block(slots: Slots) -> tuple[_Around, _Around, bool, bool]:
    """Return the norms around attention and the MLP, whether q, k, v are normed, and a."""
    attention, mlp = ((s.input + s.residual, +s.output) for s in (slots, slots.mlp or slots))
    return attention, mlp, slots.qkv, slots.gated


def _head_norms(config: ModelConfig, qkv: bool) -> Iterator[NormSite]:
    """Yield the norms inside attention."""
    size, heads, kv_heads = config.head_dim, config.n_heads, config.n_kv_heads
    whole = config.norm.qk_norm == "full"
    if qkv:
        for n in (heads, kv_heads, kv_heads):
            yield NormSite("attention", size, n, of_product=True)
    elif config.norm.qk_norm != "none":
        for n in (heads, kv_heads):
            width, rows = (n * size, 1) if whole else (size, n)
            yield NormSite("attention", width, rows, rms=True, of_product=True)


@dataclass(frozen=True)
class Parameters:
    """Parameters by part; ``head`` is 0 where it shares the embedding's."""

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

    @property
    def blocks(self) -> int:
        """Those in the matrices of all blocks."""
        return self.attention + self.mlp


def block_matrices(config: ModelConfig) -> tuple[int, int]:
    """Return the parameters of the matrices of one block's attention and MLP."""
    heads = 2 * config.n_heads + 2 * config.n_kv_heads  # q, o; k, v
    return config.dim * heads * config.head_dim, 3 * config.dim * config.ffn_dim


def count_parameters(config: ModelConfig) -> Parameters:
    """Count the parameters of ``config`` (resolved) without building it.

    Raises:
        UnknownNameError: the norm or the placement is not registered.
    """
    layout = Layout.of(config)
    attention, mlp = block_matrices(config)
    embedding = config.known_vocab_size * config.dim
    return Parameters(
        embedding=embedding,
        attention=config.n_layers * attention,
        mlp=config.n_layers * mlp,
        norms=sum(count * _of_norm(config, site) for site, count in layout.norms.items()),
        head=0 if config.tie_embeddings else embedding,
        other=layout.gates + (config.embed_scale == "learned"),
    )


def _of_norm(config: ModelConfig, site: NormSite) -> int:
    if site.rms:
        return site.width
    with torch.device("meta"):
        norm = build_norm(config.norm, site.width, site.site)
    return sum(parameter.numel() for parameter in norm.parameters())
