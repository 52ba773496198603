"""What each parameter of a model is for; optimizers and parametrizations treat roles differently.

embed    the embedding, which is the head too where they are tied
head     the matrix before the logits
hidden   the matrices of the blocks
gains    γ of a norm (and g of ScaleNorm)
shifts   β of a norm
other    α of DyT and Derf, a of ReZero, learned scales: of the embedding, of an nGPT
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from minillama.model.norms import norm_parameter_names

Role = Literal["embed", "head", "hidden", "gains", "shifts", "other"]

_GAINS = ("weight", "g")


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Return the role of each parameter by its name.

    A parameter of a norm is never a matrix, whatever its shape.  Tied weights are one parameter,
    ``embed``.
    """
    norms = norm_parameter_names(model)
    return {
        name: _role(name, parameter.ndim, in_norm=name in norms)
        for name, parameter in model.named_parameters()
    }


def _role(name: str, ndim: int, *, in_norm: bool) -> Role:
    leaf = name.rpartition(".")[2]
    if in_norm:
        return "gains" if leaf in _GAINS else "shifts" if leaf == "bias" else "other"
    if ndim < 2:
        return "other"
    if name == "embed.weight":
        return "embed"
    return "head" if name == "lm_head.weight" else "hidden"
