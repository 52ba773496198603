"""Where the norms stand around a sub-layer f (attention or MLP), as data.

Every placement is one formula with some slots left empty:

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

ℓ counts layers from 1, L is their number.  A placement of your own is one more row:
``register_placement``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minillama.config import norms as norm_config
from minillama.registry import Registry


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
    """Queries, keys and values are normed, each head on its own."""
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


PLACEMENTS: Registry[Placement] = Registry(norm_config.PLACEMENTS.what)


def register_placement(name: str, placement: Placement) -> None:
    """Add a row to the table, under a name that configs may use.

    Raises:
        ConfigError: the name is taken.
    """
    PLACEMENTS.register(name, placement)
    if name not in norm_config.PLACEMENTS:
        norm_config.PLACEMENTS.register(name, placement.formula)


def _everywhere(slots: Slots) -> Callable[[int, int], Slots]:
    return lambda layer, n_layers: slots


_PRE, _POST = Slots(input=True), Slots(residual=True)


def _row(
    name: str,
    source: str,
    slots: Slots | Callable[[int, int], Slots],
    *,
    final_norm: bool = True,
    init_divisor: Callable[[int], float] = lambda n_layers: 1.0,
) -> None:
    by_layer = _everywhere(slots) if isinstance(slots, Slots) else slots
    formula = norm_config.PLACEMENTS.get(name)
    register_placement(name, Placement(formula, source, by_layer, final_norm, init_divisor))


_row("pre", "Xiong et al. 2020, 2002.04745; Llama", _PRE)
_row("post", "Vaswani et al. 2017, 1706.03762", _POST, final_norm=False)
_row("reordered", "OLMo 2, 2501.00656; Liu et al. 2021, 2111.09883", Slots(output=True))
_row("peri", "Kim et al. 2025, 2502.02732; Gemma 2", Slots(input=True, output=True))
_row(
    "scaled",
    "Sun et al. 2025, 2502.05795",
    lambda layer, n_layers: Slots(input=True, s=layer**-0.5),
)
_row(
    "deepnorm",
    "Wang et al. 2022, 2203.00555",
    lambda layer, n_layers: Slots(residual=True, alpha=(2 * n_layers) ** 0.25),
    final_norm=False,
    init_divisor=lambda n_layers: (8 * n_layers) ** 0.25,
)
_row("rezero", "Bachlechner et al. 2020, 2003.04887", Slots(gated=True), final_norm=False)
_row(
    "mix",
    "Li et al. 2024, 2412.13795",
    lambda layer, n_layers: _POST if layer <= n_layers // 4 else _PRE,
)
_row("hybrid", "Zhuo et al. 2025, 2503.04598", Slots(residual=True, qkv=True, mlp=Slots()))
