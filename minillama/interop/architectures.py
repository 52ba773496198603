"""The architectures of transformers and llama.cpp that models here map to, and their weight names.

One row of data per architecture, from which export and import are both derived:

    architecture       norm       placement  qk_norm  affine   llama.cpp
    LlamaForCausalLM   rmsnorm    pre        none     yes      llama
    Qwen3ForCausalLM   rmsnorm    pre        head     yes      qwen3
    Olmo2ForCausalLM   rmsnorm    reordered  full     yes      olmo2
    OlmoForCausalLM    layernorm  pre        none     no       olmo

Half-split RoPE on both sides makes conversion to transformers a renaming.  llama.cpp's ``llama``
and ``olmo`` rotate neighbouring features together, so conversion permutes the rows of q and k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minillama.config import ModelConfig
from minillama.config.placement import PLACEMENTS
from minillama.errors import ConfigError, FieldError

Format = Literal["transformers", "llama.cpp"]

Names = tuple[tuple[str, str, str], ...]
"""Rows of (our name, transformers' name, llama.cpp's name), ``{}`` for the layer, from 0."""

_WEIGHTS: Names = (
    ("embed", "model.embed_tokens", "token_embd"),
    ("lm_head", "lm_head", "output"),
    ("blocks.{}.attention.q_proj", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
    ("blocks.{}.attention.k_proj", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
    ("blocks.{}.attention.v_proj", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
    ("blocks.{}.attention.o_proj", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
    ("blocks.{}.mlp.gate_proj", "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
    ("blocks.{}.mlp.up_proj", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
    ("blocks.{}.mlp.down_proj", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
)
_FINAL_NORM: Names = (("final_norm", "model.norm", "output_norm"),)
_INPUT_NORMS: Names = (
    ("blocks.{}.attention_input_norm", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
    ("blocks.{}.mlp_input_norm", "model.layers.{}.post_attention_layernorm", "blk.{}.ffn_norm"),
)
_OUTPUT_NORMS: Names = (
    (
        "blocks.{}.attention_output_norm",
        "model.layers.{}.post_attention_layernorm",
        "blk.{}.post_attention_norm",
    ),
    (
        "blocks.{}.mlp_output_norm",
        "model.layers.{}.post_feedforward_layernorm",
        "blk.{}.post_ffw_norm",
    ),
)
_QK_NORMS: Names = (
    ("blocks.{}.attention.q_norm", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
    ("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
)

_RMSNORM = {
    "norm.kind": "rmsnorm",
    "norm.options.affine": True,
    "norm.options.unit_offset": False,
    "norm.options.partial": 1.0,
    "norm.options.bias": False,
}
_EVERYWHERE = {
    "norm.qk_unit_offset": False,
    "norm.v_norm": False,
    "norm.embed_norm": False,
    "norm.final_norm": True,
}

CARRIED = frozenset(
    (
        *("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim"),
        *("max_seq_len", "rope_theta", "rope_scaling", "tie_embeddings", "norm"),
        "init",  # has no effect once there are weights
    )
)
"""Fields of ``model`` that every row can represent; any other must be at its default."""


@dataclass(frozen=True)
class Architecture:
    """One row: what a model must be in our terms, and its names elsewhere.

    Attributes:
        model_class: the class in transformers, as in config.json's ``architectures``.
        model_type: config.json's ``model_type``.
        gguf: llama.cpp's ``general.architecture``.
        requires: our config's dotted fields (inside ``model``) and the values they must have.
        names: the names of its weights.
        interleaved: llama.cpp rotates features 2j and 2j + 1 together, so q and k are permuted.
        eps: config.json's key for ε; None where transformers fixes it at ``fixed_eps``.
        gguf_eps: llama.cpp's key for ε, without the architecture in front.
        heads_divide_dim: transformers requires it, though head_dim may be anything.
        defaults: values of keys absent from config.json, where they differ from ``DEFAULTS``.
        scales_frequencies: llama.cpp takes factors per frequency (Llama 3's RoPE scaling).
        free_head_dim: llama.cpp allows heads whose features do not add up to ``dim``.
        needs_head: llama.cpp requires a head even where it is the embedding.
    """

    model_class: str
    model_type: str
    gguf: str
    requires: Mapping[str, Any]
    names: Names
    interleaved: bool = False
    eps: str | None = "rms_norm_eps"
    fixed_eps: float = 0.0
    gguf_eps: str = "attention.layer_norm_rms_epsilon"
    heads_divide_dim: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    scales_frequencies: bool = False
    free_head_dim: bool = True
    needs_head: bool = False


ARCHITECTURES = (
    Architecture(
        "LlamaForCausalLM",
        "llama",
        "llama",
        {**_RMSNORM, "norm.placement": "pre", "norm.qk_norm": "none", **_EVERYWHERE},
        _WEIGHTS + _INPUT_NORMS + _FINAL_NORM,
        interleaved=True,
        heads_divide_dim=True,
        scales_frequencies=True,
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        "qwen3",
        {**_RMSNORM, "norm.placement": "pre", "norm.qk_norm": "head", **_EVERYWHERE},
        _WEIGHTS + _INPUT_NORMS + _QK_NORMS + _FINAL_NORM,
        defaults={"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    ),
    Architecture(
        "Olmo2ForCausalLM",
        "olmo2",
        "olmo2",
        {**_RMSNORM, "norm.placement": "reordered", "norm.qk_norm": "full", **_EVERYWHERE},
        _WEIGHTS + _OUTPUT_NORMS + _QK_NORMS + _FINAL_NORM,
        defaults={"rms_norm_eps": 1e-5},
        free_head_dim=False,
        needs_head=True,
    ),
    Architecture(
        "OlmoForCausalLM",
        "olmo",
        "olmo",
        {
            "norm.kind": "layernorm",
            "norm.options.affine": False,
            "norm.placement": "pre",
            "norm.qk_norm": "none",
            **_EVERYWHERE,
        },
        _WEIGHTS,
        interleaved=True,
        eps=None,
        fixed_eps=1e-5,
        gguf_eps="attention.layer_norm_epsilon",
        free_head_dim=False,
    ),
)

DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
"""transformers' values of keys that a config.json leaves out."""


def architecture_of(config: ModelConfig, target: Format) -> Architecture:
    """Return the architecture that computes what a model of ``config`` computes.

    Raises:
        ConfigError: ``target`` has none; the message lists how each differs.
    """
    found: list[tuple[Architecture, list[FieldError]]] = []
    for row in ARCHITECTURES:
        errors = list(_differences(row, config, target))
        if not errors:
            return row
        found.append((row, errors))
    found.sort(key=lambda pair: len(pair[1]))  # the nearest first
    lines = [
        f"  {row.model_class if target == 'transformers' else row.gguf}: "
        + "; ".join(f"{error.path} = {error.value!r}, {error.rule}" for error in errors)
        for row, errors in found
    ]
    raise ConfigError(
        f"{target} has no architecture that computes what this model computes:\n"
        + "\n".join(lines),
        [error for _, errors in found for error in errors],
    )


def _differences(row: Architecture, config: ModelConfig, target: Format) -> Iterator[FieldError]:
    for path, needed in row.requires.items():
        value = _value_at(config, path)
        # An option that this kind of norm lacks is not reported: the kind itself is.
        if value not in (needed, None):
            yield FieldError(f"model.{path}", value, f"not {needed!r}")
    for name, info in ModelConfig.model_fields.items():
        if name not in CARRIED and getattr(config, name) != info.default:
            yield FieldError(f"model.{name}", getattr(config, name), f"not {info.default!r}")
    if target == "transformers":
        if row.eps is None and config.norm.eps != row.fixed_eps:
            yield FieldError("model.norm.eps", config.norm.eps, f"fixed at {row.fixed_eps} there")
        if row.heads_divide_dim and config.dim % config.n_heads:
            yield FieldError(
                "model.dim", config.dim, f"not divisible by n_heads = {config.n_heads}"
            )
        return
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "llama3" and not row.scales_frequencies:
        yield FieldError("model.rope_scaling.kind", scaling.kind, "not supported there")
    if not row.free_head_dim and config.head_dim * config.n_heads != config.dim:
        rule = f"not dim / n_heads = {config.dim} / {config.n_heads}"
        yield FieldError("model.head_dim", config.head_dim, rule)


def _value_at(config: ModelConfig, path: str) -> Any:
    """Return the field at a dotted ``path``; None for an option that this kind of norm lacks."""
    if path == "norm.final_norm" and config.norm.final_norm is None:
        return PLACEMENTS.get(config.norm.placement).final_norm
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key)
    return value


def norm_section(row: Architecture, eps: float) -> dict[str, Any]:
    """Return the ``norm`` section of a config that :func:`architecture_of` maps to ``row``."""
    norm: dict[str, Any] = {"eps": eps, "options": {}}
    for path, value in row.requires.items():
        *parents, leaf = path.split(".")[1:]
        (norm["options"] if parents else norm)[leaf] = value
    if norm["final_norm"] == PLACEMENTS.get(norm["placement"]).final_norm:
        del norm["final_norm"]  # so that it follows if the placement is changed
    return norm


def weight_names(row: Architecture, config: ModelConfig, target: Format) -> dict[str, str]:
    """Return the name in ``target`` of every weight of a model of ``config``, by our name.

    The head is left out where it is the embedding.
    """
    column = 1 if target == "transformers" else 2
    return {
        f"{names[0].format(layer)}.weight": f"{names[column].format(layer)}.weight"
        for names in row.names
        for layer in (range(config.n_layers) if "{}" in names[0] else (0,))
        if not (names[0] == "lm_head" and config.tie_embeddings)
    }
