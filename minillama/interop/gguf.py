"""To and from llama.cpp's GGUF: one file with the weights, the shape and the vocabulary.

llama.cpp stores a matrix as we do, row by row; only the rows of q and k are permuted, where it
rotates neighbouring features (``Architecture.interleaved``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minillama import __version__
from minillama.config import RunConfig
from minillama.config.model import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from minillama.data.imported_tokenizers import NoTokenizer
from minillama.data.tokenizer import ByteTokenizer, SentencePieceTokenizer
from minillama.data.tokenizer_base import Tokenizer
from minillama.errors import CheckpointError, ConfigError, FieldError, TokenizerError
from minillama.files import atomic_file, explain_write_errors
from minillama.interop.architectures import (
    ARCHITECTURES,
    Architecture,
    architecture_of,
    norm_section,
    weight_names,
)
from minillama.interop.gguf_file import GGUFFile, read_header
from minillama.interop.hf_tokenizer import SPECIAL_NAMES, byte_pieces, exportable_pieces
from minillama.interop.importing import (
    build,
    check_model,
    claim,
    refuse_misfits,
    save_imported,
)
from minillama.interop.sentencepiece_proto import Kind, Piece, write_pieces
from minillama.model.folding import fold_scales
from minillama.model.rope import inverse_frequencies
from minillama.model.sizes import absurd_sizes, misfits
from minillama.model.transformer import Transformer
from minillama.training.checkpoint import load_checkpoint
from minillama.training.checkpoint_folders import resolve_checkpoint

DTYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
"""Types of the matrices; norms are always f32."""

MODEL_KEYS: tuple[tuple[str, str], ...] = (
    ("vocab_size", "vocab_size"),
    ("dim", "embedding_length"),
    ("n_layers", "block_count"),
    ("n_heads", "attention.head_count"),
    ("n_kv_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("head_dim", "attention.value_length"),
    ("head_dim", "rope.dimension_count"),
    ("ffn_dim", "feed_forward_length"),
    ("max_seq_len", "context_length"),
)
"""Our field of ``model`` and llama.cpp's key, without the architecture in front."""

_NEVER_MERGED = "ÿ ÿ"
"""A merge of two bytes 0xFF, which no UTF-8 text has: llama.cpp requires at least one merge."""

_OPTIONAL = ("vocab_size", "n_kv_heads", "head_dim")
_ROPE_KEYS = ("rope.freq_base", "rope.scaling.type", "rope.scaling.factor")


# ------------------------------------------------------------------------------------------- export


def export(checkpoint: str | Path, out: str | Path, dtype: str | None = None) -> str:
    """Write a checkpoint as a GGUF file; return a line for the user.

    Args:
        checkpoint: a checkpoint, or a run folder (its best, else its last checkpoint).
        out: the new file if it ends in .gguf, else the folder to put it in.
        dtype: of the matrices, a key of ``DTYPES``; default f32, as they are trained.

    Raises:
        ConfigError: there is no such checkpoint or dtype, the file exists already, or llama.cpp
            has no model that computes what this one computes; the message has every reason.
        CheckpointError: the checkpoint is damaged.
        RunFolderError: the file cannot be written.
    """
    dtype = dtype or "f32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPES)}")
    folder = resolve_checkpoint(checkpoint)
    model, tokenizer, config = load_checkpoint(folder)
    model = fold_scales(model)
    config = config.model_copy(update={"model": model.config})
    row = architecture_of(config.model, "llama.cpp")
    out = Path(out)
    file = out if out.suffix == ".gguf" else out / f"{config.name}-{dtype}.gguf"
    writer = gguf.GGUFWriter(None, row.gguf)
    _add_shape(writer, config, row, dtype)
    _add_vocabulary(writer, tokenizer, folder, config.model.known_vocab_size)
    for name, array in _tensors(model.state_dict(), config.model, row).items():
        kind = _stored_as(array, dtype)
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    claim(file)
    with explain_write_errors(file), atomic_file(file) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
    return f"{file}: {row.gguf} in {dtype}, {file.stat().st_size:,} bytes; llama-cli -m {file}"


def _add_shape(writer: Any, config: RunConfig, row: Architecture, dtype: str) -> None:
    model = config.model
    writer.add_name(config.name)
    writer.add_description(f"trained with minillama {__version__}")
    writer.add_file_type(DTYPES[dtype][1])
    if dtype == "q8_0":
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for ours, theirs in MODEL_KEYS:
        writer.add_uint32(f"{row.gguf}.{theirs}", getattr(model, ours))
    writer.add_float32(f"{row.gguf}.{row.gguf_eps}", model.norm.eps)
    writer.add_rope_freq_base(model.rope_theta)
    if isinstance(model.rope_scaling, LinearRopeScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(model.rope_scaling.factor)


def _add_vocabulary(writer: Any, tokenizer: Tokenizer, folder: Path, vocab_size: int) -> None:
    """Add a token for each row of the embedding; rows beyond the tokenizer's ids are unused."""
    if isinstance(tokenizer, ByteTokenizer):
        # A byte-level BPE that merges nothing: llama.cpp's sentencepiece would turn spaces into ▁.
        texts = byte_pieces()
        kinds = [Kind.UNKNOWN, Kind.CONTROL, Kind.CONTROL]
        kinds += [Kind.NORMAL] * (len(texts) - len(SPECIAL_NAMES))
        scores = [0.0] * len(texts)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_merges([_NEVER_MERGED])
        prefix = False
    elif not isinstance(tokenizer, SentencePieceTokenizer):
        raise ConfigError(
            "this checkpoint has an imported tokenizer.json, or no tokenizer; only sentencepiece's "
            "BPE and plain bytes can be exported to GGUF: export with --to hf, and convert that "
            "with llama.cpp's own script"
        )
    else:
        model = exportable_pieces(folder / "tokenizer.model")
        texts = [piece.text for piece in model.pieces]
        kinds = [piece.kind for piece in model.pieces]
        scores = [piece.score for piece in model.pieces]
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        prefix = model.add_dummy_prefix
    spare = range(len(texts), vocab_size)
    writer.add_token_list([*texts, *(f"<unused {i}>" for i in spare)])
    writer.add_token_scores([*scores, *(0.0 for _ in spare)])
    writer.add_token_types([*map(int, kinds), *(int(Kind.UNUSED) for _ in spare)])
    writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_unk_token_id(tokenizer.unk_id)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(prefix)


def _tensors(
    weights: dict[str, Tensor], config: ModelConfig, row: Architecture
) -> dict[str, npt.NDArray[np.float32]]:
    """Return the float32 weights by llama.cpp's names."""
    arrays = {name: weight.float().numpy(force=True) for name, weight in weights.items()}
    names = weight_names(row, config, "llama.cpp")
    out = {theirs: arrays[ours] for ours, theirs in names.items()}
    if row.needs_head and config.tie_embeddings:
        out["output.weight"] = arrays["embed.weight"]
    if row.interleaved:
        for ours, theirs in names.items():
            if is_rotated(ours):
                out[theirs] = interleave(out[theirs], config.head_dim)
    if isinstance(config.rope_scaling, Llama3RopeScaling):
        plain, scaled = (
            inverse_frequencies(config.head_dim, config.rope_theta, scaling).numpy()
            for scaling in (None, config.rope_scaling)
        )
        out["rope_freqs.weight"] = plain / scaled
    return out


def interleave(weight: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Put rows j and j + head_dim / 2 of each head, which RoPE rotates together, side by side."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def deinterleave(weight: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Undo :func:`interleave`."""
    heads = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def is_rotated(name: str) -> bool:
    """Return whether our weight ``name`` makes queries or keys, which RoPE rotates."""
    return name.endswith(("q_proj.weight", "k_proj.weight"))


def _stored_as(array: npt.NDArray[np.float32], dtype: str) -> Any:
    """Return the type to store a tensor in: f32 for vectors, f16 for rows of partial blocks."""
    kind = DTYPES[dtype][0]
    if array.ndim < 2:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if array.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


# ------------------------------------------------------------------------------------------- import


def import_model(file: str | Path, out: str | Path) -> str:
    """Write a GGUF file as a checkpoint; return a line for the user.

    Matrices of f32, f16, bf16 and q8_0 can be read; they become float32.

    Args:
        file: of one of the architectures that can be exported.
        out: the new checkpoint; a folder that exists must be empty.

    Raises:
        ConfigError: there is no such file, or ``out`` is not empty.
        CheckpointError: something in the file is damaged, unknown or not supported; the message
            names it.
        RunFolderError: ``out`` cannot be written.
    """
    file = Path(file)
    if not file.is_file():
        what = "not a regular file" if file.exists() else "no such file"
        raise ConfigError(f"{what}: {file}")
    header = read_header(file)
    try:
        config, row = _read_config(header)
        tokenizer = _read_tokenizer(header.metadata) or NoTokenizer(config.known_vocab_size)
    except (TokenizerError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from None
    return save_imported(Path(out), file.stem, _read_model(header, config, row), tokenizer, row)


def _read_config(header: GGUFFile) -> tuple[ModelConfig, Architecture]:
    rows = {row.gguf: row for row in ARCHITECTURES}
    name = header.metadata.get("general.architecture")
    if name not in rows:
        raise ValueError(f"general.architecture = {name!r}: must be one of {', '.join(rows)}")
    row = rows[name]
    prefix = f"{name}."
    raw = {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}
    errors = list(_config_errors(raw, row, header))
    shape = {ours: raw[theirs] for ours, theirs in MODEL_KEYS if raw.get(theirs) is not None}
    embedding = header.tensors.get("token_embd.weight")
    shape["vocab_size"] = embedding.shape[0] if embedding else None
    scaling = {"kind": "linear", "factor": raw.get("rope.scaling.factor")}
    shape["rope_scaling"] = scaling if raw.get("rope.scaling.type") == "linear" else None
    shape["rope_theta"] = raw.get("rope.freq_base", 10_000.0)
    shape["tie_embeddings"] = _is_tied(header, row)
    shape["norm"] = norm_section(row, _shortest_decimal(raw.get(row.gguf_eps)))
    theirs_of = {**dict(MODEL_KEYS), "norm.eps": row.gguf_eps}
    return check_model(shape, theirs_of, errors, str(header.path)), row


def _shortest_decimal(value: Any) -> Any:
    """Return the shortest decimal of a float32, so that 1e-6 comes back as 1e-6."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _config_errors(
    raw: Mapping[str, Any], row: Architecture, header: GGUFFile
) -> Iterator[FieldError]:
    """Yield the keys that are missing, and those whose value no model here supports."""
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
            "attention.key_length", sorted(sizes), "keys, values and RoPE must have the same size"
        )
    if "rope_freqs.weight" in header.tensors:
        rule = "GGUF does not say which scaling of RoPE it comes from; import the original"
        yield FieldError("rope_freqs.weight", "a tensor", rule)


def _is_tied(header: GGUFFile, row: Architecture) -> bool:
    """Return whether the head is the embedding; where llama.cpp needs both, compare them."""
    if "output.weight" not in header.tensors:
        return True
    head, embedding = (header.tensors.get(n) for n in ("output.weight", "token_embd.weight"))
    if not row.needs_head or not head or not embedding or head.shape != embedding.shape:
        return False
    return np.array_equal(header.read("output.weight"), header.read("token_embd.weight"))


def _read_model(header: GGUFFile, config: ModelConfig, row: Architecture) -> Transformer:
    refuse_misfits(absurd_sizes(config, len(header.tensors)), header.path)
    names = weight_names(row, config, "llama.cpp")
    second_head = {"output.weight"} if row.needs_head and config.tie_embeddings else set()
    shapes = {n: info.shape for n, info in header.tensors.items() if n not in second_head}
    refuse_misfits(misfits(config, shapes, names), header.path)
    weights = {}
    for ours, theirs in names.items():
        array = header.read(theirs)
        if row.interleaved and is_rotated(ours):
            array = deinterleave(array, config.head_dim)
        weights[ours] = torch.from_numpy(array.copy())
    return build(config, weights)


def _read_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer of a file, sentencepiece's BPE or plain bytes; None if it is another.

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
        raise TokenizerError("its numbers of tokens, of their types and of their scores differ")
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
