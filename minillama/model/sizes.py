"""Check the weights of a file against a config, before memory is allocated for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from minillama.config import ModelConfig
from minillama.model.transformer import Transformer

MAX_SIZE = 1 << 24
"""Larger than any field of any real model."""

MAX_ROTATIONS = 1 << 26
"""Most entries of the table of rotations, max_seq_len · head_dim: 256 MiB."""


def absurd_sizes(config: ModelConfig, n_tensors: int) -> list[str]:
    """Return what in ``config`` is beyond any model, or beyond ``n_tensors`` weights."""
    fields = [*config, *(config.rope_scaling or ())]
    errors = [
        f"{name} = {size} is beyond the size of any model"
        for name, size in fields
        if isinstance(size, int) and size > MAX_SIZE
    ]
    if config.n_layers > n_tensors:
        errors.append(f"{config.n_layers} layers cannot be in {n_tensors} tensors")
    if config.max_seq_len * config.head_dim > MAX_ROTATIONS:
        errors.append(
            f"a context of {config.max_seq_len} needs too large a table of rotations; lower it to "
            f"{MAX_ROTATIONS // config.head_dim} or less"
        )
    return errors


def misfits(
    config: ModelConfig,
    shapes: Mapping[str, Sequence[int]],
    names: Mapping[str, str] | None = None,
) -> list[str]:
    """Return what keeps weights of these ``shapes`` from being those of a model of ``config``.

    It allocates nothing, whatever the config says.

    Args:
        config: of the model.
        shapes: by name.
        names: what each of our names is called in ``shapes``; None: the same.
    """
    if errors := absurd_sizes(config, len(shapes)):
        return errors
    try:
        with torch.device("meta"):
            model = Transformer(config.model_copy(update={"max_seq_len": 1}))
    except RuntimeError as error:  # more numbers than 64 bits can count
        return [f"the config is too large for any machine ({error})"]
    needed = {
        name if names is None else names[name]: tuple(weight.shape)
        for name, weight in model.state_dict().items()
    }
    errors = [f"{name} is missing" for name in needed if name not in shapes]
    errors += [f"{name} is not in the model" for name in shapes if name not in needed]
    return errors + [
        f"{name} is {tuple(shapes[name])}, the model needs {shape}"
        for name, shape in needed.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
