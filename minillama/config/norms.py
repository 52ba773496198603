"""The table of norms, the table of placements, and the config section that chooses from them.

A built-in kind of norm is one row of :data:`NORM_KINDS` here and one class in
:mod:`minillama.model.norms`; a user's is ``register_norm``.  A placement is one row of
:data:`PLACEMENTS`, of the user's as well (:func:`register_placement`).  Nothing here loads torch.

Each sub-layer f (attention or MLP) runs one formula, whose slots are the identity where empty:

    x ← residual_norm(α·x + a·output_norm(f(s·input_norm(x))))

    placement   input  output  residual  scales         final norm  source
    pre         N                                       yes         Xiong 2020; Llama
    post                       N                        no          Vaswani 2017
    reordered          N                                yes         OLMo 2; Swin v2
    peri        N      N                                yes         Kim 2025; Gemma 2 ("sandwich")
    scaled      N                        s = 1/√ℓ       yes         Sun 2025, LayerNorm scaling
    deepnorm                   N         α = (2L)^¼     no          Wang 2022, DeepNet
    rezero                               a learned      no          Bachlechner 2020
    mix         post in the first ⌊L/4⌋ layers, then pre  yes       Li 2024, Mix-LN
    hybrid      q, k and v normed; N behind attention's  yes        Zhuo 2025, HybridNorm
                residual sum; nothing around the MLP

ℓ counts layers from 1, as the papers do; L is their number.
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
    """One row of the table: what a config and `minillama norms` need to know of a kind of norm.

    ``options`` is the section of its options; ``advice(model)`` returns what is legal in the config
    of a model with this norm and yet makes a comparison unfair, a line each.
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


# -------------------------------------------------------------------------------------- placements


@dataclass(frozen=True)
class Slots:
    """What stands around one sub-layer: which norms, and the scales.

    Around both sub-layers of a block the same, unless ``mlp`` says otherwise for the MLP.
    """

    input: bool = False
    output: bool = False
    residual: bool = False
    s: float = 1.0
    alpha: float = 1.0
    gated: bool = False
    """a is learned, one number for the block, 0 at start."""
    qkv: bool = False
    """Queries, keys and values are normed, each head separately."""
    mlp: Slots | None = None


@dataclass(frozen=True)
class Placement:
    """One row of the table.

    ``slots(layer, n_layers)`` gives what stands around the sub-layers of a block; ``layer`` counts
    from 1.  ``final_norm`` is whether a norm stands before the head.  ``init_divisor(n_layers)``
    divides the starting weights of the MLP, v_proj and o_proj.
    """

    formula: str
    source: str
    slots: Callable[[int, int], Slots]
    final_norm: bool = True
    init_divisor: Callable[[int], float] = lambda n_layers: 1.0

    @property
    def norms_qkv(self) -> bool:
        """Whether it norms queries, keys and values, in the first layer at least."""
        return self.slots(1, 1).qkv


PLACEMENTS: Registry[Placement] = Registry("norm placement")


def register_placement(name: str, placement: Placement) -> None:
    """Add a row to the table, under a name that configs may use.

    Raises:
        ConfigError: the name is taken.
    """
    PLACEMENTS.register(name, placement)


def _in_every_layer(slots: Slots) -> Callable[[int, int], Slots]:
    return lambda layer, n_layers: slots


_PRE, _POST = Slots(input=True), Slots(residual=True)

for _name, _placement in {
    "pre": Placement("x + f(N(x))", "Xiong et al. 2020, 2002.04745; Llama", _in_every_layer(_PRE)),
    "post": Placement(
        "N(x + f(x))",
        "Vaswani et al. 2017, 1706.03762",
        _in_every_layer(_POST),
        final_norm=False,
    ),
    "reordered": Placement(
        "x + N(f(x))",
        "OLMo 2, 2501.00656; Liu et al. 2021, 2111.09883",
        _in_every_layer(Slots(output=True)),
    ),
    "peri": Placement(
        "x + N(f(N(x)))",
        "Kim et al. 2025, 2502.02732; Gemma 2",
        _in_every_layer(Slots(input=True, output=True)),
    ),
    "scaled": Placement(
        "x + f(N(x) / √ℓ), ℓ the layer from 1",
        "Sun et al. 2025, 2502.05795",
        lambda layer, n_layers: Slots(input=True, s=layer**-0.5),
    ),
    "deepnorm": Placement(
        "N((2L)^¼ · x + f(x)), L the number of layers",
        "Wang et al. 2022, 2203.00555",
        lambda layer, n_layers: Slots(residual=True, alpha=(2 * n_layers) ** 0.25),
        final_norm=False,
        init_divisor=lambda n_layers: (8 * n_layers) ** 0.25,
    ),
    "rezero": Placement(
        "x + a · f(x), a learned, 0 at the start",
        "Bachlechner et al. 2020, 2003.04887",
        _in_every_layer(Slots(gated=True)),
        final_norm=False,
    ),
    "mix": Placement(
        "the first ⌊L/4⌋ layers post, the others pre",
        "Li et al. 2024, 2412.13795",
        lambda layer, n_layers: _POST if layer <= n_layers // 4 else _PRE,
    ),
    "hybrid": Placement(
        "y = x + attention of normed q, k, v; N(y) + mlp(N(y))",
        "Zhuo et al. 2025, 2503.04598",
        _in_every_layer(Slots(residual=True, qkv=True, mlp=Slots())),
    ),
}.items():
    register_placement(_name, _placement)


# ---------------------------------------------------------------------------------------- section


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
        if PLACEMENTS.get(self.placement).norms_qkv and self.qk_norm != "none":
            rule = f"the {self.placement} placement norms q, k and v itself; leave this at none"
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
        if "kind" not in info.data:  # the kind itself is wrong, and is reported
            return options
        model = NORM_KINDS.get(info.data["kind"]).options
        try:
            return model(**options).model_dump()
        except ValidationError as error:
            refuse(field_errors(error, model))
        raise AssertionError("unreachable")
