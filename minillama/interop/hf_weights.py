"""Read weights as transformers saves them: one model.safetensors, or shards with an index.

    headers of all files ─▶ names and shapes compared with the config ─▶ tensors

Only headers are read until all of them fit, so that a false header costs no memory.  A pickle is
never opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minillama.config import ModelConfig
from minillama.errors import CheckpointError
from minillama.interop.architectures import Architecture, weight_names
from minillama.interop.importing import build, refuse_misfits
from minillama.model.sizes import absurd_sizes, misfits
from minillama.model.transformer import Transformer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_DTYPES = ("F32", "BF16", "F16")
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq")
"""Saved by old versions besides weights; they follow from the config."""

_MAX_JSON = 1 << 26


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds one mapping.

    Raises:
        CheckpointError: it is missing, too large, or something else.
    """
    try:
        if file.stat().st_size > _MAX_JSON:
            raise CheckpointError(f"{file} is too large: {file.stat().st_size} bytes")
        raw = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} holds a {type(raw).__name__}, not a mapping")
    return raw


def read_model(folder: Path, config: ModelConfig, row: Architecture) -> Transformer:
    """Build the model of ``config`` with the weights in ``folder``, in float32.

    Raises:
        CheckpointError: a file is damaged or only pickles are there, or a weight is missing,
            unknown, of another shape than the config has, or of a type other than float.
    """
    files = _files(folder)
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
                for name in opened.keys():  # noqa: SIM118
                    if name in where:
                        raise CheckpointError(f"{folder}: {name} is in two files")
                    where[name] = opened
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is damaged: {error}") from None
        refuse_misfits(absurd_sizes(config, len(where)), folder)
        names = weight_names(row, config, "transformers")
        # Some programs save a head that is the embedding a second time.
        tied_head = (
            "lm_head.weight" if config.tie_embeddings and "lm_head.weight" in where else None
        )
        headers = {
            name: opened.get_slice(name)
            for name, opened in where.items()
            if name != tied_head and not _BUFFERS.fullmatch(name)
        }
        errors = misfits(config, {name: h.get_shape() for name, h in headers.items()}, names)
        errors += [
            f"{name} is {header.get_dtype()}, not one of {', '.join(_DTYPES)}"
            for name, header in headers.items()
            if name in names.values() and header.get_dtype() not in _DTYPES
        ]
        refuse_misfits(errors, folder)
        weights = {
            ours: where[theirs].get_tensor(theirs).to(torch.float32)
            for ours, theirs in names.items()
        }
        head = where[tied_head].get_tensor(tied_head).to(torch.float32) if tied_head else None
    if head is not None and not torch.equal(head, weights["embed.weight"]):
        raise CheckpointError(
            f"{folder}: {tied_head} differs from the embedding, but the config says they are one "
            "(tie_word_embeddings)"
        )
    return build(config, weights)


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        here = {path.name for path in folder.iterdir()}  # no path leads out of the folder
        for name in names:
            if name not in here:
                raise CheckpointError(f"{folder / INDEX} names {name[:99]!r}, which is not there")
        return [folder / name for name in names]
    pickles = sorted(
        p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")
    )
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights only in a pickle ({', '.join(pickles[:3])}), which can run "
            "code when it is opened; ask its author for safetensors, or convert it with "
            "transformers"
        )
    raise CheckpointError(f"{folder} holds no weights: neither {WEIGHTS} nor {INDEX}")
