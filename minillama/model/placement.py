"""Where the norms stand around a sub-layer f (attention or MLP), as data.

Every placement is one formula with some slots left empty:

    x ← residual_norm(α·x + output_norm(f(s·input_norm(x))))

    placement   input   output  residual   final norm   source
    pre         N                          yes          Xiong 2020; Llama
    post                        N          no           Vaswani 2017
    reordered           N                  yes          OLMo 2; Swin v2
    peri        N       N                  yes          Kim 2025; Gemma 2 ("sandwich", CogView)

A placement of your own is one more row: ``register_placement``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minillama import config
from minillama.registry import Registry


@dataclass(frozen=True)
class Slots:
    """What stands around one sub-layer: which norms, and the two scales s and α."""

    input: bool = False
    output: bool = False
    residual: bool = False
    s: float = 1.0
    alpha: float = 1.0


@dataclass(frozen=True)
class Placement:
    """One row of the table.

    ``slots(layer, n_layers)`` gives the slots around both sub-layers of a block; ``layer`` counts
    from 1.  ``final_norm`` is whether a norm stands before the head.
    """

    formula: str
    source: str
    slots: Callable[[int, int], Slots]
    final_norm: bool = True


PLACEMENTS: Registry[Placement] = Registry(config.PLACEMENTS.what)


def register_placement(name: str, placement: Placement) -> None:
    """Add a row to the table, under a name that configs may use.

    Raises:
        ConfigError: the name is taken.
    """
    PLACEMENTS.register(name, placement)
    if name not in config.PLACEMENTS:
        config.PLACEMENTS.register(name, placement.formula)


def _everywhere(slots: Slots) -> Callable[[int, int], Slots]:
    return lambda layer, n_layers: slots


for _name, _slots, _final, _source in (
    ("pre", Slots(input=True), True, "Xiong et al. 2020, 2002.04745; Llama"),
    ("post", Slots(residual=True), False, "Vaswani et al. 2017, 1706.03762"),
    ("reordered", Slots(output=True), True, "OLMo 2, 2501.00656; Liu et al. 2021, 2111.09883"),
    ("peri", Slots(input=True, output=True), True, "Kim et al. 2025, 2502.02732; Gemma 2"),
):
    register_placement(
        _name, Placement(config.PLACEMENTS.get(_name), _source, _everywhere(_slots), _final)
    )
