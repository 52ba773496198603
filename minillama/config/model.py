"""The ``model`` section of the config: the shape of the transformer."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from minillama.config.fields import Factor, NonNegativeFloat, Positive, PositiveFloat
from minillama.config.loading import Section, derived, refuse
from minillama.config.norms import NormConfig
from minillama.config.placement import PLACEMENTS, Slots
from minillama.errors import ConfigError, FieldError


class LinearRopeScaling(Section):
    """Positions divided by ``factor`` (Chen 2023, position interpolation)."""

    kind: Literal["linear"]
    factor: Factor


class Llama3RopeScaling(Section):
    """Low frequencies divided by ``factor``, high ones kept, a ramp between (Llama 3.1)."""

    kind: Literal["llama3"]
    factor: Factor = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_seq_len: Positive = 8192

    @model_validator(mode="after")
    def _check(self) -> Llama3RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            refuse(
                [
                    FieldError(
                        "high_freq_factor", self.high_freq_factor, "must exceed low_freq_factor"
                    )
                ]
            )
        return self


RopeScaling = Annotated[LinearRopeScaling | Llama3RopeScaling, Field(discriminator="kind")]


class MupConfig(Section):
    """The base sizes of ``parametrization: mup``, at which it is the standard one."""

    base_dim: Positive = Field(64, description="the width at which the learning rate was chosen")
    base_head_dim: Positive | None = Field(
        None,
        description="the features of a head there: attention's logits are q·k / head_dim, scaled "
        "to be q·k / √head_dim at the base; default: they are q·k / √head_dim at every size",
    )
    base_n_layers: Positive | None = Field(
        None,
        description="the depth there: sub-layers add their output times base_n_layers / n_layers "
        "(CompleteP, 2505.01618); default: depth changes nothing",
    )


def _head_dim(model: dict[str, Any]) -> int:
    """Return dim / n_heads, or 0, which the section refuses, where that is not a whole number."""
    dim, n_heads = model["dim"], model["n_heads"]
    return 0 if dim % n_heads else int(dim // n_heads)


class ModelConfig(Section):
    """The shape of the transformer."""

    vocab_size: Positive | None = Field(None, description="number of ids; default: the tokenizer's")
    dim: Positive = Field(128, description="width of the residual stream")
    n_layers: Positive = 4
    n_heads: Positive = 4
    n_kv_heads: Positive = derived(
        lambda model: model["n_heads"], "heads of keys and values (GQA); default: n_heads"
    )
    head_dim: Positive = derived(_head_dim, "features of a head; default: dim / n_heads")
    ffn_dim: Positive = derived(
        lambda model: 32 * math.ceil(model["dim"] * 8 / 3 / 32),
        "inner width of the MLP; default: 8/3 dim, rounded up to 32",
    )
    max_seq_len: Positive = Field(256, description="longest context in tokens")
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    embed_scale: Literal["none", "fixed", "learned"] = Field(
        "none",
        description="multiply embeddings by √dim (Gemma), or by a learned number that starts there "
        "(what DyT needs)",
    )
    logit_softcap: NonNegativeFloat = Field(
        0.0, description="c in c·tanh(logits / c), which keeps logits below c (Gemma 2); 0: none"
    )
    tie_embeddings: bool = Field(True, description="the head shares the embedding's weights")
    attention_gate: Literal["none", "head", "element"] = Field(
        "none",
        description="multiply attention's output by σ(g_proj(x)), x being its input: one factor "
        "for each head, or for each feature (Qwen3-Next; 2505.06708)",
    )
    init: Literal["normal", "plain_normal", "fan_in"] = Field(
        "normal",
        description="normal: std 0.02, o_proj and down_proj divided by √(2·n_layers); "
        "plain_normal: std 0.02, nothing divided (OLMo 2); fan_in: std 1/√fan_in",
    )
    parametrization: Literal["standard", "mup"] = Field(
        "standard",
        description="mup: initial weights, learning rates and the logits follow the width, so that "
        "the best learning rate stays the same (2203.03466)",
    )
    mup: MupConfig = MupConfig()
    norm: NormConfig = NormConfig()

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        errors = self._mup_errors()
        if self.head_dim == 0:
            rule = f"is not divisible by n_heads = {self.n_heads}; change one, or set head_dim"
            errors.append(FieldError("dim", self.dim, rule, "n_heads"))
        elif self.head_dim % 2:
            rule = "must be even, since RoPE rotates pairs of features (default: dim / n_heads)"
            errors.append(FieldError("head_dim", self.head_dim, rule))
        if self.n_heads % self.n_kv_heads:
            rule = f"is not divisible by n_kv_heads = {self.n_kv_heads}"
            errors.append(FieldError("n_heads", self.n_heads, rule, "n_kv_heads"))
        refuse(errors)
        return self

    def _mup_errors(self) -> list[FieldError]:
        if self.parametrization == "standard":
            if self.mup == MupConfig():
                return []
            rule = "is of model.parametrization = mup alone; leave it out, or set that"
            return [FieldError("mup", "set", rule, "parametrization")]
        name = self.norm.placement
        placement = PLACEMENTS.get(name) if name in PLACEMENTS else None
        slots = placement.slots(0, self.n_layers) if placement else Slots()
        if placement and placement.unit_weights:
            rule = "normalises all weights, and mup scales them; set another placement"
            return [FieldError("norm.placement", name, rule, "parametrization")]
        if self.mup.base_n_layers is not None and (slots.residual or slots.gated):
            rule = (
                "norms or gates the residual stream, and CompleteP is for placements that only add "
                "to it; leave out mup.base_n_layers, or set another placement"
            )
            return [FieldError("norm.placement", name, rule, "mup.base_n_layers")]
        return []

    @property
    def known_vocab_size(self) -> int:
        """``vocab_size``, which a model needs.

        Raises:
            ConfigError: it is not set.
        """
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is not set; set it to the tokenizer's vocab_size")
        return self.vocab_size
