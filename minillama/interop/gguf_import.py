"""From llama.cpp's GGUF: the way back of :mod:`minillama.interop.gguf`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minillama.config import ModelConfig
from minillama.config.loading import check
from minillama.data.imported_tokenizers import NoTokenizer
from minillama.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from minillama.errors import CheckpointError, ConfigError, FieldError, TokenizerError
from minillama.interop.architectures import (
    ARCHITECTURES,
    Architecture,
    norm_section,
    weight_names,
)
from minillama.interop.arrivals import build, refuse_misfits, save_imported, shapes_of
from minillama.interop.gguf import MODEL_KEYS, is_turned, part
from minillama.interop.gguf_file import GGUFFile, read_header
from minillama.interop.hf_tokenizer import byte_pieces
from minillama.interop.pieces import Kind, Piece, write_pieces
from minillama.model.transformer import Transformer

_OPTIONAL = ("vocab_size", "n_kv_heads", "head_dim")
_ROPE_KEYS = ("rope.freq_base", "rope.scaling.type", "rope.scaling.factor")


def import_model(file: str | Path, out: str | Path) -> str:
    """Write a GGUF file as a checkpoint; return what to tell the user.

    Matrices of f32, f16, bf16 and q8_0 can be read; they become float32.

    Args:
        file: of one of the architectures that can be exported.
        out: the new checkpoint; a folder that is there must be empty.

    Raises:
        ConfigError: there is no such file, or ``out`` is not empty.
        CheckpointError: something in the file is damaged, unknown or not supported; it is named.
        RunFolderError: ``out`` cannot be written.
    """
    file = Path(file)
    if not file.is_file():
        raise ConfigError(f"no such file: {file}")
    header = read_header(file)
    try:
        config, row = _read_config(header)
        tokenizer = _read_tokenizer(header.metadata) or NoTokenizer(config.vocab_size)
    except (TokenizerError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from None
    return save_imported(Path(out), file.stem, _read_model(header, config, row), tokenizer, row)


def _read_config(header: GGUFFile) -> tuple[ModelConfig, Architecture]:
    rows = {row.gguf: row for row in ARCHITECTURES}
    name = header.metadata.get("general.architecture")
    if name not in rows:
        raise ValueError(f"general.architecture = {name!r}; can be imported: {', '.join(rows)}")
    row = rows[name]
    prefix = f"{name}."
    raw = {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}
    faults = list(_faults(raw, row, header))
    shape = {ours: raw[theirs] for ours, theirs in MODEL_KEYS if raw.get(theirs) is not None}
    embedding = header.tensors.get("token_embd.weight")
    shape["vocab_size"] = embedding.shape[0] if embedding else None
    scaling = {"kind": "linear", "factor": raw.get("rope.scaling.factor")}
    shape["rope_scaling"] = scaling if raw.get("rope.scaling.type") == "linear" else None
    shape["rope_theta"] = raw.get("rope.freq_base", 10_000.0)
    shape["tie_embeddings"] = _is_tied(header, row)
    shape["norm"] = norm_section(row, _short(raw.get(row.gguf_eps)))
    try:
        config = check(ModelConfig, shape, str(header.path))
    except ConfigError as error:
        theirs_of = {**dict(MODEL_KEYS), "norm.eps": row.gguf_eps}
        faults += [
            FieldError(theirs_of.get(f.path, f.path), f.value, f.rule) for f in error.field_errors
        ]
    if faults:
        raise CheckpointError(
            f"not a model that can be imported: {ConfigError.of(str(header.path), faults)}"
        )
    return config.resolve(), row


def _short(value: Any) -> Any:
    """Return a float32's shortest decimal, so that 1e-6 comes back as 1e-6."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _faults(raw: Mapping[str, Any], row: Architecture, header: GGUFFile) -> Iterator[FieldError]:
    """Yield the keys that are missing, or that say what no model here can do."""
    known = {theirs for _, theirs in MODEL_KEYS}
    for ours, theirs in MODEL_KEYS:
        if theirs not in raw and ours not in _OPTIONAL:
            yield FieldError(theirs, None, "is missing")
    for key, value in raw.items():
        if value and key not in known and key not in (row.gguf_eps, *_ROPE_KEYS):
            yield FieldError(key, value, "not supported; it may change what the model computes")
    if raw.get("rope.scaling.type", "none") not in ("none", "linear"):
        yield FieldError("rope.scaling.type", raw["rope.scaling.type"], "only linear is supported")
    sizes = {raw[theirs] for ours, theirs in MODEL_KEYS if ours == "head_dim" and theirs in raw}
    if len(sizes) > 1:
        yield FieldError(
            "attention.key_length", sorted(sizes), "keys, values and RoPE must be alike"
        )
    if "rope_freqs.weight" in header.tensors:
        rule = "GGUF does not say which scaling of RoPE it comes from; import the original"
        yield FieldError("rope_freqs.weight", "a tensor", rule)


def _is_tied(header: GGUFFile, row: Architecture) -> bool:
    """Tell whether the head is the embedding; where llama.cpp wants both, they are compared."""
    if "output.weight" not in header.tensors:
        return True
    head, embedding = (header.tensors.get(n) for n in ("output.weight", "token_embd.weight"))
    if not row.needs_head or not head or not embedding or head.shape != embedding.shape:
        return False
    return np.array_equal(header.read("output.weight"), header.read("token_embd.weight"))


def _read_model(header: GGUFFile, config: ModelConfig, row: Architecture) -> Transformer:
    shapes = shapes_of(config, len(header.tensors), header.path)
    names = weight_names(row, config, "llama.cpp")
    optional = {"output.weight"} if row.needs_head and config.tie_embeddings else set()
    faults = [f"{theirs} is missing" for theirs in names.values() if theirs not in header.tensors]
    faults += [
        f"{theirs} has no place in the model"
        for theirs in header.tensors
        if theirs not in {*names.values(), *optional}
    ]
    for ours, theirs in names.items():
        info = header.tensors.get(theirs)
        if info is not None and info.shape != shapes[ours]:
            faults.append(f"{theirs} is {info.shape}, the metadata say {shapes[ours]}")
    refuse_misfits(faults, str(header.path))
    weights = {}
    for ours, theirs in names.items():
        array = header.read(theirs)
        if row.interleaved and is_turned(ours):
            array = part(array, config.head_dim)
        weights[ours] = torch.from_numpy(array.copy())
    return build(config, weights)


def _read_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer of a file: sentencepiece's BPE or plain bytes; None if it is another.

    Raises:
        TokenizerError: it is damaged or incomplete.
    """
    key = "tokenizer.ggml."
    kind = metadata.get(f"{key}model")
    texts = metadata.get(f"{key}tokens") or []
    types = metadata.get(f"{key}token_type") or [Kind.NORMAL] * len(texts)
    while types and len(types) == len(texts) and types[-1] == Kind.UNUSED:
        texts, types = texts[:-1], types[:-1]  # rows of the embedding beyond the tokenizer's ids
    if kind == "gpt2" and texts == byte_pieces():
        return ByteTokenizer()
    if kind != "llama":
        return None
    scores = metadata.get(f"{key}scores") or []
    if not len(texts) == len(types) <= len(scores):
        raise TokenizerError("its tokens, their types and their scores are not equally many")
    pieces = [
        Piece(text, float(score), Kind(number))
        for text, score, number in zip(texts, scores, types, strict=False)
    ]
    unk, bos, eos = (
        int(metadata.get(f"{key}{name}_token_id", default))
        for name, default in (("unknown", 0), ("bos", 1), ("eos", 2))
    )
    prefix = bool(metadata.get(f"{key}add_space_prefix", True))
    return SentencePieceTokenizer(write_pieces(pieces, (unk, bos, eos), add_dummy_prefix=prefix))
