"""What every import and export does with the place it writes to."""

from __future__ import annotations

import re
from pathlib import Path

from minillama.config import ModelConfig, RunConfig, resolve
from minillama.data.tokenizer import ByteTokenizer, Tokenizer
from minillama.errors import CheckpointError, ConfigError
from minillama.interop.architectures import Architecture
from minillama.model.transformer import Transformer
from minillama.training.checkpoint import save_checkpoint
from minillama.training.durable import writing

_MAX_ROTATIONS = 1 << 28
"""Most entries of the table of rotations, max_seq_len · head_dim: 1 GiB."""
_MAX_SIZE = 1 << 24


def claim(out: Path) -> None:
    """Make way for a new ``out``, of which only an empty folder may be there.

    Raises:
        ConfigError: ``out`` is there and holds something.
        RunFolderError: its parent cannot be written.
    """
    with writing(out):
        if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
            out.rmdir()
        if out.exists() or out.is_symlink():
            raise ConfigError(f"{out} is there already; name another, or remove it first")
        out.parent.mkdir(parents=True, exist_ok=True)


def check_sizes(config: ModelConfig, n_tensors: int, where: Path) -> None:
    """Refuse a ``config`` (resolved) whose sizes are beyond any model, or beyond the weights.

    It is checked before anything is built, so that a config that lies costs no memory.

    Raises:
        CheckpointError: a size is absurd; all of them are named.
    """
    sizes = [*config, *(config.rope_scaling or ())]
    faults = [
        f"{name} = {size} is beyond the size of any model"
        for name, size in sizes
        if isinstance(size, int) and size > _MAX_SIZE
    ]
    if config.n_layers > n_tensors:
        faults.append(f"{config.n_layers} layers cannot be in {n_tensors} tensors")
    longest = _MAX_ROTATIONS // config.head_dim
    if config.max_seq_len > longest:
        faults.append(
            f"a context of {config.max_seq_len} needs too large a table of rotations; lower it to "
            f"{longest} or less"
        )
    if faults:
        raise CheckpointError(f"{where}: {'; '.join(faults)}")


def save_imported(
    out: Path,
    name: str,
    model: Transformer,
    tokenizer: Tokenizer,
    row: Architecture,
) -> str:
    """Write the checkpoint of an imported model, and say what it is.

    Raises:
        CheckpointError: the tokenizer has more ids than the model.
        ConfigError: ``out`` is there already.
        RunFolderError: it cannot be written.
    """
    shape = model.config
    if tokenizer.vocab_size > shape.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {name} has {tokenizer.vocab_size} ids, but the model's vocabulary "
            f"{shape.vocab_size}; it belongs to another model"
        )
    kind = "byte" if isinstance(tokenizer, ByteTokenizer) else "bpe"
    config = RunConfig.model_validate(
        {
            "name": re.sub(r"[^A-Za-z0-9._=+-]+", "-", name).lstrip("-._=+") or "imported",
            "out_dir": str(out),
            "model": shape,
            "tokenizer": {"kind": kind, "vocab_size": tokenizer.vocab_size},
            "data": {"seq_len": min(128, shape.max_seq_len)},
        }
    )
    claim(out)
    save_checkpoint(out, model, tokenizer, resolve(config))
    n_parameters = sum(weight.numel() for weight in model.parameters())
    return (
        f"{out}: {row.model_class}, {n_parameters:,} parameters, {kind} tokenizer of "
        f"{tokenizer.vocab_size} ids; let it write: minillama generate {out}"
    )
