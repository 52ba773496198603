"""To and from the model shape in transformers' config.json.

``read`` takes the keys of transformers 5 (``rope_parameters``, ``dtype``) and of 4 (``rope_theta``,
``rope_scaling``, ``torch_dtype``); ``write`` writes those of 5, and of 4 where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from minillama.config.model import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from minillama.errors import CheckpointError, FieldError
from minillama.interop.architectures import ARCHITECTURES, DEFAULTS, Architecture, norm_section
from minillama.interop.importing import check_model

MODEL_FIELDS: tuple[tuple[str, str], ...] = (
    ("vocab_size", "vocab_size"),
    ("dim", "hidden_size"),
    ("n_layers", "num_hidden_layers"),
    ("n_heads", "num_attention_heads"),
    ("n_kv_heads", "num_key_value_heads"),
    ("head_dim", "head_dim"),
    ("ffn_dim", "intermediate_size"),
    ("max_seq_len", "max_position_embeddings"),
    ("tie_embeddings", "tie_word_embeddings"),
)
"""Our field of ``model`` and config.json's."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)

_LLAMA3_FIELDS: tuple[tuple[str, str], ...] = (
    ("factor", "factor"),
    ("low_freq_factor", "low_freq_factor"),
    ("high_freq_factor", "high_freq_factor"),
    ("original_max_seq_len", "original_max_position_embeddings"),
)

_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
"""Keys that must have this value, since every model here computes so."""

_HARMLESS = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "transformers.js_config"),
        *("dtype", "torch_dtype", "initializer_range", "attention_dropout", "pretraining_tp"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class", "is_llama_config"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("id2label", "label2id", "num_labels", "problem_type", "chunk_size_feed_forward"),
        *("max_length", "num_beams", "num_return_sequences", "temperature", "top_k", "top_p"),
        *("repetition_penalty", "length_penalty", "typical_p", "num_beam_groups"),
    )
)
"""Keys that have no effect on what a model computes."""

_READ_ELSEWHERE = frozenset(
    (
        *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
        *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    )
)


def write(config: ModelConfig, row: Architecture) -> dict[str, Any]:
    """Return the keys of config.json that describe the shape of ``config``."""
    shape = {theirs: getattr(config, ours) for ours, theirs in MODEL_FIELDS}
    if row.eps is not None:
        shape[row.eps] = config.norm.eps
    rope: dict[str, Any] = {"rope_type": "default"}
    if isinstance(config.rope_scaling, LinearRopeScaling):
        rope = {"rope_type": "linear", "factor": config.rope_scaling.factor}
    elif isinstance(config.rope_scaling, Llama3RopeScaling):
        scaling = config.rope_scaling
        rope = {"rope_type": "llama3"}
        rope |= {theirs: getattr(scaling, ours) for ours, theirs in _LLAMA3_FIELDS}
    return {
        "architectures": [row.model_class],
        "model_type": row.model_type,
        **shape,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,  # transformers 4 reads these two
        "rope_scaling": None if config.rope_scaling is None else rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def read(raw: Mapping[str, Any], where: str) -> tuple[ModelConfig, Architecture]:
    """Return the model that a config.json describes, and its architecture.

    Raises:
        CheckpointError: its architecture is not supported, it has a feature that no model here has,
            or a value that is out of range; the message names every one, and the file ``where``.
    """
    row = _row_of(raw, where)
    errors = [FieldError(key, None, "is missing") for key in _REQUIRED if raw.get(key) is None]
    errors += _unsupported(raw, row)
    rope = _rope(raw, errors)
    defaults = {**DEFAULTS, **row.defaults}
    shape = {ours: raw.get(theirs, defaults.get(theirs)) for ours, theirs in MODEL_FIELDS}
    eps = row.fixed_eps if row.eps is None else raw.get(row.eps, defaults[row.eps])
    known = {key: value for key, value in shape.items() if value is not None}
    section = {**known, **rope, "norm": norm_section(row, eps)}
    theirs_of = {**dict(MODEL_FIELDS), "norm.eps": row.eps or ""}
    return check_model(section, theirs_of, errors, where), row


def _row_of(raw: Mapping[str, Any], where: str) -> Architecture:
    by_type = {row.model_type: row for row in ARCHITECTURES}
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in by_type:
        raise CheckpointError(
            f"{where}: model_type = {model_type!r}: must be one of {', '.join(by_type)}"
        )
    row = by_type[model_type]
    architectures = raw.get("architectures") or [row.model_class]
    if architectures != [row.model_class]:
        raise CheckpointError(
            f"{where}: architectures = {architectures!r}; only {row.model_class} can be imported"
        )
    return row


def _unsupported(raw: Mapping[str, Any], row: Architecture) -> Iterator[FieldError]:
    """Yield the keys that ask for features that no model here has.

    An unknown key counts as switched off where its value is null, false, 0 or empty.
    """
    known = {theirs for _, theirs in MODEL_FIELDS} | _HARMLESS | _READ_ELSEWHERE | {row.eps}
    for key, value in raw.items():
        if key in _FIXED:
            if value not in (None, _FIXED[key]):
                yield FieldError(key, value, f"only {_FIXED[key]!r} is supported")
        elif value and key not in known and not key.startswith("_"):
            yield FieldError(key, value, "not supported; it may change what the model computes")
    if raw.get("layer_types") and any(kind != "full_attention" for kind in raw["layer_types"]):
        yield FieldError("layer_types", raw["layer_types"], "only full_attention is supported")
    has_switch = "use_sliding_window" in raw or row.model_type == "qwen3"
    window = raw.get("sliding_window", 4096 if raw.get("use_sliding_window") else None)
    if window and raw.get("use_sliding_window", not has_switch):
        yield FieldError("sliding_window", window, "sliding windows are not supported")


_ROPE_KINDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "default": (),
    "linear": (("factor", "factor"),),
    "llama3": _LLAMA3_FIELDS,
}


def _rope(raw: Mapping[str, Any], errors: list[FieldError]) -> dict[str, Any]:
    """Return ``rope_theta`` and ``rope_scaling`` of our config; add errors to ``errors``."""
    where = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = raw.get(where) or {}
    if not isinstance(rope, Mapping):
        errors.append(FieldError(where, rope, "is not a mapping"))
        return {}
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    ours = {"rope_theta": DEFAULTS["rope_theta"] if theta is None else theta}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in _ROPE_KINDS:
        errors.append(
            FieldError(f"{where}.rope_type", kind, f"not one of {', '.join(_ROPE_KINDS)}")
        )
        return ours
    fields = _ROPE_KINDS[kind]
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= {theirs for _, theirs in fields}
    for key, value in rope.items():
        unused = kind == "default" and not isinstance(value, Mapping)  # as transformers has it
        if key == "partial_rotary_factor" and value not in (None, 1.0):
            errors.append(FieldError(f"{where}.{key}", value, "only 1.0 is supported"))
        elif value is not None and key not in known and not unused:
            errors.append(
                FieldError(f"{where}.{key}", value, f"not supported with rope_type {kind}")
            )
    if kind == "default":
        return ours
    given = dict(rope)
    if kind == "llama3":
        context = raw.get("max_position_embeddings")
        given.setdefault("original_max_position_embeddings", context)
        given["original_max_position_embeddings"] = raw.get(
            "original_max_position_embeddings", given["original_max_position_embeddings"]
        )
    missing = [theirs for _, theirs in fields if given.get(theirs) is None]
    errors += [FieldError(f"{where}.{key}", None, "is missing") for key in missing]
    scaling = {mine: given[theirs] for mine, theirs in fields if theirs not in missing}
    return {**ours, "rope_scaling": None if missing else {"kind": kind, **scaling}}
