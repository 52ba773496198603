"""A checkpoint: a folder that is written whole or not at all, and read back or refused by name.

    step-000100/ model.safetensors    the weights, and the checksums of all
                 config.json          the resolved RunConfig
                 tokenizer.model      sentencepiece's own file; a byte tokenizer has none
                 trainer_state.pt     what a resume needs: tensors and plain data only
                 optimizer/           under fsdp, the moments of matrices: safetensors, one a rank

It needs no conversion to be used.  Neither safetensors nor torch.load notices a flipped bit, so the
header of model.safetensors carries a SHA-256 of its own tensors and of each file beside it, and one
of these checksums, so that a bit flipped in them is not laid at another file's door.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minillama.config import RunConfig
from minillama.config.loading import check
from minillama.config.run import load_plugins_of
from minillama.data.tokenizer import Tokenizer, load_tokenizer
from minillama.errors import CheckpointError, ConfigError, MinillamaError
from minillama.files import explain_write_errors, new_folder, sha256_of_file
from minillama.model.sizes import absurd_sizes, misfits
from minillama.model.transformer import Transformer, is_norm_parameter
from minillama.training.checkpoint_folders import (
    CONFIG,
    OPTIMIZER,
    TOKENIZER,
    TRAINER_STATE,
    WEIGHTS,
    resolve_checkpoint,
    step_folders,
)
from minillama.training.device import pick_device

# ------------------------------------------------------------------------------------------ write


def save_checkpoint(
    folder: str | Path,
    model: Transformer | Mapping[str, Tensor],
    tokenizer: Tokenizer,
    config: RunConfig,
    trainer_state: Mapping[str, Any] | None = None,
    write_shards: Callable[[Path], Mapping[str, str]] | None = None,
) -> None:
    """Write a new checkpoint ``folder``; a kill at any moment leaves it whole or leaves nothing.

    Args:
        folder: must not be there yet; its parent must.
        model: as it was built, not compiled, so that its parameters have their own names; or its
            weights by these names.
        tokenizer: its file goes along.
        config: resolved.
        trainer_state: nested dicts and lists of tensors and plain data; left out of a checkpoint
            that no training can go on from.
        write_shards: called with the folder to write what is not in ``trainer_state`` into; returns
            the SHA-256 of each file by its path in there.

    Raises:
        RunFolderError: the disk is full, not writable or not there.
    """
    with explain_write_errors(Path(folder)), new_folder(Path(folder)) as new:
        (new / CONFIG).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        tokenizer.save(new / TOKENIZER)
        if trainer_state is not None:
            _torch_save(trainer_state, new / TRAINER_STATE)
        sums = {file.name: sha256_of_file(file) for file in new.iterdir()}
        sums |= {} if write_shards is None else write_shards(new)
        tensors = model.state_dict() if isinstance(model, Transformer) else model
        weights = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        sums[WEIGHTS] = hash_tensors(weights)
        listed = json.dumps(sums)
        metadata = {"format": "pt", "sha256": listed, "seal": _hash_text(listed)}
        _save_weights(weights, new / WEIGHTS, metadata)


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 of names, types, shapes and bytes, whatever the order of the mapping."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _torch_save(data: Mapping[str, Any], file: Path) -> None:
    with file.open("wb") as stream:
        try:
            torch.save(dict(data), stream)
        except RuntimeError as error:  # what the system said stands only in the context
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _save_weights(weights: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(weights, file, metadata)
    except SafetensorError as error:
        said = re.search(r"os error (\d+)", str(error))
        code = int(said.group(1)) if said else errno.EIO
        raise OSError(code, os.strerror(code)) from error


# ------------------------------------------------------------------------------------------- read


def load_checkpoint(
    path: str | Path, device: str | torch.device = "cpu"
) -> tuple[Transformer, Tokenizer, RunConfig]:
    """Return the model, in eval mode on ``device``, with its tokenizer and the config of its run.

    ``path`` is a checkpoint, or a run folder, which stands for its best checkpoint, else its last.

    Raises:
        ConfigError: ``path`` leads to no checkpoint, or there is no such device.
        CheckpointError: a file is missing, damaged or does not fit the others; names the newest
            sound checkpoint beside it, if there is one.
    """
    folder = resolve_checkpoint(path)
    target = pick_device(str(device))
    try:
        config, weights, tokenizer = _read(folder)
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        faults = absurd_sizes(config.model, len(weights)) or misfits(config.model, shapes)
        _refuse(faults, folder)  # before memory is asked for
        model = Transformer(config.model)
        load_weights(model, weights, folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_offer(folder)}") from error
    return model.to(target).eval(), tokenizer, config


def load_weights(model: Transformer, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Copy ``weights``, read from ``folder``, into ``model``.

    Raises:
        CheckpointError: names or shapes differ; the message lists them.
    """
    own = model.state_dict()
    faults = [f"{name} is missing" for name in own if name not in weights]
    faults += [f"{name} has no place in the model" for name in weights if name not in own]
    faults += [
        f"{name} is {tuple(weights[name].shape)}, the model needs {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    _refuse(faults, folder)
    model.load_state_dict(dict(weights))


def _refuse(faults: list[str], folder: Path) -> None:
    """Raise a CheckpointError that lists what does not fit, if there is anything."""
    if faults:
        more = f" and {len(faults) - 6} more" if len(faults) > 6 else ""
        listed = "; ".join(faults[:6]) + more
        raise CheckpointError(f"{folder / WEIGHTS} does not fit the config: {listed}")


QK_NORMS = ("q_norm", "k_norm")
"""Norms of a fixed kind, whatever that of the others is."""


@torch.no_grad()
def initialise_from(model: Transformer, path: str | Path) -> list[str]:
    """Begin from a checkpoint's weights; the norms may be others.

    A norm's own parameters are taken over where kind, name and shape agree; else they stay as they
    start.

    Returns:
        The names of the parameters that stay as they start.

    Raises:
        ConfigError: ``path`` leads to no checkpoint.
        CheckpointError: it is damaged, or its other weights do not fit.
    """
    folder = resolve_checkpoint(path)
    saved, weights, _ = _read(folder)
    old, norm = saved.model.norm, model.config.norm
    own = model.state_dict()
    same_kind = (old.kind, old.options) == (norm.kind, norm.options)

    def fits(name: str) -> bool:
        is_qk_norm = old.qk_norm == norm.qk_norm != "none" and name.split(".")[-2] in QK_NORMS
        return name in own and own[name].shape == weights[name].shape and (same_kind or is_qk_norm)

    taken = {name: w for name, w in weights.items() if not is_norm_parameter(name) or fits(name)}
    new = [name for name in own if name not in taken and is_norm_parameter(name)]
    load_weights(model, {**taken, **{name: own[name] for name in new}}, folder)
    return new


class Resumed(NamedTuple):
    """What a run goes on from."""

    folder: Path
    config: RunConfig
    weights: dict[str, Tensor]
    state: dict[str, Any]


def read_for_resume(folder: Path) -> Resumed:
    """Return all that the checkpoint ``folder`` holds for a run to go on from.

    Raises:
        CheckpointError: a file is missing or damaged; names the newest sound checkpoint beside it.
    """
    try:
        config, weights, _ = _read(folder)
        return Resumed(folder, config, weights, _read_trainer_state(folder))
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_offer(folder)}") from error


def read_config(folder: Path) -> RunConfig:
    """Return the config of the run that wrote the checkpoint ``folder``.

    Raises:
        CheckpointError: config.json is missing, damaged or of another program.
        ConfigError: a plugin that the run used is missing.
    """
    file = folder / CONFIG
    _check_sum(file, _read_sums(folder))
    try:
        raw = json.loads(file.read_bytes())
    except ValueError:
        raise CheckpointError(f"{file} is damaged: it is not JSON") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is damaged: it holds no config")
    if "model_type" in raw:
        raise CheckpointError(
            f"{folder} is a transformers model; bring it in with "
            f"`minillama import {folder} --out DIR`"
        )
    load_plugins_of(raw)
    try:
        return check(RunConfig, raw, str(file))
    except ConfigError as error:
        raise CheckpointError(f"not a config of this version of minillama: {error}") from None


def _read(folder: Path) -> tuple[RunConfig, dict[str, Tensor], Tokenizer]:
    config = read_config(folder)
    sums = _read_sums(folder)
    file = folder / WEIGHTS
    try:
        with safe_open(file, framework="pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if WEIGHTS in sums and sums[WEIGHTS] != hash_tensors(weights):
        raise CheckpointError(f"{file} is damaged: its checksum does not match")
    lost = [name for name, w in weights.items() if not bool(torch.isfinite(w).all())]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise CheckpointError(f"{file} holds NaN or inf in {', '.join(lost[:3])}{more}")
    return config, weights, _read_tokenizer(folder, config, sums)


def _read_tokenizer(folder: Path, config: RunConfig, sums: Mapping[str, str]) -> Tokenizer:
    file = folder / TOKENIZER if config.tokenizer.has_file else None
    if file is not None:
        _check_sum(file, sums)
    try:
        tokenizer = load_tokenizer(config.tokenizer, file)
    except MinillamaError as error:
        raise CheckpointError(f"{folder / TOKENIZER} is damaged: {error}") from None
    if tokenizer.vocab_size != config.tokenizer.vocab_size:
        raise CheckpointError(
            f"{folder / TOKENIZER} has {tokenizer.vocab_size} ids, but {CONFIG} says "
            f"{config.tokenizer.vocab_size}; it belongs to another checkpoint"
        )
    return tokenizer


def _read_trainer_state(folder: Path) -> dict[str, Any]:
    file = folder / TRAINER_STATE
    sums = _read_sums(folder)
    _check_sum(file, sums)
    for name in sums:
        if name.startswith(f"{OPTIMIZER}/"):
            _check_sum(folder / name, {Path(name).name: sums[name]})
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged zip or pickle can raise nearly anything
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} is damaged: it holds no state")
    return state


def _read_sums(folder: Path) -> dict[str, str]:
    """Return the checksums in the header of the weights; none if another program wrote them."""
    file = folder / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
        listed = metadata.get("sha256", "{}")
        if metadata.get("seal", _hash_text(listed)) != _hash_text(listed):
            raise CheckpointError(f"{file} is damaged: its checksums do not match their own")
        sums = json.loads(listed)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    return sums if isinstance(sums, dict) else {}


def _check_sum(file: Path, sums: Mapping[str, str]) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    if file.name in sums and sums[file.name] != sha256_of_file(file):
        raise CheckpointError(f"{file} is damaged: its checksum does not match")


def _offer(damaged: Path) -> str:
    """Name the newest sound checkpoint beside ``damaged``."""
    damaged = damaged.resolve()
    for folder in reversed(step_folders(damaged.parent)):
        if folder != damaged:
            try:
                _read(folder)
                _read_trainer_state(folder)
            except MinillamaError:
                continue
            return f"; the newest sound checkpoint beside it is {folder}"
    return "; there is no other beside it"
