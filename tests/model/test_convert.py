import pytest
import torch

from minillama.config import ModelConfig
from minillama.config.norms import NormConfig
from minillama.errors import ConfigError
from minillama.model.convert import layernorm_to_rmsnorm
from minillama.model.transformer import Transformer


def layernorm_model(**changes):
    norm = {"kind": "layernorm", "options": {"bias": False}, **changes.pop("norm", {})}
    config = ModelConfig(
        vocab_size=53, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, max_seq_len=64,
        norm=NormConfig(**norm), **changes,
    )  # fmt: skip
    model = Transformer(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            # Means far from zero, so that removing them matters.
            weight += 0.3 * torch.randn(weight.shape, generator=generator) + 0.1
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"norm": {"placement": "scaled"}},
        {"norm": {"qk_norm": "head"}},
        {"norm": {"options": {"affine": False}}},
        {"norm": {"options": {"bias": True}}},
        {"embed_scale": "fixed", "logit_softcap": 5.0},
    ],
)
def test_the_converted_model_gives_the_same_logits(changes):
    model = layernorm_model(**changes).double()
    twin = layernorm_to_rmsnorm(model)
    tokens = torch.randint(0, 53, (2, 40), generator=torch.Generator().manual_seed(3))
    assert twin.config.norm.kind == "rmsnorm"
    torch.testing.assert_close(twin(tokens), model(tokens), atol=1e-9, rtol=1e-9)


def test_the_mean_had_to_be_removed():
    """With the weights as they were an RMSNorm model gives other logits: the test can fail."""
    model = layernorm_model()
    twin = layernorm_to_rmsnorm(model)
    tokens = torch.arange(40).view(1, 40)
    weights = dict(model.state_dict())
    weights["lm_head.weight"] = weights["embed.weight"]
    torch.testing.assert_close(twin(tokens), model(tokens), atol=1e-4, rtol=1e-4)
    twin.load_state_dict(weights)
    assert not torch.allclose(twin(tokens), model(tokens), atol=1e-2)


def test_the_original_is_left_as_it_was():
    model = layernorm_model()
    before = {name: w.clone() for name, w in model.state_dict().items()}
    twin = layernorm_to_rmsnorm(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_what_has_no_equivalent_is_refused_with_every_reason():
    model = layernorm_model(norm={"placement": "peri", "embed_norm": True, "options": {}})
    with pytest.raises(ConfigError) as caught:
        layernorm_to_rmsnorm(model)
    message = str(caught.value)
    assert "model.norm.placement = 'peri'" in message
    assert "model.norm.embed_norm" in message
    with pytest.raises(ConfigError, match="is not layernorm"):
        layernorm_to_rmsnorm(layernorm_model(norm={"kind": "rmsnorm", "options": {}}))
