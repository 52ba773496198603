"""Check the sizes in a config against the weights of a file, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minillama.config import ModelConfig

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


def misfits(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return where the matrices that a model is mostly made of differ from ``config``.

    Where this and :func:`absurd_sizes` find nothing, the model needs no more memory than a few
    times what ``shapes``, of weights by our names, take.
    """
    dim, head_dim = config.dim, config.head_dim
    expected: dict[str, tuple[int, ...]] = {"embed.weight": (config.known_vocab_size, dim)}
    for layer in range(config.n_layers):
        block = f"blocks.{layer}"
        expected[f"{block}.attention.q_proj.weight"] = (config.n_heads * head_dim, dim)
        expected[f"{block}.attention.k_proj.weight"] = (config.n_kv_heads * head_dim, dim)
        expected[f"{block}.mlp.gate_proj.weight"] = (config.ffn_dim, dim)
    return [
        f"{name} is {tuple(shapes[name])}, the model needs {needed}"
        if name in shapes
        else f"{name} is missing"
        for name, needed in expected.items()
        if name not in shapes or tuple(shapes[name]) != needed
    ]
