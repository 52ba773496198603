"""What all imports share: checks before anything is built, and writing the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillama.config import ModelConfig, RunConfig
from minillama.config.loading import check
from minillama.data.imported_tokenizers import NoTokenizer
from minillama.data.tokenizer_base import Tokenizer
from minillama.errors import CheckpointError, ConfigError, FieldError
from minillama.files import explain_write_errors
from minillama.interop.architectures import Architecture
from minillama.model.transformer import Transformer
from minillama.training.checkpoint import save_checkpoint


def claim(out: Path) -> None:
    """Make sure that ``out`` can be created; an empty folder there is removed.

    Raises:
        ConfigError: ``out`` exists and is not an empty folder.
        RunFolderError: its parent cannot be written.
    """
    with explain_write_errors(out):
        if out.is_dir() and not out.is_symlink() and not any(out.iterdir()):
            out.rmdir()
        if out.exists() or out.is_symlink():
            raise ConfigError(f"{out} already exists; choose another path, or remove it first")
        out.parent.mkdir(parents=True, exist_ok=True)


def check_model(
    section: Mapping[str, Any],
    theirs_of: Mapping[str, str],
    errors: Sequence[FieldError],
    where: str,
) -> ModelConfig:
    """Return the model that a ``section`` of config describes.

    Args:
        section: by our names of fields.
        theirs_of: the names of fields in the file ``where``, by ours.
        errors: found before, by their names.

    Raises:
        CheckpointError: there are errors; the message has all of them, by their names.
    """
    found = list(errors)
    try:
        config = check(ModelConfig, section, where)
    except ConfigError as error:
        found += [
            FieldError(theirs_of.get(f.path, f.path), f.value, f.rule) for f in error.field_errors
        ]
    if found:
        raise CheckpointError(f"this model cannot be imported: {ConfigError.of(where, found)}")
    return config


def refuse_misfits(errors: list[str], where: Path) -> None:
    """Raise one CheckpointError with the ``errors`` of the weights in ``where``, if any."""
    if errors:
        more = f"; and {len(errors) - 8} more" if len(errors) > 8 else ""
        raise CheckpointError(
            f"the weights in {where} do not fit its config: {'; '.join(errors[:8])}{more}"
        )


def build(config: ModelConfig, weights: dict[str, Tensor]) -> Transformer:
    """Return the model of ``config`` with these ``weights``, in eval mode."""
    with torch.device("meta"):  # without a second copy of the weights
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
    """Write the checkpoint of an imported model; return a line for the user.

    Raises:
        CheckpointError: the tokenizer has more ids than the model.
        ConfigError: ``out`` already exists.
        RunFolderError: it cannot be written.
    """
    shape = model.config
    if tokenizer.vocab_size > shape.known_vocab_size:
        raise CheckpointError(
            f"the tokenizer of {name} has {tokenizer.vocab_size} ids, more than the model's "
            f"vocabulary of {shape.vocab_size}; it belongs to another model"
        )
    config = RunConfig.model_validate(
        {
            "name": re.sub(r"[^A-Za-z0-9._=+-]+", "-", name).lstrip("-._=+") or "imported",
            "out_dir": str(out),
            "model": shape,
            "tokenizer": {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size},
            "data": {"seq_len": min(128, shape.max_seq_len)},
        }
    )
    claim(out)
    save_checkpoint(out, model, tokenizer, config)
    n_parameters = sum(weight.numel() for weight in model.parameters())
    summary = f"{out}: {row.model_class}, {n_parameters:,} parameters"
    if isinstance(tokenizer, NoTokenizer):
        return f"{summary}; no usable tokenizer was found, so it takes token ids only"
    return (
        f"{summary}, {tokenizer.kind} tokenizer of {tokenizer.vocab_size} ids; generate text with: "
        f"minillama generate {out}"
    )
