"""The table of norms, and the config section that chooses a norm and its placement.

A built-in kind of norm is one row of :data:`NORM_KINDS` here and one class in
:mod:`minillama.model.norms`; ``register_norm`` adds a kind of yours.  Where the norms are is
:mod:`minillama.config.placement`.  Nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from minillama.config.placement import PLACEMENTS
from minillama.errors import FieldError
from minillama.registry import Registry, unknown_name

if TYPE_CHECKING:
    from minillama.config.model import ModelConfig


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


def _dyt_advice(model: ModelConfig) -> list[str]:
    options = model.norm.options
    attention = options["alpha_attention"]
    missing = [
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
    text = "dyt is an unfair baseline for a Llama (section 6 of its paper) without "
    return [text + ", ".join(missing)] if missing else []


@dataclass(frozen=True)
class NormKind:
    """One row of the table: what a config and `minillama norms` need to know about a kind of norm.

    ``options`` is the section of its options; ``advice(model)`` returns what is valid in
    the config of a model with this norm but makes a comparison unfair, one line each.
    """

    formula: str
    source: str
    options: type[BaseModel] = NoOptions
    advice: Callable[[ModelConfig], list[str]] = lambda model: []


NORM_KINDS: Registry[NormKind] = Registry("norm kind")

for _name, _row in {
    "rmsnorm": NormKind(
        "x / √(mean(x²) + ε) · γ", "Zhang & Sennrich 2019, 1910.07467", RMSNormOptions
    ),
    "layernorm": NormKind(
        "(x − mean(x)) / √(var(x) + ε) · γ + β", "Ba et al. 2016, 1607.06450", LayerNormOptions
    ),
    "scalenorm": NormKind("g · x / ‖x‖", "Nguyen & Salazar 2019, 1910.05895"),
    "l2norm": NormKind("x / ‖x‖", "Loshchilov et al. 2024, 2410.01131"),
    "dyt": NormKind("γ · tanh(α·x) + β", "Zhu et al. 2025, 2503.10622", DyTOptions, _dyt_advice),
    "derf": NormKind("γ · erf(α·x + s) + β", "Chen et al. 2025, 2512.10938", DerfOptions),
    "none": NormKind("x", "no norm at all"),
}.items():
    NORM_KINDS.register(_name, _row)


# ---------------------------------------------------------------------------------------- section


class NormConfig(Section):
    """The kind of norm, its options and its placement."""

    kind: str = Field("rmsnorm", description="a registered norm kind; `minillama norms` lists them")
    eps: NonNegativeFloat = Field(1e-6, description="ε, added inside the root")
    placement: str = Field("pre", description="where the norms are around each sub-layer")
    qk_norm: Literal["none", "head", "full"] = Field(
        "none", description="RMSNorm of queries and keys before RoPE: per head, or over all heads"
    )
    qk_unit_offset: bool = Field(
        False, description="the gain of qk_norm is 1 + w, w starting at 0 (Qwen3-Next)"
    )
    v_norm: bool = Field(
        False, description="RMSNorm of each head's values, without a gain (Gemma 3n, Gemma 4)"
    )
    embed_norm: bool = Field(False, description="a norm after the embedding")
    final_norm: bool | None = Field(
        None, description="a norm before the head; default: as the placement says"
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="the options of this kind of norm"
    )

    @model_validator(mode="after")
    def _check(self) -> NormConfig:
        errors = []
        placement = PLACEMENTS.get(self.placement)
        norms_qkv = placement.norms_qkv
        if (norms_qkv or placement.unit_weights) and self.qk_norm != "none":
            what = "q, k and v" if norms_qkv else "q and k"
            rule = f"the {self.placement} placement norms {what} itself; leave this at none"
            errors.append(FieldError("qk_norm", self.qk_norm, rule, "placement"))
        if norms_qkv and self.v_norm:
            rule = f"the {self.placement} placement norms q, k and v itself; leave this at false"
            errors.append(FieldError("v_norm", self.v_norm, rule, "placement"))
        if self.qk_unit_offset and self.qk_norm == "none":
            rule = "is about the gain of qk_norm; set that to head or full"
            errors.append(FieldError("qk_unit_offset", self.qk_unit_offset, rule, "qk_norm"))
        refuse(errors)
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
        if "kind" not in info.data:  # the kind itself is wrong, and is reported
            return options
        model = NORM_KINDS.get(info.data["kind"]).options
        try:
            return model(**options).model_dump()
        except ValidationError as error:
            refuse(field_errors(error, model))
        raise AssertionError("unreachable")
