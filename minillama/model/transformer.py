"""The Llama transformer (Touvron 2023, arXiv 2302.13971), in one screen.

    tokens ─▶ embed ─▶ [ attention ─▶ mlp ] × n_layers ─▶ final_norm ─▶ head ─▶ logits

with each sub-layer between the norms that its placement has (:mod:`minillama.config.placement`).

Shapes: B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minillama.arguments import check_type, whole_number
from minillama.config import ModelConfig
from minillama.config.placement import PLACEMENTS
from minillama.formatting import html_table
from minillama.model.attention import Attention, fused_attention
from minillama.model.kernels import (
    IGNORED,
    LossOptions,
    linear,
    linear_cross_entropy,
    logits_cross_entropy,
)
from minillama.model.kv_cache import KVCache
from minillama.model.mlp import MLP, fused_mlp
from minillama.model.ngpt import LearnedScale, normalise_weights, scale_rows
from minillama.model.norms import build_norm, multiply_gain, norm_parameter_names, plain_gain
from minillama.model.parametrization import (
    attention_factor,
    depth_ratio,
    initial_std,
    width_ratio,
)
from minillama.model.projection import are_identities, are_plain
from minillama.model.rope import RotaryEmbedding, Rotation


class Block(nn.Module):
    """Attention, then MLP: x ← residual_norm(α·x + a·output_norm(f(s·input_norm(x)))) for each f.

    The placement determines which of the norms exist and what s, α and a are; where x is
    interpolated (nGPT), α = 1 − a with an a for each sub-layer.  A parametrization may set a too.
    """

    a: nn.Parameter | None
    attention_step: LearnedScale | None
    mlp_step: LearnedScale | None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        slots = PLACEMENTS.get(config.norm.placement).slots(layer, config.n_layers)
        around_mlp = slots.mlp or slots

        def norm(present: bool, site: str) -> nn.Module:
            return build_norm(config.norm, config.dim, site) if present else nn.Identity()

        self.attention_input_norm = norm(slots.input, "attention")
        self.attention = Attention(config, layer, qkv_norm=slots.qkv)
        self.attention_output_norm = norm(slots.output, "attention")
        self.attention_residual_norm = norm(slots.residual, "attention")
        self.mlp_input_norm = norm(around_mlp.input, "mlp")
        self.mlp = MLP(config)
        self.mlp_output_norm = norm(around_mlp.output, "mlp")
        self.mlp_residual_norm = norm(around_mlp.residual, "mlp")
        multiply_gain(self.attention_output_norm, slots.output_gain)
        multiply_gain(self.mlp_output_norm, around_mlp.output_gain)
        self.s, self.alpha = slots.s, slots.alpha
        self.output_scale = 1 / depth_ratio(config)
        self.register_parameter("a", nn.Parameter(torch.zeros(())) if slots.gated else None)
        self.attention_step = self.mlp_step = None
        if slots.interpolated:
            self.attention_step, self.mlp_step = (
                LearnedScale(config.dim, start=0.05, stored=config.dim**-0.5) for _ in range(2)
            )

    def forward(
        self,
        x_BTD: Tensor,
        rotation: Rotation,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Add the output of both sub-layers to the residual stream."""
        return self._add_mlp(self._add_attention(x_BTD, rotation, cache, mask))

    def _add_attention(
        self, x_BTD: Tensor, rotation: Rotation, cache: KVCache | None, mask: Tensor | None
    ) -> Tensor:
        is_causal = cache is None and mask is None
        if is_causal and (fused_BTD := self._fused(x_BTD, rotation)) is not None:
            return fused_BTD
        alpha, a = self._residual_scales(self.attention_step)
        h = self.attention(_times(self.s, self.attention_input_norm(x_BTD)), rotation, cache, mask)
        x_BTD = _times(alpha, x_BTD) + _times(a, self.attention_output_norm(h))
        y_BTD: Tensor = self.attention_residual_norm(x_BTD)
        return y_BTD

    def _add_mlp(self, x_BTD: Tensor) -> Tensor:
        if (fused_BTD := self._fused(x_BTD)) is not None:
            return fused_BTD
        alpha, a = self._residual_scales(self.mlp_step)
        h = self.mlp(_times(self.s, self.mlp_input_norm(x_BTD)))
        x_BTD = _times(alpha, x_BTD) + _times(a, self.mlp_output_norm(h))
        y_BTD: Tensor = self.mlp_residual_norm(x_BTD)
        return y_BTD

    def _fused(self, x_BTD: Tensor, rotation: Rotation | None = None) -> Tensor | None:
        """Return x + f(s·input_norm(x)) by a C kernel; None: other formula, or not possible.

        f is attention with a ``rotation``, else the MLP.
        """
        if rotation is None:
            norm, *others = self.mlp_input_norm, self.mlp_output_norm, self.mlp_residual_norm
        else:
            norm = self.attention_input_norm
            others = [self.attention_output_norm, self.attention_residual_norm]
        has_other_scales = (self.alpha, self.a, self.output_scale) != (1, None, 1)
        has_other_scales |= self.mlp_step is not None
        gain_and_eps = None if has_other_scales else plain_gain(norm)
        if gain_and_eps is None or not are_identities(*others):
            return None
        gain_D, eps = _times(self.s, gain_and_eps[0]), gain_and_eps[1]
        if rotation is None:
            return fused_mlp(self.mlp, x_BTD, gain_D, eps)
        return fused_attention(self.attention, x_BTD, gain_D, eps, rotation)

    def _residual_scales(self, step: LearnedScale | None) -> tuple[Tensor | float, Tensor | float]:
        """Return α and a."""
        if step is None:
            return self.alpha, self.output_scale if self.a is None else self.a
        a_D = step().abs()
        return 1 - a_D, a_D


def _times(scale: Tensor | float | None, x: Tensor) -> Tensor:
    return x if scale is None or (isinstance(scale, float) and scale == 1) else scale * x


class LossSums(NamedTuple):
    """Sums over the targets that count: what to minimise, the cross-entropy in it, their number."""

    objective: Tensor
    cross_entropy: Tensor
    n_targets: Tensor


class Transformer(nn.Module):
    """A decoder-only transformer; the diagram is in the module's docstring.

    Args:
        config: its shape; ``vocab_size`` must be set.
        seed: each weight starts from numbers drawn for (seed, its own name) alone, so that models
            that differ in their norms start with equal other weights.

    Raises:
        ConfigError: the vocabulary size is missing, or a norm or placement is unknown.
    """

    embed_scale: nn.Parameter | None
    logit_scale: LearnedScale | None
    recompute: bool = False
    """Keep only each block's input for the backward pass, and run the block again there: memory for
    activations falls to about one block's, for one more forward pass (Chen 2016, 1604.06174)."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        check_type("config", config, ModelConfig)
        seed = whole_number("seed", seed)
        self.config = config
        vocab_size = config.known_vocab_size
        norm = config.norm
        placed = PLACEMENTS.get(norm.placement).final_norm
        has_final_norm = placed if norm.final_norm is None else norm.final_norm
        self.embed = nn.Embedding(vocab_size, config.dim)
        scale = math.sqrt(config.dim)
        self.register_parameter(
            "embed_scale",
            nn.Parameter(torch.tensor(scale)) if config.embed_scale == "learned" else None,
        )
        self.fixed_embed_scale = scale if config.embed_scale == "fixed" else 1.0
        self.embed_norm = (
            build_norm(norm, config.dim, "embed") if norm.embed_norm else nn.Identity()
        )
        self.rope = RotaryEmbedding(
            config.head_dim,
            config.max_seq_len,
            config.rope_theta,
            config.rope_scaling,
            scale=math.sqrt(attention_factor(config)),  # of queries and of keys
        )
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.final_norm = build_norm(norm, config.dim, "final") if has_final_norm else nn.Identity()
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.dim, vocab_size, bias=False)
        self.logit_factor = 1 / width_ratio(config)
        self.logit_scale = None
        if self.has_unit_weights:
            self.logit_scale = LearnedScale(vocab_size, start=1.0, stored=config.dim**-0.5)
        initialise(self, seed)

    def forward(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the logits (B, T, V) of the token after each position.

        With a ``cache``, ``tokens`` follow those already in it, and are added to it.

        Raises:
            ValueError: ``tokens`` are not whole numbers of shape (B, T), they are more than
                ``max_seq_len`` positions, or the cache has no room for them or for the blocks.
            IndexError: an id is not in the vocabulary (as torch checks it: on a CPU).
        """
        return self.head(self.hidden(tokens_BT, cache))

    def hidden(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the input of the head, (B, T, D)."""
        _check_tokens(tokens_BT, cache)
        n_tokens = tokens_BT.shape[1]
        n_before = 0 if cache is None else cache.length
        if n_before + n_tokens > self.config.max_seq_len:
            raise ValueError(
                f"{n_before + n_tokens} positions are more than "
                f"max_seq_len = {self.config.max_seq_len}; give fewer tokens"
            )
        if cache is not None:
            self._check_layers(cache)
        if cache is None:
            positions, mask = torch.arange(n_tokens, device=tokens_BT.device), None
        else:
            positions, mask = cache.positions(n_tokens), cache.mask(n_tokens)
        x_BTD = _times(self.embed_scale, _times(self.fixed_embed_scale, self._embedded(tokens_BT)))
        x_BTD = self.embed_norm(x_BTD)
        rotation = self.rope(positions, x_BTD.dtype)
        recompute = self.recompute and cache is None and torch.is_grad_enabled()
        for block in self.blocks:
            if recompute:
                x_BTD = checkpoint(block, x_BTD, rotation, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, rotation, cache, mask)
        if cache is not None:
            cache.advance(n_tokens)
        return _times(self.logit_factor, self.final_norm(x_BTD))

    def _repr_html_(self) -> str:
        """Show a notebook the model's shape; ``print`` shows its modules."""
        config, norm = self.config, self.config.norm
        shown = {
            "parameters": f"{sum(weight.numel() for weight in self.parameters()):,}",
            "layers × width": f"{config.n_layers} × {config.dim}",
            "heads": f"{config.n_heads}, of keys and values {config.n_kv_heads}",
            "norm": f"{norm.kind}, placement {norm.placement}",
            "vocabulary": f"{config.known_vocab_size:,}",
            "positions": f"{config.max_seq_len:,}",
        }
        return html_table("Transformer", shown.items())

    def _check_layers(self, cache: KVCache) -> None:
        """Refuse blocks that were shared, copied or added so that two have one place in a cache."""
        attentions = [getattr(block, "attention", None) for block in self.blocks]
        layers = [a.layer for a in attentions if isinstance(a, Attention)]
        n_places = len(cache.k_LBGSK)
        if len(set(layers)) < len(layers) or max(layers, default=0) >= n_places:
            raise ValueError(
                f"the blocks have attention.layer = {layers}, by which the cache keeps their keys "
                f"and values: they must differ, and be below config.n_layers = {n_places}"
            )

    def _embedded(self, tokens_BT: Tensor) -> Tensor:
        try:
            x_BTD: Tensor = self.embed(tokens_BT)
        except IndexError as error:
            raise IndexError(
                f"a token is outside the model's vocabulary of {self.embed.num_embeddings}; encode "
                "the text with the model's own tokenizer"
            ) from error
        return x_BTD

    def head(self, x_BTD: Tensor) -> Tensor:
        """Map hidden states (..., D) to logits (..., V)."""
        logits, cap = self._uncapped_logits(x_BTD), self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _uncapped_logits(self, x_BTD: Tensor) -> Tensor:
        if self.head_is_plain:
            return linear(x_BTD, self.head_weight)
        logits: Tensor = self.lm_head(x_BTD)
        return logits if self.logit_scale is None else logits * self.logit_scale()

    @property
    def has_unit_weights(self) -> bool:
        """Whether :func:`~minillama.model.ngpt.normalise_weights` belongs after each update."""
        return PLACEMENTS.get(self.config.norm.placement).unit_weights

    @property
    def head_is_plain(self) -> bool:
        """Whether the head is only a product with its weight: no adapter and no hook is on it."""
        return self.config.tie_embeddings or are_plain(self.lm_head)

    @property
    def head_weight(self) -> Tensor:
        """The matrix (V, D) that maps hidden states to logits."""
        weight = self.embed.weight if self.config.tie_embeddings else self.lm_head.weight
        return scale_rows(weight, self.logit_scale)

    def loss_sums(self, tokens_BT: Tensor, targets_BT: Tensor, z_loss: float = 0.0) -> LossSums:
        """Sum −log p(target), in nats, over the targets that are not −100.

        The objective adds ``z_loss`` · (log Z)², which keeps the softmax's normaliser Z near one
        (Chowdhery 2022, PaLM).  Logits are float32 here (float64 in a float64 model).

        Raises:
            ValueError: ``targets`` are not whole numbers of the shape of ``tokens``, ``z_loss`` is
                not a finite number of at least 0, or ``forward`` refuses the tokens.
            IndexError: an id or a target is not in the vocabulary.
        """
        _check_tokens(tokens_BT)
        check_type("targets", targets_BT, Tensor)
        if targets_BT.shape != tokens_BT.shape or targets_BT.dtype not in _ID_DTYPES:
            raise ValueError(
                f"targets of {targets_BT.dtype} and shape {tuple(targets_BT.shape)}: must have "
                f"the shape of the tokens, {tuple(tokens_BT.shape)}, and be whole numbers"
            )
        if not 0 <= z_loss < math.inf:
            raise ValueError(f"z_loss = {z_loss}: must be a finite number of at least 0")
        targets_N = targets_BT.flatten().long()
        options = LossOptions(z_loss, self.config.logit_softcap)
        x_ND = self.hidden(tokens_BT).flatten(0, 1)
        if self.head_is_plain:
            objective, cross_entropy = linear_cross_entropy(
                x_ND, self.head_weight, targets_N, options
            )
        else:
            logits_NV = self._uncapped_logits(x_ND)
            objective, cross_entropy = logits_cross_entropy(logits_NV, targets_N, options)
            cross_entropy = cross_entropy.detach()
        return LossSums(objective, cross_entropy, (targets_N != IGNORED).sum())

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, z_loss: float = 0.0) -> Tensor:
        """Return the mean loss, in nats, over the targets that are not −100; 0 if none counts."""
        sums = self.loss_sums(tokens_BT, targets_BT, z_loss)
        return sums.objective / sums.n_targets.clamp(min=1)


_ID_DTYPES = (torch.int64, torch.int32)


def _check_tokens(tokens_BT: Tensor, cache: KVCache | None = None) -> None:
    check_type("tokens", tokens_BT, Tensor)
    if tokens_BT.ndim != 2 or tokens_BT.dtype not in _ID_DTYPES:
        raise ValueError(
            f"tokens of {tokens_BT.dtype} and shape {tuple(tokens_BT.shape)}: must be "
            "(batch, positions) whole numbers (torch.long)"
        )
    if cache is not None:
        check_type("cache", cache, KVCache)
        (batch, n_tokens), rows = tokens_BT.shape, cache.k_LBGSK.shape[1]
        if batch != rows or cache.length + n_tokens > cache.capacity:
            raise ValueError(
                f"{batch} × {n_tokens} tokens do not fit a cache of {rows} rows that holds "
                f"{cache.length} of {cache.capacity} positions; build a larger one"
            )


_DEEPNORM_SCALED = {"v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Draw every matrix, each from a generator seeded by (seed, its name) alone.

    ``normal``: std 0.02, and 0.02 / √(2·n_layers) for o_proj and down_proj, which write to the
    residual stream (Radford 2019, GPT-2).  ``plain_normal``: std 0.02 everywhere (OLMo 2,
    2501.00656).  ``fan_in``: std 1 / √fan_in; an embedding counts as the head.  A parametrization
    changes these with the width.  A placement may divide some of them further (DeepNorm), or
    normalise them (nGPT).
    """
    divisor = PLACEMENTS.get(model.config.norm.placement).init_divisor(model.config.n_layers)
    norms = norm_parameter_names(model)
    for name, weight in model.named_parameters():
        if name in norms or weight.ndim < 2 or weight.is_meta:
            continue
        std = initial_std(model.config, name, weight.shape[1])
        if name.split(".")[-2] in _DEEPNORM_SCALED:
            std /= divisor
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(
            int.from_bytes(digest[:8], "big", signed=True)
        )
        # Dtype and device are given, so that torch's defaults change no weight.
        drawn = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
        weight.copy_(drawn.normal_(0.0, std, generator=generator))
    if model.has_unit_weights:
        normalise_weights(model)
