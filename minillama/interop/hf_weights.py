"""Weights as transformers saves them: one model.safetensors, or shards with an index.

    headers of all files ─▶ names and shapes compared with the config ─▶ tensors

Only headers are read until all of them fit, so that a file that lies costs no memory.  A pickle is
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
from torch import Tensor

from minillama.config import ModelConfig
from minillama.errors import CheckpointError
from minillama.interop.architectures import Architecture, weight_names
from minillama.interop.arrivals import check_sizes
from minillama.model.transformer import Transformer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_DTYPES = ("F32", "BF16", "F16")
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq")
"""What old versions saved besides weights: it follows from the config."""

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
    """Build the model of ``config`` (resolved) with the weights in ``folder``, in float32.

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
                        raise CheckpointError(f"{folder}: {name} stands in two files")
                    where[name] = opened
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is damaged: {error}") from None
        # A head that is the embedding is saved by some programs a second time.
        again = "lm_head.weight" if config.tie_embeddings and "lm_head.weight" in where else None
        check_sizes(config, len(where), folder)
        with torch.device("meta"):  # no memory for the weights yet
            model = Transformer(config)
        names = weight_names(row, config, "transformers")
        headers = {name: opened.get_slice(name) for name, opened in where.items()}
        _compare(folder, headers, names, model, again)
        weights = {
            ours: where[theirs].get_tensor(theirs).to(torch.float32)
            for ours, theirs in names.items()
        }
        if again and not torch.equal(
            where[again].get_tensor(again).float(), weights["embed.weight"]
        ):
            raise CheckpointError(
                f"{folder}: {again} differs from the embedding, but the config says that they are "
                "one (tie_word_embeddings)"
            )
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        names = {str(name) for name in weight_map.values()}
        for name in sorted(names):
            if Path(name).name != name or not (folder / name).is_file():
                raise CheckpointError(f"{folder / INDEX} names {name!r}, which is not there")
        return [folder / name for name in sorted(names)]
    pickles = sorted(
        p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")
    )
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights in a pickle only ({', '.join(pickles[:3])}), which can run "
            "code when it is opened; ask its author for safetensors, or save it anew with "
            "transformers"
        )
    raise CheckpointError(f"{folder} holds no weights: neither {WEIGHTS} nor {INDEX}")


def _compare(
    folder: Path,
    headers: Mapping[str, Any],
    names: Mapping[str, str],
    model: Transformer,
    again: str | None,
) -> None:
    """Refuse weights that do not fit the model, every one by its name."""
    own: dict[str, Tensor] = model.state_dict()
    known = {*names.values(), again}
    faults = [f"{theirs} is missing" for theirs in names.values() if theirs not in headers]
    faults += [
        f"{theirs} has no place in {type(model).__name__}"
        for theirs in headers
        if theirs not in known and not _BUFFERS.fullmatch(theirs)
    ]
    for ours, theirs in names.items():
        header = headers.get(theirs)
        if header is None:
            continue
        shape, needed = tuple(header.get_shape()), tuple(own[ours].shape)
        if shape != needed:
            faults.append(f"{theirs} is {shape}, the config says {needed}")
        if header.get_dtype() not in _DTYPES:
            faults.append(f"{theirs} is {header.get_dtype()}, not one of {', '.join(_DTYPES)}")
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(
            f"the weights in {folder} do not fit its config: {'; '.join(faults[:8])}{more}"
        )
