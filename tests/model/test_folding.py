"""A folded model gives the logits of the one it was folded from."""

import itertools

import pytest
import torch

from minillama.config import ModelConfig
from minillama.model.folding import fold_scales
from minillama.model.transformer import Transformer

TOKENS = torch.randint(53, (2, 16), generator=torch.Generator().manual_seed(0))


def build(**changes):
    shape = {"vocab_size": 53, "dim": 24, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2}
    config = ModelConfig.model_validate({**shape, "max_seq_len": 16, "init": "fan_in", **changes})
    model = Transformer(config, seed=1).double()
    generator = torch.Generator().manual_seed(2)
    for weight in model.parameters():
        if weight.ndim < 2:
            weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return model


OPTIONS = (
    {"unit_offset": True},
    {"affine": False},
    {"affine": False, "bias": True},
    {"bias": True},
)


@pytest.mark.parametrize(
    ("options", "placement", "embed_scale", "tied"),
    list(itertools.product(OPTIONS, ("pre", "scaled", "peri"), ("none", "learned"), (True, False))),
)
@torch.no_grad()
def test_logits_are_equal_and_the_scales_are_plain(options, placement, embed_scale, tied):
    norm = {"options": options, "placement": placement, "qk_norm": "head", "qk_unit_offset": True}
    model = build(norm=norm, embed_scale=embed_scale, tie_embeddings=tied)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    folded = fold_scales(model)
    torch.testing.assert_close(folded(TOKENS), model(TOKENS), rtol=1e-10, atol=1e-10)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    config = folded.config
    assert (config.embed_scale, config.norm.qk_unit_offset) == ("none", False)
    assert (config.norm.options["affine"], config.norm.options["unit_offset"]) == (True, False)
    assert config.norm.placement == ("peri" if placement == "peri" else "pre")
    assert config.tie_embeddings == (tied and embed_scale == "none")


@pytest.mark.parametrize("placement", ["hybrid", "rezero", "ngpt", "post"])
@torch.no_grad()
def test_gains_are_folded_in_every_placement(placement):
    model = build(norm={"options": {"unit_offset": True}, "placement": placement})
    folded = fold_scales(model)
    assert folded is not model
    torch.testing.assert_close(folded(TOKENS), model(TOKENS), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "norm", [{}, {"kind": "layernorm", "placement": "scaled"}, {"kind": "dyt"}], ids=str
)
def test_a_model_with_nothing_to_fold_is_returned(norm):
    model = build(norm=norm)
    assert fold_scales(model) is model
