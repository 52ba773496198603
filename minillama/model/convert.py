"""A pre-LayerNorm model as an equivalent pre-RMSNorm one (Jiang 2023, arXiv 2305.14858).

LayerNorm is RMSNorm behind the removal of the mean: ln(x) = rms(x − mean(x)).  The mean of the
residual stream can be removed where the stream is written instead of where it is read, once and for
all, by multiplying each weight that writes to it by (I − 11ᵀ / d).  Then the two norms agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillama.config import ModelConfig
from minillama.config.norms import NormConfig
from minillama.config.placement import PLACEMENTS, Placement, Slots
from minillama.errors import ConfigError, FieldError
from minillama.model.transformer import Transformer


def _only_reads(placement: Placement, n_layers: int) -> bool:
    """Return whether its norms only read the stream, and none of their output is written to it."""
    all_slots = [placement.slots(layer, n_layers) for layer in range(n_layers)]
    return all(slots == Slots(input=True, s=slots.s) for slots in all_slots)


@torch.no_grad()
def layernorm_to_rmsnorm(model: Transformer) -> Transformer:
    """Return an RMSNorm model that computes the same logits, to rounding.

    The embedding is untied, since as a head it must keep the mean that it loses as an embedding.

    Raises:
        ConfigError: the model has another norm or placement; every reason is given.
    """
    weights = model.state_dict()
    errors = _misfits(model.config)
    if errors:
        raise ConfigError.of("no equivalent RMSNorm model", errors)
    config = model.config.model_copy(
        update={
            "tie_embeddings": False,
            "norm": NormConfig(
                **{
                    **model.config.norm.model_dump(),
                    "kind": "rmsnorm",
                    "options": model.config.norm.options,  # affine and bias: rmsnorm has both
                }
            ),
        }
    )
    converted: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name == "embed.weight":
            converted[name] = weight - weight.mean(dim=1, keepdim=True)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            converted[name] = weight - weight.mean(dim=0, keepdim=True)
        else:
            converted[name] = weight
    converted.setdefault("lm_head.weight", weights["embed.weight"])
    twin = Transformer(config).to(model.embed.weight)
    twin.load_state_dict({name: weight.clone() for name, weight in converted.items()})
    return twin


def _misfits(config: ModelConfig) -> list[FieldError]:
    norm = config.norm
    errors = []
    if norm.kind != "layernorm":
        errors.append(FieldError("model.norm.kind", norm.kind, "is not layernorm"))
    if not _only_reads(PLACEMENTS.get(norm.placement), config.n_layers):
        fit = [name for name in PLACEMENTS if _only_reads(PLACEMENTS.get(name), config.n_layers)]
        rule = f"must be one of {', '.join(fit)}; its norms write to the stream"
        errors.append(FieldError("model.norm.placement", norm.placement, rule))
    if norm.embed_norm:
        errors.append(FieldError("model.norm.embed_norm", True, "it writes to the stream"))
    return errors
