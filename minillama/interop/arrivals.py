"""What every import and export does with the place it writes to."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from minillama.config import ModelConfig, RunConfig
from minillama.config.run import resolve
from minillama.data.foreign import JsonTokenizer, NoTokenizer
from minillama.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from minillama.errors import CheckpointError, ConfigError
from minillama.files import explain_write_errors
from minillama.interop.architectures import Architecture
from minillama.model.sizes import absurd_sizes
from minillama.model.transformer import Transformer
from minillama.training.checkpoint import save_checkpoint

KINDS: dict[type, str] = {
    SentencePieceTokenizer: "bpe",
    ByteTokenizer: "byte",
    JsonTokenizer: "json",
    NoTokenizer: "none",
}
"""What a config calls a tokenizer, ``tokenizer.kind``."""


def claim(out: Path) -> None:
    """Make way for a new ``out``, of which only an empty folder may be there.

    Raises:
        ConfigError: ``out`` is there and holds something.
        RunFolderError: its parent cannot be written.
    """
    with explain_write_errors(out):
        if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
            out.rmdir()
        if out.exists() or out.is_symlink():
            raise ConfigError(f"{out} is there already; name another, or remove it first")
        out.parent.mkdir(parents=True, exist_ok=True)


def shapes_of(config: ModelConfig, n_tensors: int, where: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight of a model of ``config`` (resolved).

    It costs no memory, whatever the config says: sizes beyond any model, or beyond what
    ``n_tensors`` tensors can hold, are refused first.

    Raises:
        CheckpointError: a size is absurd; all of them are named, and ``where`` they stand.
    """
    faults = absurd_sizes(config, n_tensors)
    if faults:
        raise CheckpointError(f"{where}: {'; '.join(faults)}")
    with torch.device("meta"):
        model = Transformer(config.model_copy(update={"max_seq_len": 1}))
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


def refuse_misfits(faults: list[str], what: str) -> None:
    """Raise a CheckpointError on the weights of ``what`` if there are ``faults``."""
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(
            f"the weights in {what} do not fit its config: {'; '.join(faults[:8])}{more}"
        )


def build(config: ModelConfig, weights: dict[str, Tensor]) -> Transformer:
    """Return the model of ``config`` that owns ``weights``, in eval mode."""
    with torch.device("meta"):  # no second copy of the weights
        model = Transformer(config)
    model.load_state_dict(weights, assign=True)
    return model.eval()


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
    kind = KINDS[type(tokenizer)]
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
    said = f"{out}: {row.model_class}, {n_parameters:,} parameters"
    if isinstance(tokenizer, NoTokenizer):
        return f"{said}; it came without a tokenizer that can be used, so it knows ids only"
    return (
        f"{said}, {kind} tokenizer of {tokenizer.vocab_size} ids; let it write: "
        f"minillama generate {out}"
    )
