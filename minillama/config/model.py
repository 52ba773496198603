"""The part of the config that says what shape the model has; norm_config.py has its norms.

What follows from other fields is filled in by ``resolve`` alone.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from minillama.config.fields import Factor, NonNegativeFloat, Positive, PositiveFloat
from minillama.config.loading import Section, refuse
from minillama.config.norms import NormConfig
from minillama.errors import FieldError


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


def _derived(description: str) -> Any:
    """Declare a field that ``resolve`` fills in where the user leaves it out (or writes null)."""
    return Field(None, validate_default=False, description=description)


class ModelConfig(Section):
    """The shape of the transformer."""

    vocab_size: Positive = _derived("ids in all; default: the tokenizer's")
    dim: Positive = Field(128, description="width of the residual stream")
    n_layers: Positive = 4
    n_heads: Positive = 4
    n_kv_heads: Positive = _derived("heads of keys and values (GQA); default: n_heads")
    head_dim: Positive = _derived("features of a head; default: dim / n_heads")
    ffn_dim: Positive = _derived("inner width of the MLP; default: 8/3 dim, rounded up to 32")
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
    init: Literal["normal", "fan_in"] = Field(
        "normal",
        description="normal: std 0.02, o_proj and down_proj divided by √(2·n_layers); "
        "fan_in: std 1/√fan_in",
    )
    norm: NormConfig = NormConfig()

    @model_validator(mode="before")
    @classmethod
    def _null_means_derived(cls, raw: Any) -> Any:
        derived = ("vocab_size", "n_kv_heads", "head_dim", "ffn_dim")
        if not isinstance(raw, dict):
            return raw
        return {key: value for key, value in raw.items() if value is not None or key not in derived}

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        faults = []
        if self.head_dim is None and self.dim % self.n_heads:
            rule = f"is not divisible by n_heads = {self.n_heads}; change one, or set head_dim"
            faults.append(FieldError("dim", self.dim, rule, "n_heads"))
        elif (self.head_dim or self.dim // self.n_heads) % 2:
            size = self.head_dim or self.dim // self.n_heads
            rule = "must be even, since RoPE turns pairs of features"
            rule += "" if self.head_dim else " (head_dim is dim / n_heads)"
            faults.append(FieldError("head_dim", size, rule))
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            rule = f"is not divisible by n_kv_heads = {self.n_kv_heads}"
            faults.append(FieldError("n_heads", self.n_heads, rule, "n_kv_heads"))
        refuse(faults)
        return self

    def resolve(self, vocab_size: int | None = None) -> ModelConfig:
        """Return a copy with every field filled in that follows from others, or from the tokenizer.

        Without ``vocab_size`` that one may stay open: a single block needs none.
        """
        return self.model_copy(
            update={
                "vocab_size": self.vocab_size or vocab_size,
                "n_kv_heads": self.n_kv_heads or self.n_heads,
                "head_dim": self.head_dim or self.dim // self.n_heads,
                "ffn_dim": self.ffn_dim or 32 * math.ceil(self.dim * 8 / 3 / 32),
            }
        )


def advice(model: ModelConfig) -> list[str]:
    """Return what is legal in ``model`` and yet makes a comparison unfair; a line each."""
    norm = model.norm
    if norm.kind != "dyt":
        return []
    options = norm.options
    attention = options["alpha_attention"]
    lacks = [
        wish
        for wish, granted in (
            ("model.norm.options.bias=false", not options["bias"]),
            (
                "a larger model.norm.options.alpha_attention than alpha",
                attention is not None and attention > options["alpha"],
            ),
            ("model.embed_scale=learned", model.embed_scale == "learned"),
        )
        if not granted
    ]
    return [
        "dyt is an unfair baseline for a Llama (section 6 of its paper) without " + ", ".join(lacks)
    ] * bool(lacks)
