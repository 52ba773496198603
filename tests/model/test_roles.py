import pytest

from minillama.config import ModelConfig
from minillama.model.roles import parameter_roles
from minillama.model.transformer import Transformer


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_the_role_that_its_name_says(tied):
    model = Transformer(
        ModelConfig(
            vocab_size=11,
            dim=8,
            n_layers=1,
            n_heads=2,
            tie_embeddings=tied,
            embed_scale="learned",
            norm={"kind": "dyt", "qk_norm": "head"},
        )
    )
    roles = parameter_roles(model)
    assert roles.keys() == dict(model.named_parameters()).keys()
    expected = {
        "embed.weight": "embed",
        "embed_scale": "other",
        "blocks.0.attention.q_proj.weight": "hidden",
        "blocks.0.mlp.down_proj.weight": "hidden",
        "blocks.0.attention.q_norm.weight": "gains",
        "blocks.0.mlp_input_norm.alpha": "other",
        "final_norm.weight": "gains",
        "final_norm.bias": "shifts",
    } | ({} if tied else {"lm_head.weight": "head"})
    assert {name: roles[name] for name in expected} == expected
    assert ("head" in roles.values()) != tied
