import re
from typing import Any

import pytest

from minillama.config import ModelConfig
from minillama.config.norms import NORM_KINDS, NormConfig
from minillama.errors import ConfigError
from minillama.interop.architectures import (
    ARCHITECTURES,
    CARRIED,
    architecture_of,
    norm_section,
    weight_names,
)
from minillama.model.transformer import Transformer

SHAPE = {"vocab_size": 11, "dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1}
rows = pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.gguf)


def model(norm: dict[str, Any], **fields: Any) -> ModelConfig:
    return ModelConfig.model_validate(SHAPE | {"norm": norm} | fields)


@rows
def test_a_row_is_found_by_the_norm_it_requires(row):
    config = model(norm_section(row, 1e-5))
    assert architecture_of(config, "transformers") is row
    assert architecture_of(config, "llama.cpp") is row


@rows
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("target", ["transformers", "llama.cpp"])
def test_the_names_are_those_of_every_weight_each_once(row, tied, target):
    config = model(norm_section(row, 1e-5), tie_embeddings=tied)
    names = weight_names(row, config, target)
    assert set(names) == set(Transformer(config).state_dict())
    assert len(set(names.values())) == len(names)


def reasons(target: str, norm: dict[str, Any], **fields: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        architecture_of(model(norm, **fields), target)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == len(ARCHITECTURES)
    return dict(re.fullmatch(r"  (\w+): (.*)", line).groups() for line in lines)


@pytest.mark.parametrize(
    ("norm", "fields", "path"),
    [
        ({"placement": "post"}, {}, "model.norm.placement = 'post'"),
        ({"placement": "peri"}, {}, "model.norm.placement = 'peri'"),
        ({"kind": "none"}, {}, "model.norm.kind = 'none'"),
        ({"kind": "layernorm"}, {}, "model.norm.kind = 'layernorm'"),
        ({"qk_norm": "full"}, {}, "model.norm.qk_norm = 'full'"),
        ({"embed_norm": True}, {}, "model.norm.embed_norm = True"),
        ({"final_norm": False}, {}, "model.norm.final_norm = False"),
        ({"options": {"partial": 0.5}}, {}, "model.norm.options.partial = 0.5"),
        ({"options": {"unit_offset": True}}, {}, "model.norm.options.unit_offset = True"),
        ({"options": {"affine": False}}, {}, "model.norm.options.affine = False"),
        ({"options": {"bias": True}}, {}, "model.norm.options.bias = True"),
        ({"v_norm": True}, {}, "model.norm.v_norm = True"),
        ({}, {"attention_gate": "head"}, "model.attention_gate = 'head'"),
        ({}, {"logit_softcap": 30.0}, "model.logit_softcap = 30.0"),
        ({}, {"embed_scale": "fixed"}, "model.embed_scale = 'fixed'"),
    ],
)
@pytest.mark.parametrize("target", ["transformers", "llama.cpp"])
def test_a_model_without_an_architecture_is_refused_with_the_field(norm, fields, path, target):
    llama = "LlamaForCausalLM" if target == "transformers" else "llama"
    assert path in reasons(target, norm, **fields)[llama]


def test_every_reason_is_listed_and_the_nearest_architecture_comes_first():
    norm = {"placement": "post", "embed_norm": True, "options": {"partial": 0.5}}
    found = reasons("transformers", norm)
    assert next(iter(found)) == "LlamaForCausalLM"
    assert found["LlamaForCausalLM"] == (
        "model.norm.options.partial = 0.5, not 1.0; model.norm.placement = 'post', not 'pre'; "
        "model.norm.embed_norm = True, not False; model.norm.final_norm = False, not True"
    )
    assert "model.norm.qk_norm = 'none', not 'head'" in found["Qwen3ForCausalLM"]


def test_what_only_one_format_lacks_is_refused_only_there():
    weightless = {"kind": "layernorm", "options": {"affine": False}, "eps": 1e-6}
    assert "fixed at 1e-05 there" in reasons("transformers", weightless)["OlmoForCausalLM"]
    assert architecture_of(model(weightless), "llama.cpp").gguf == "olmo"

    uneven = {"dim": 18, "n_heads": 4, "head_dim": 8}
    assert (
        "not divisible by n_heads = 4" in reasons("transformers", {}, **uneven)["LlamaForCausalLM"]
    )
    assert architecture_of(model({}, **uneven), "llama.cpp").gguf == "llama"

    scaled = {"rope_scaling": {"kind": "llama3"}}
    qwen3 = {"qk_norm": "head"}
    assert "rope_scaling.kind" in reasons("llama.cpp", qwen3, **scaled)["qwen3"]
    assert architecture_of(model(qwen3, **scaled), "transformers").gguf == "qwen3"

    olmo2 = {"placement": "reordered", "qk_norm": "full"}
    assert "model.head_dim = 4" in reasons("llama.cpp", olmo2, head_dim=4)["olmo2"]


@rows
def test_no_field_of_the_config_can_be_lost_unnoticed(row):
    """Whoever adds a field must say here how it is exported."""
    required = {path.removeprefix("norm.") for path in row.requires}
    assert set(NormConfig.model_fields) - {"eps", "options"} <= required
    options = {name.removeprefix("options.") for name in required if name.startswith("options.")}
    if row.gguf == "olmo":
        options.add("bias")  # of no effect where there is no gain
    assert set(NORM_KINDS.get(row.requires["norm.kind"]).options.model_fields) == options
    assert set(ModelConfig.model_fields) >= CARRIED
