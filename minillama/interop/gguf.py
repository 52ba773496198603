"""To llama.cpp's GGUF: one file with the weights, the shape and the vocabulary.

llama.cpp stores a matrix as we do, row by row; q and k alone are permuted, where it turns
neighbouring features (``Architecture.interleaved``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from torch import Tensor

from minillama import __version__
from minillama.checkpoint_folders import resolve_checkpoint
from minillama.config import RunConfig
from minillama.config.model import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from minillama.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from minillama.errors import ConfigError
from minillama.files import explain_write_errors
from minillama.interop.architectures import Architecture, architecture_of, weight_names
from minillama.interop.arrivals import claim
from minillama.interop.hf_tokenizer import SPECIAL_NAMES, byte_pieces, exportable_pieces
from minillama.interop.pieces import Kind
from minillama.model.rope import inverse_frequencies
from minillama.training.checkpoint import load_checkpoint

DTYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
"""Of the matrices; norms are f32 in all."""

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
"""A merge of two bytes 0xFF, which no UTF-8 text has: llama.cpp wants at least one merge."""


def export(checkpoint: str | Path, out: str | Path, dtype: str | None = None) -> str:
    """Write a checkpoint as a GGUF file; return what to tell the user.

    Args:
        checkpoint: a checkpoint, or a run folder, which stands for its best, else its last.
        out: the new file, if it ends in .gguf, else a folder for it.
        dtype: of the matrices, a key of ``DTYPES``; default f32, in which they are trained.

    Raises:
        ConfigError: there is no such checkpoint or dtype, the file is there, or llama.cpp has no
            model that computes what this one computes; the message has every reason.
        CheckpointError: the checkpoint is damaged.
        RunFolderError: the file cannot be written.
    """
    dtype = dtype or "f32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: llama.cpp's are {', '.join(DTYPES)}")
    folder = resolve_checkpoint(checkpoint)
    model, tokenizer, config = load_checkpoint(folder)
    row = architecture_of(config.model, "llama.cpp")
    out = Path(out)
    file = out if out.suffix == ".gguf" else out / f"{config.name}-{dtype}.gguf"
    writer = gguf.GGUFWriter(None, row.gguf)
    _add_shape(writer, config, row, dtype)
    _add_vocabulary(writer, tokenizer, folder, config.model.vocab_size)
    for name, array in _tensors(model.state_dict(), config.model, row).items():
        kind = _stored_as(array, dtype)
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    claim(file)
    with explain_write_errors(file):
        unfinished = file.with_name(f".unfinished-{file.name}")
        try:
            writer.write_header_to_file(unfinished)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            unfinished.replace(file)
        finally:
            writer.close()
            unfinished.unlink(missing_ok=True)
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
            "this checkpoint has a tokenizer.json from elsewhere, or no tokenizer; only "
            "sentencepiece's BPE and plain bytes go to llama.cpp: export with --to hf, and let "
            "llama.cpp's own script convert that"
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
            if is_turned(ours):
                out[theirs] = interleave(out[theirs], config.head_dim)
    if isinstance(config.rope_scaling, Llama3RopeScaling):
        plain, scaled = (
            inverse_frequencies(config.head_dim, config.rope_theta, scaling).numpy()
            for scaling in (None, config.rope_scaling)
        )
        out["rope_freqs.weight"] = plain / scaled
    return out


def interleave(weight: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Bring rows j and j + head_dim / 2 of each head, which turn together, next to each other."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def part(weight: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Undo :func:`interleave`."""
    heads = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def is_turned(name: str) -> bool:
    """Tell whether our weight ``name`` makes queries or keys, which RoPE turns."""
    return name.endswith(("q_proj.weight", "k_proj.weight"))


def _stored_as(array: npt.NDArray[np.float32], dtype: str) -> Any:
    """Return how a tensor is stored: vectors in f32, rows that are no whole blocks in f16."""
    kind = DTYPES[dtype][0]
    if array.ndim < 2:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if array.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16
