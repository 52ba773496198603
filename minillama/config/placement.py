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

In the formulas ℓ = layer + 1, as the papers count, and L is the number of layers; everywhere else
the first layer is 0.

A placement is one row of :data:`PLACEMENTS`; :func:`register_placement` adds one of yours.  Nothing
here loads torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    gated: bool = False
    """a is learned, one number for each block, 0 at the start."""
    qkv: bool = False
    """Queries, keys and values are normed, each head separately."""
    mlp: Slots | None = None


@dataclass(frozen=True)
class Placement:
    """One row of the table.

    ``slots(layer, n_layers)`` returns the norms and scales of one block, where the first layer is
    0.  ``final_norm`` is whether there is a norm before the head.  ``init_divisor(n_layers)``
    divides the initial weights of the MLP, v_proj and o_proj.
    """

    formula: str
    source: str
    slots: Callable[[int, int], Slots]
    final_norm: bool = True
    init_divisor: Callable[[int], float] = lambda n_layers: 1.0

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
        "x + f(N(x) / √ℓ), ℓ = layer + 1",
        "Sun et al. 2025, 2502.05795",
        lambda layer, n_layers: Slots(input=True, s=(layer + 1) ** -0.5),
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
        lambda layer, n_layers: _POST if layer < n_layers // 4 else _PRE,
    ),
    "hybrid": Placement(
        "y = x + attention of normed q, k, v; N(y) + mlp(N(y))",
        "Zhuo et al. 2025, 2503.04598",
        _in_every_layer(Slots(residual=True, qkv=True, mlp=Slots())),
    ),
}.items():
    register_placement(_name, _placement)
