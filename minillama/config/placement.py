"""The table of placements: where the norms are around each sub-layer.

Each sub-layer f (attention or MLP) computes one formula; an empty slot is the identity:

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
    keel        N                N         α = 2L           no          Chen 2026, Keel
    peri_scaled N      N, whose gain starts at 1/√L         yes         Trinity; Pangu Ultra
    ngpt               N         N         α = 1 − a,       no          Loshchilov 2024, nGPT
                                           a learned

Left out, since the formula does not hold them: SpanNorm (Li 2026, 2601.22580), whose residual
connection spans a whole block, and residual streams of several lanes (hyper-connections).

In the formulas ℓ = layer + 1, as the papers count, and L is the number of layers; everywhere else
the first layer is 0.

A placement is one row of :data:`PLACEMENTS`; :func:`register_placement` adds one of yours.  Nothing
here loads torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minillama.registry import Registry


@dataclass(frozen=True)
class Slots:
    """The norms and scales around one sub-layer.

    Both sub-layers of a block have the same, unless ``mlp`` gives other ones for the MLP.
    """

    input: bool = False
    output: bool = False
    residual: bool = False
    s: float = 1.0
    alpha: float = 1.0
    output_gain: float = 1.0
    """The gain that the output norm starts with, where it has one."""
    gated: bool = False
    """a is learned, one number for each block, 0 at the start."""
    interpolated: bool = False
    """a is learned, at least 0, one number for each feature and sub-layer, and α is 1 − a."""
    qkv: bool = False
    """Queries, keys and values are normed, each head separately."""
    mlp: Slots | None = None


@dataclass(frozen=True)
class Condition:
    """What the source of a placement trained it with, so that another setting does not test it.

    Attributes:
        field: of a run's config, by its dotted name.
        holds: returns whether the source would have this value.
        needed: what it has instead, for the user.
        why: the reason, and where it is said.
    """

    field: str
    holds: Callable[[Any], bool]
    needed: str
    why: str


@dataclass(frozen=True)
class Placement:
    """One row of the table.

    ``slots(layer, n_layers)`` returns the norms and scales of one block, where the first layer is
    0.  ``final_norm`` is whether there is a norm before the head.  ``init_divisor(n_layers)``
    divides the initial weights of the MLP, v_proj and o_proj.  ``unit_weights`` is whether the
    weights are normalised after every step, with what belongs to it
    (:mod:`minillama.model.ngpt`).  ``conditions`` are what its source trained it with.
    """

    formula: str
    source: str
    slots: Callable[[int, int], Slots]
    final_norm: bool = True
    init_divisor: Callable[[int], float] = lambda n_layers: 1.0
    unit_weights: bool = False
    conditions: tuple[Condition, ...] = ()

    @property
    def norms_qkv(self) -> bool:
        """Whether it norms queries, keys and values, at least in the first layer."""
        return self.slots(0, 1).qkv


PLACEMENTS: Registry[Placement] = Registry("norm placement")


def register_placement(name: str, placement: Placement) -> None:
    """Add a row to the table, under a name that configs may use.

    Raises:
        ConfigError: the name is taken.
    """
    PLACEMENTS.register(name, placement)


def _in_every_layer(slots: Slots) -> Callable[[int, int], Slots]:
    return lambda layer, n_layers: slots


def _one_of(field: str, *values: Any, why: str) -> Condition:
    return Condition(field, lambda value: value in values, " or ".join(map(str, values)), why)


_PRE, _POST = Slots(input=True), Slots(residual=True)

_WARMUP = Condition(
    "optim.warmup_steps",
    lambda steps: steps > 0,
    "a warm-up",
    "without one, the large gradients at the end of a post-norm stack break training (2002.04745)",
)
_PLAIN_INIT = ("plain_normal", "fan_in")

for _name, _placement in {
    "pre": Placement("x + f(N(x))", "Xiong et al. 2020, 2002.04745; Llama", _in_every_layer(_PRE)),
    "post": Placement(
        "N(x + f(x))",
        "Vaswani et al. 2017, 1706.03762",
        _in_every_layer(_POST),
        final_norm=False,
        conditions=(_WARMUP,),
    ),
    "reordered": Placement(
        "x + N(f(x))",
        "OLMo 2, 2501.00656; Liu et al. 2021, 2111.09883",
        _in_every_layer(Slots(output=True)),
        conditions=(
            _one_of(
                "model.norm.qk_norm",
                "full",
                "head",
                why="OLMo 2 norms queries and keys as well, which nothing else bounds here",
            ),
            _one_of("model.init", *_PLAIN_INIT, why="OLMo 2 divides no weights (2501.00656)"),
        ),
    ),
    "peri": Placement(
        "x + N(f(N(x)))",
        "Kim et al. 2025, 2502.02732; Gemma 2",
        _in_every_layer(Slots(input=True, output=True)),
    ),
    "scaled": Placement(
        "x + f(N(x) / √ℓ), ℓ = layer + 1",
        "Sun et al. 2025, 2502.05795",
        lambda layer, n_layers: Slots(input=True, s=(layer + 1) ** -0.5),
        conditions=(
            _one_of(
                "model.init",
                *_PLAIN_INIT,
                why="normal divides o_proj and down_proj by √(2L) for the same purpose, and its "
                "code does not do both",
            ),
        ),
    ),
    "deepnorm": Placement(
        "N((2L)^¼ · x + f(x)), L the number of layers",
        "Wang et al. 2022, 2203.00555",
        lambda layer, n_layers: Slots(residual=True, alpha=(2 * n_layers) ** 0.25),
        final_norm=False,
        init_divisor=lambda n_layers: (8 * n_layers) ** 0.25,
        conditions=(
            _one_of(
                "model.init",
                "fan_in",
                why="its division by (8L)^¼ is of Xavier's init (figure 2 of 2203.00555)",
            ),
            _WARMUP,
        ),
    ),
    "rezero": Placement(
        "x + a · f(x), a learned, 0 at the start",
        "Bachlechner et al. 2020, 2003.04887",
        _in_every_layer(Slots(gated=True)),
        final_norm=False,
        conditions=(
            _one_of(
                "model.init",
                *_PLAIN_INIT,
                why="a, 0 at the start, takes the place of smaller weights (2003.04887)",
            ),
        ),
    ),
    "mix": Placement(
        "the first ⌊L/4⌋ layers post, the others pre",
        "Li et al. 2024, 2412.13795",
        lambda layer, n_layers: _POST if layer < n_layers // 4 else _PRE,
        conditions=(
            _one_of("model.init", *_PLAIN_INIT, why="its code divides no weights"),
            _WARMUP,
        ),
    ),
    "hybrid": Placement(
        "y = x + attention of normed q, k, v; N(y) + mlp(N(y))",
        "Zhuo et al. 2025, 2503.04598",
        _in_every_layer(Slots(residual=True, qkv=True, mlp=Slots())),
        conditions=(
            _one_of(
                "model.init", "normal", why="its code divides o_proj and down_proj (full_megatron)"
            ),
            _WARMUP,
        ),
    ),
    "keel": Placement(
        "N(2L · x + f(N(x))), L the number of layers",
        "Chen & Wei 2026, 2601.19895",
        lambda layer, n_layers: Slots(input=True, residual=True, alpha=2.0 * n_layers),
        final_norm=False,
    ),
    "peri_scaled": Placement(
        "x + N(f(N(x))), the outer N's gain 1/√L at the start, L the number of layers",
        "Arcee Trinity; Pangu Ultra, 2504.07866 (with constants over √L)",
        lambda layer, n_layers: Slots(input=True, output=True, output_gain=n_layers**-0.5),
    ),
    "ngpt": Placement(
        "N((1 − a)·x + a·N(f(x))), a learned, all weights normalised after each step",
        "Loshchilov et al. 2024, 2410.01131",
        _in_every_layer(Slots(output=True, residual=True, interpolated=True)),
        final_norm=False,
        unit_weights=True,
        conditions=(
            _one_of("model.norm.kind", "l2norm", why="N(x) is x / ‖x‖ in the paper"),
            _one_of("model.tie_embeddings", False, why="the paper does not tie them"),
            _one_of("optim.weight_decay", 0.0, why="lengths are fixed, so decay has no purpose"),
            _one_of("optim.warmup_steps", 0, why="the paper needs none (section 2.6)"),
        ),
    ),
}.items():
    register_placement(_name, _placement)
