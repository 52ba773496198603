"""A checkpoint: a folder that is written atomically and verified when it is read.

    step-000100/ model.safetensors    the weights, and the checksums of all
                 config.json          the resolved RunConfig
                 tokenizer.model      sentencepiece's own file; a byte tokenizer has none
                 trainer_state.pt     what a resume needs: tensors and plain data only
                 optimizer/           with fsdp: the moments of matrices, one file per rank

It needs no conversion to be used.  Neither safetensors nor torch.load detects a flipped bit, so the
header of model.safetensors carries the SHA-256 of its own tensors and of each file beside it.  A
checksum of these checksums keeps a bit flipped in them from being blamed on another file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minillama.config import ModelConfig, RunConfig
from minillama.config.loading import check
from minillama.config.run import load_plugins_of
from minillama.data.tokenizer import load_tokenizer
from minillama.data.tokenizer_base import Tokenizer
from minillama.errors import CheckpointError, ConfigError, MinillamaError
from minillama.files import explain_write_errors, new_folder, sha256_of_file
from minillama.model.norms import norm_parameter_names
from minillama.model.sizes import misfits
from minillama.model.transformer import Transformer
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
from minillama.training.optim import is_sharded, whole_tensor

# ------------------------------------------------------------------------------------------ write


def save_checkpoint(
    folder: str | Path,
    model: Transformer | Mapping[str, Tensor],
    tokenizer: Tokenizer,
    config: RunConfig,
    trainer_state: Mapping[str, Any] | None = None,
    write_shards: Callable[[Path], Mapping[str, str]] | None = None,
) -> None:
    """Write a new checkpoint ``folder``; a kill at any moment leaves all of it or nothing.

    Args:
        folder: must not exist yet; its parent must.
        model: not compiled, so that its parameters have their own names; or its weights by name.
        tokenizer: its file is saved too.
        config: of the run.
        trainer_state: nested dicts and lists of tensors and plain data; None for a checkpoint that
            no training will resume from.
        write_shards: called with the folder to write sharded tensors into; returns the SHA-256 of
            each file by its name.

    Raises:
        RunFolderError: the disk is full, read-only or missing.
    """
    with explain_write_errors(Path(folder)), new_folder(Path(folder)) as new:
        (new / CONFIG).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        tokenizer.save(new / TOKENIZER)
        if trainer_state is not None:
            _torch_save(trainer_state, new / TRAINER_STATE)
        sums = {file.name: sha256_of_file(file) for file in new.iterdir()}
        if write_shards is not None:
            shards = write_shards(new / OPTIMIZER)
            sums |= {f"{OPTIMIZER}/{name}": digest for name, digest in shards.items()}
        tensors = model.state_dict() if isinstance(model, Transformer) else model
        weights = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        sums[WEIGHTS] = hash_tensors(weights)
        listed = json.dumps(sums)
        metadata = {"format": "pt", "sha256": listed, "seal": _hash_text(listed)}
        _save_weights(weights, new / WEIGHTS, metadata)


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a SHA-256 of names, types, shapes and bytes, in any order of the mapping."""
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
        except RuntimeError as error:  # the system error is only in the context
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _save_weights(weights: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(weights, file, metadata)
    except SafetensorError as error:
        said = re.search(r"os error (\d+)", str(error))
        code = int(said.group(1)) if said else errno.EIO
        raise OSError(code, os.strerror(code)) from error


# ------------------------------------------------------------------------------------------- read


class Checkpoint(NamedTuple):
    """What a checkpoint contains; ``state`` is empty unless it was read for a resume."""

    folder: Path
    config: RunConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer
    state: dict[str, Any]


def load_checkpoint(
    path: str | Path, device: str | torch.device = "cpu"
) -> tuple[Transformer, Tokenizer, RunConfig]:
    """Return the model, in eval mode on ``device``, with its tokenizer and the config of its run.

    ``path`` is a checkpoint, or a run folder, which stands for its best checkpoint, else its last.

    Raises:
        ConfigError: there is no checkpoint at ``path``, or no such device.
        CheckpointError: a file is missing, damaged or does not fit the others; names the newest
            sound checkpoint beside it, if there is one.
    """
    target = pick_device(str(device))
    checkpoint = read_checkpoint(path)
    with torch.device("cpu"):  # torch's default device and dtype change no model
        model = Transformer(checkpoint.config.model).float()
    model.load_state_dict(checkpoint.weights)
    return model.to(target).eval(), checkpoint.tokenizer, checkpoint.config


def read_checkpoint(path: str | Path, *, for_resume: bool = False) -> Checkpoint:
    """Read and verify a checkpoint, or a run folder's best, else its last.

    Args:
        path: of the checkpoint or the run folder.
        for_resume: read the trainer's state too.

    Raises:
        ConfigError: there is no checkpoint at ``path``.
        CheckpointError: a file is missing, damaged or does not fit the others; names the newest
            sound checkpoint beside it, if there is one.
    """
    folder = resolve_checkpoint(path)
    try:
        return _read(folder, for_resume)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_suggest_sound_one(folder)}") from error


def _read(folder: Path, for_resume: bool) -> Checkpoint:
    sums, config, file = _read_checksums(folder), read_config(folder), folder / WEIGHTS
    try:
        with safe_open(file, framework="pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if WEIGHTS in sums and sums[WEIGHTS] != hash_tensors(weights):
        raise CheckpointError(f"{file} is damaged: its checksum does not match")
    nonfinite = [name for name, w in weights.items() if not bool(torch.isfinite(w).all())]
    if nonfinite:
        more = f" and {len(nonfinite) - 3} more" if len(nonfinite) > 3 else ""
        raise CheckpointError(f"{file} contains NaN or inf in {', '.join(nonfinite[:3])}{more}")
    _refuse_misfits(config.model, weights, folder)
    tokenizer = _read_tokenizer(folder, config, sums)
    state = _read_trainer_state(folder, sums) if for_resume else {}
    return Checkpoint(folder, config, weights, tokenizer, state)


def read_config(folder: Path) -> RunConfig:
    """Return the config of the run that wrote the checkpoint ``folder``.

    Raises:
        CheckpointError: config.json is missing, damaged or another program's.
        ConfigError: a plugin that the run used is missing.
    """
    file = folder / CONFIG
    _verify(file, _read_checksums(folder))
    try:
        raw = json.loads(file.read_bytes())
    except ValueError:
        raise CheckpointError(f"{file} is damaged: it is not JSON") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is damaged: it is not a config")
    if "model_type" in raw:
        raise CheckpointError(
            f"{folder} is a transformers model; convert it with "
            f"`minillama import {folder} --out DIR`"
        )
    load_plugins_of(raw)
    try:
        return check(RunConfig, raw, str(file))  # resolved when it was written
    except ConfigError as error:
        raise CheckpointError(f"not a config of this version of minillama: {error}") from None


def _read_tokenizer(folder: Path, config: RunConfig, sums: Mapping[str, str]) -> Tokenizer:
    file = folder / TOKENIZER if config.tokenizer.has_file else None
    if file is not None:
        _verify(file, sums)
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


def _read_trainer_state(folder: Path, sums: Mapping[str, str]) -> dict[str, Any]:
    file = folder / TRAINER_STATE
    _verify(file, sums)
    for name in sums:
        if name.startswith(f"{OPTIMIZER}/"):
            _verify(folder / name, {Path(name).name: sums[name]})
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged zip or pickle can raise nearly anything
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} is damaged: it is not a trainer's state")
    return state


def _read_checksums(folder: Path) -> dict[str, str]:
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


def _verify(file: Path, sums: Mapping[str, str]) -> None:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    if file.name in sums and sums[file.name] != sha256_of_file(file):
        raise CheckpointError(f"{file} is damaged: its checksum does not match")


def _suggest_sound_one(damaged: Path) -> str:
    """Name the newest sound checkpoint beside ``damaged``."""
    damaged = damaged.resolve()
    for folder in reversed(step_folders(damaged.parent)):
        if folder != damaged:
            try:
                _read(folder, for_resume=True)
            except MinillamaError:
                continue
            run = folder.parent.parent
            resume = shlex.join(("minillama", "train", str(run), "--resume-from", str(folder)))
            return f"; the newest sound checkpoint beside it is {folder}" + (
                f"; continue from it: {resume}" if (run / "config.yaml").is_file() else ""
            )
    return "; there is no other beside it"


# ------------------------------------------------------------------------------- weights, optimizer


def _refuse_misfits(config: ModelConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Check that ``weights``, read from ``folder``, are those of a model of ``config``."""
    errors = misfits(config, {name: tensor.shape for name, tensor in weights.items()})
    if errors:
        more = f" and {len(errors) - 6} more" if len(errors) > 6 else ""
        listed = "; ".join(errors[:6]) + more
        raise CheckpointError(f"{folder / WEIGHTS} does not fit the config: {listed}")


QK_NORMS = ("q_norm", "k_norm")
"""These norms have a fixed kind, whatever ``model.norm.kind`` is."""


@torch.no_grad()
def initialise_from(model: Transformer, path: str | Path) -> list[str]:
    """Load a checkpoint's weights into a model whose norms may be others.

    A norm's own parameters are loaded where kind, name and shape agree; otherwise they keep their
    initial values.

    Returns:
        The names of the parameters that keep their initial values.

    Raises:
        ConfigError: there is no checkpoint at ``path``.
        CheckpointError: it is damaged, or its other weights do not fit.
    """
    folder, saved, weights, *_ = read_checkpoint(path)
    old, norm = saved.model.norm, model.config.norm
    own, norms = model.state_dict(), norm_parameter_names(model)
    with torch.device("meta"):
        old_norms = norm_parameter_names(Transformer(saved.model))
    same_kind = (old.kind, old.options) == (norm.kind, norm.options)

    same_qk_norm = (old.qk_norm, old.qk_unit_offset) == (norm.qk_norm, norm.qk_unit_offset)

    def fits(name: str) -> bool:
        is_qk_norm = norm.qk_norm != "none" and same_qk_norm and name.split(".")[-2] in QK_NORMS
        return name in own and own[name].shape == weights[name].shape and (same_kind or is_qk_norm)

    loaded = {name: w for name, w in weights.items() if name not in old_norms or fits(name)}
    new = [name for name in own if name not in loaded and name in norms]
    weights = {**loaded, **{name: own[name] for name in new}}
    _refuse_misfits(model.config, weights, folder)
    model.load_state_dict(weights)
    return new


def whole_weights(model: Transformer, *, keep: bool) -> dict[str, Tensor]:
    """Return the weights by name, gathered from all ranks where they are sharded.

    All ranks call it; those that do not ``keep`` the weights get none.
    """
    weights = {}
    for name, tensor in model.state_dict().items():
        whole = whole_tensor(tensor)
        if keep:
            weights[name] = whole.cpu() if is_sharded(tensor) else whole
    return weights


def optimizer_tensors(
    model: Transformer, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the optimizer's whole tensors and its sharded ones.

    Both are by the name of the parameter and of the moment, as ``blocks.0.mlp.up_proj.exp_avg``:
    the same names however the model is parallelized.
    """
    tensors: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[is_sharded(value)][f"{name}.{moment}"] = value
    return tensors


def load_optimizer(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    whole: Mapping[str, Tensor],
    sharded: list[str],
    folder: Path,
) -> None:
    """Load what :func:`optimizer_tensors` returned, however the model was parallelized then.

    Args:
        model: that is trained.
        optimizer: of its parameters; keeps its own settings.
        whole: the whole tensors.
        sharded: the names of the tensors whose shards are in ``folder``.
        folder: where ``write_shards`` has written them.

    Raises:
        CheckpointError: a name is not one of the model's parameters.
    """
    parameters = dict(model.named_parameters())
    unknown = [n for n in (*whole, *sharded) if n.rpartition(".")[0] not in parameters]
    if unknown:
        raise CheckpointError(f"{folder.parent}: the optimizer's {unknown[0]} fits no parameter")
    tensors = {n: torch.zeros_like(parameters[n.rpartition(".")[0]]) for n in sharded}
    is_fsdp = any(is_sharded(parameter) for parameter in parameters.values())
    if tensors or is_fsdp:
        # Imported here: it takes most of a second, and most runs do not need it.
        from minillama.training.fsdp import read_shards, shard_like

        if tensors:
            read_shards(tensors, folder)
    for name, value in whole.items():
        parameter = parameters[name.rpartition(".")[0]]
        is_part = is_sharded(parameter) and value.shape == parameter.shape
        tensors[name] = shard_like(parameter, value) if is_part else value
    moments: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        parameter_name, _, moment = name.rpartition(".")
        moments[parameters[parameter_name]][moment] = value
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    state = {index: moments[p] for index, p in enumerate(ordered) if p in moments}
    groups = optimizer.state_dict()["param_groups"]  # the config's, not those saved
    optimizer.load_state_dict({"state": state, "param_groups": groups})
