from typing import Any

import pytest

from minillama.config import ModelConfig
from minillama.config.norms import NORM_KINDS
from minillama.config.placement import PLACEMENTS
from minillama.model.norms import norm_parameter_names, register_norm
from minillama.model.transformer import Transformer
from minillama.plan.parameters import count_parameters

SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "dim": 24,
    "n_layers": 5,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 40,
}


def by_part(model: Transformer) -> dict[str, int]:
    """Count the parameters of a model that was built."""
    parts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head", "other"), 0)
    norms = norm_parameter_names(model)
    for name, parameter in model.named_parameters():
        if name in norms:
            part = "norms"
        elif ".attention." in name or ".mlp." in name:
            part = "attention" if ".attention." in name else "mlp"
        else:
            part = {"embed.weight": "embedding", "lm_head.weight": "head"}.get(name, "other")
        parts[part] += parameter.numel()
    return parts


@pytest.mark.parametrize("placement", list(PLACEMENTS))
@pytest.mark.parametrize("kind", [*NORM_KINDS])
def test_every_kind_and_placement_is_counted_as_it_is_built(kind: str, placement: str) -> None:
    norm = {"kind": kind, "placement": placement, "embed_norm": True}
    config = ModelConfig.model_validate(SHAPE | {"norm": norm})
    count = count_parameters(config)
    assert vars(count) == by_part(Transformer(config))
    assert count.total == sum(p.numel() for p in Transformer(config).parameters())


@pytest.mark.parametrize(
    "changed",
    [
        {"tie_embeddings": False, "embed_scale": "learned"},
        {"norm": {"qk_norm": "head", "qk_unit_offset": True, "v_norm": True}},
        {"attention_gate": "head"},
        {"attention_gate": "element"},
        {"norm": {"qk_norm": "full", "final_norm": False}},
        {"norm": {"options": {"affine": False}}},
        {"norm": {"options": {"bias": True}}},
        {"head_dim": 10},
    ],
    ids=str,
)
def test_options_are_counted_as_they_are_built(changed: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(SHAPE | changed)
    assert vars(count_parameters(config)) == by_part(Transformer(config))


def test_a_custom_norm_is_counted_without_allocating_its_size() -> None:
    @register_norm("three-gains")
    def build(dim: int) -> Any:
        import torch

        norm = torch.nn.Identity()
        norm.register_parameter("gains", torch.nn.Parameter(torch.ones(3, dim)))
        return norm

    large = SHAPE | {"dim": 1 << 16, "vocab_size": 1 << 24, "norm": {"kind": "three-gains"}}
    count = count_parameters(ModelConfig.model_validate(large))
    assert count.norms == (2 * 5 + 1) * 3 << 16
    assert count.embedding == 1 << 40
