from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from minillama.config import ModelConfig
from minillama.errors import CheckpointError
from minillama.interop import hf_config
from minillama.interop.architectures import ARCHITECTURES, architecture_of, norm_section

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 4,
}

scalings = st.one_of(
    st.none(),
    st.fixed_dictionaries({"kind": st.just("linear"), "factor": st.floats(1, 64)}),
    st.fixed_dictionaries(
        {
            "kind": st.just("llama3"),
            "factor": st.floats(1, 64),
            "low_freq_factor": st.floats(0.5, 2),
            "high_freq_factor": st.floats(3, 8),
            "original_max_seq_len": st.integers(1, 9000),
        }
    ),
)


def read(raw: dict[str, Any]) -> ModelConfig:
    return hf_config.read(raw, "config.json")[0]


@given(
    row=st.sampled_from(ARCHITECTURES),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3)]),
    head_dim=st.sampled_from([2, 8, 24]),
    scaling=scalings,
    theta=st.floats(1, 1e6),
    eps=st.floats(0, 1e-3),
    tied=st.booleans(),
)
def test_what_is_written_is_read_back(row, heads, head_dim, scaling, theta, eps, tied):
    config = ModelConfig.model_validate(
        {
            "vocab_size": 77,
            "dim": 24,
            "n_heads": heads[0],
            "n_kv_heads": heads[1],
            "head_dim": head_dim,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "tie_embeddings": tied,
            "norm": norm_section(row, row.fixed_eps or eps),
        }
    )
    raw = hf_config.write(config, row)
    assert hf_config.read(raw, "config.json") == (config, row)
    # transformers 4 knew no rope_parameters.
    older = {key: value for key, value in raw.items() if key != "rope_parameters"}
    assert hf_config.read(older, "config.json") == (config, row)


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.gguf)
def test_missing_keys_have_the_defaults_of_transformers(row):
    """Only keys that no one leaves out are set; the defaults of the others must be theirs."""
    raw = LLAMA | {"architectures": [row.model_class], "model_type": row.model_type}
    if row.model_type == "qwen3":
        raw |= {"num_attention_heads": 64}
    theirs = transformers.AutoConfig.for_model(**raw)
    ours = read(raw)
    assert ours.n_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.max_seq_len == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.norm.eps == getattr(theirs, "rms_norm_eps", 1e-5)
    assert architecture_of(ours, "transformers") is row


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (LLAMA, {"attention_bias": True}, "attention_bias = True: not supported"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias = True: not supported"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu': only 'silu'"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window = 4096: sliding windows"),
        (QWEN3, {"use_sliding_window": True}, "sliding_window = 4096: sliding windows"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 2}, "layer_types = "),
        (LLAMA, {"num_local_experts": 8}, "num_local_experts = 8: not supported"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config = "),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: only 1.0"),
        (LLAMA, {"clip_qkv": 8.0}, "clip_qkv = 8.0: not supported"),
        (LLAMA, {"auto_map": {"AutoModel": "evil.Model"}}, "auto_map = "),
        (
            LLAMA,
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_type = 'yarn': not one of",
        ),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor = None: is missing"),
        (LLAMA, {"rope_scaling": [1]}, "rope_scaling = [1]: is not a mapping"),
        (
            LLAMA,
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters.full_attention = ",
        ),
        (LLAMA, {"num_attention_heads": 5}, "hidden_size = 32: is not divisible by n_heads = 5"),
        (LLAMA, {"hidden_size": None}, "hidden_size = None: is missing"),
        (LLAMA, {"num_hidden_layers": -1}, "num_hidden_layers = -1: should be greater than 0"),
        (LLAMA, {"rms_norm_eps": "x"}, "rms_norm_eps = 'x': "),
        (LLAMA, {"model_type": "mistral"}, "model_type = 'mistral': must be one"),
        (LLAMA, {"model_type": ["llama"]}, "model_type = ['llama']: must be one"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures = "),
    ],
)
def test_what_cannot_be_imported_is_named(base, change, named):
    with pytest.raises(CheckpointError) as caught:
        read(base | change)
    assert named in str(caught.value)


def test_all_errors_are_reported_at_once():
    with pytest.raises(CheckpointError) as caught:
        read(LLAMA | {"mlp_bias": True, "hidden_act": "relu", "vocab_size": 0})
    assert all(key in str(caught.value) for key in ("mlp_bias", "hidden_act", "vocab_size"))


def test_keys_that_are_off_or_harmless_are_accepted():
    harmless = {
        "attention_bias": False,
        "rope_interleaved": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "some_new_feature": None,
        "_name_or_path": "x",
        "transformers_version": "4.44.0",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    assert read(QWEN3 | harmless) == read(QWEN3)
