"""The part of the config that says which norm a model has, and where it stands.

Kinds and placements are known here by name, options and formula alone, so that a faulty one is
refused before torch is loaded; :mod:`minillama.model` holds what they do.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from minillama.config.fields import NonNegativeFloat, PositiveFloat
from minillama.config.loading import NotBool, Section, field_errors, refuse
from minillama.errors import FieldError
from minillama.registry import Registry, unknown_name


class RMSNormOptions(Section):
    """Options of ``kind: rmsnorm``; see :class:`minillama.model.norms.RMSNorm`."""

    affine: bool = Field(True, description="learn a gain γ")
    unit_offset: bool = Field(False, description="gain is 1 + w with w starting at 0 (Gemma)")
    partial: Annotated[float, NotBool, Field(gt=0, le=1)] = Field(
        1.0, description="share of features the rms is taken from"
    )
    bias: bool = Field(False, description="learn a shift β as well; has no effect without affine")

    @model_validator(mode="after")
    def _check(self) -> RMSNormOptions:
        if self.unit_offset and not self.affine:
            refuse(
                [FieldError("unit_offset", True, "needs affine: true, since it is about the gain")]
            )
        return self


class LayerNormOptions(Section):
    """Options of ``kind: layernorm``; see :class:`minillama.model.norms.LayerNorm`."""

    affine: bool = Field(True, description="learn a gain γ (and, with bias, a shift β)")
    bias: bool = Field(True, description="learn a shift β; has no effect without affine")


class NoOptions(Section):
    """Options of a kind that has none."""


class DyTOptions(Section):
    """Options of ``kind: dyt``; see :class:`minillama.model.norms.DyT`."""

    alpha: PositiveFloat = Field(0.5, description="α at the start")
    alpha_attention: PositiveFloat | None = Field(
        None, description="α at the start where the norm is attention's; default: alpha"
    )
    bias: bool = Field(True, description="learn a shift β")


class DerfOptions(Section):
    """Options of ``kind: derf``; see :class:`minillama.model.norms.Derf`."""

    alpha: PositiveFloat = Field(0.5, description="α at the start")
    bias: bool = Field(True, description="learn a shift β")


NORM_KINDS: Registry[type[BaseModel]] = Registry("norm kind")
"""Each kind's options.  ``minillama.model.norms`` builds the kinds; plugins add to both."""
NORM_KINDS.register("rmsnorm", RMSNormOptions)
NORM_KINDS.register("layernorm", LayerNormOptions)
NORM_KINDS.register("scalenorm", NoOptions)
NORM_KINDS.register("l2norm", NoOptions)
NORM_KINDS.register("dyt", DyTOptions)
NORM_KINDS.register("derf", DerfOptions)
NORM_KINDS.register("none", NoOptions)

PLACEMENTS: Registry[str] = Registry("norm placement")
"""Each placement's formula.  ``minillama.model.placement`` holds the table itself."""
PLACEMENTS.register("pre", "x + f(N(x))")
PLACEMENTS.register("post", "N(x + f(x))")
PLACEMENTS.register("reordered", "x + N(f(x))")
PLACEMENTS.register("peri", "x + N(f(N(x)))")
PLACEMENTS.register("scaled", "x + f(N(x) / √ℓ), ℓ the layer from 1")
PLACEMENTS.register("deepnorm", "N((2L)^¼ · x + f(x)), L the number of layers")
PLACEMENTS.register("rezero", "x + a · f(x), a learned, 0 at the start")
PLACEMENTS.register("mix", "the first ⌊L/4⌋ layers post, the others pre")
PLACEMENTS.register("hybrid", "y = x + attention of normed q, k, v; N(y) + mlp(N(y))")


class NormConfig(Section):
    """Which norm, and where it stands."""

    kind: str = Field("rmsnorm", description="a registered norm kind; `minillama norms` lists them")
    eps: NonNegativeFloat = Field(1e-6, description="ε, added inside the root")
    placement: str = Field("pre", description="where the norm stands around each sub-layer")
    qk_norm: Literal["none", "head", "full"] = Field(
        "none", description="RMSNorm of queries and keys before RoPE: per head, or over all heads"
    )
    embed_norm: bool = Field(False, description="a norm after the embedding")
    final_norm: bool | None = Field(
        None, description="a norm before the head; default: as the placement has it"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="the options of this kind of norm"
    )

    @model_validator(mode="after")
    def _check(self) -> NormConfig:
        if self.placement == "hybrid" and self.qk_norm != "none":
            rule = "the hybrid placement norms q, k and v itself; leave this at none"
            refuse([FieldError("qk_norm", self.qk_norm, rule, "placement")])
        return self

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        if kind not in NORM_KINDS:
            raise ValueError(unknown_name(NORM_KINDS.what, kind, NORM_KINDS))
        return kind

    @field_validator("placement")
    @classmethod
    def _known_placement(cls, placement: str) -> str:
        if placement not in PLACEMENTS:
            raise ValueError(unknown_name(PLACEMENTS.what, placement, PLACEMENTS))
        return placement

    @field_validator("options")
    @classmethod
    def _options_of_kind(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if "kind" not in info.data:  # the kind itself is at fault, and is reported
            return options
        model = NORM_KINDS.get(info.data["kind"])
        try:
            return model(**options).model_dump()
        except ValidationError as error:
            refuse(field_errors(error, model))
        raise AssertionError("unreachable")
