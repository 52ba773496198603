"""What a run needs at the very least, so that one that cannot fit is refused before it begins.

    weights, gradients, two moments    4 × 4 bytes a parameter
    layers                             what their objects take in Python, whatever their width
    rotations                          a table of max_seq_len · head_dim float32, and its making
    a step                             a residual stream a layer, ids; a loss holds few logits

All of it is a lower bound: what passes may still be too large, what is refused never fits.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from minillama.config import RunConfig
from minillama.errors import ConfigError

_LAYER_OBJECTS = 20_000  # bytes: a block of modules and parameters, without their numbers
_GIB = 1 << 30
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def least_bytes(config: RunConfig) -> dict[str, int]:
    """Return a lower bound of what training ``config`` (resolved) takes, in bytes, by part."""
    model, train, n_tokens = config.model, config.train, config.data.seq_len
    q_dim, kv_dim = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    layer = 2 * model.dim * (q_dim + kv_dim) + 3 * model.dim * model.ffn_dim
    embeddings = model.vocab_size * model.dim * (1 if model.tie_embeddings else 2)
    assert train.micro_batch_size is not None
    positions = train.micro_batch_size * n_tokens
    return {
        "weights": 4 * (embeddings + model.n_layers * layer) + model.n_layers * _LAYER_OBJECTS,
        "gradients and optimizer": 12 * (embeddings + model.n_layers * layer),
        "rotations": 10 * model.max_seq_len * model.head_dim,
        "a step": 4 * positions * model.n_layers * model.dim + 24 * train.batch_size * n_tokens,
    }


def memory_of(device: torch.device) -> int:
    """Return the bytes that ``device`` has in all: a GPU's, or the machine's or container's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):  # Windows does not tell; then nothing is refused
        return 1 << 63
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in map(Path, _CGROUP_LIMITS):
        text = file.read_text().strip() if file.is_file() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def refuse_beyond_memory(config: RunConfig, device: torch.device) -> None:
    """Refuse a run that cannot fit into ``device``.

    Raises:
        ConfigError: with the estimate by part, and what to lower.
    """
    parts, there = least_bytes(config), memory_of(device)
    needed = sum(parts.values())
    if needed > there:
        listed = ", ".join(f"{name} {size / _GIB:,.1f}" for name, size in parts.items())
        raise ConfigError(
            f"{config.name}: needs at least {needed / _GIB:,.1f} GiB of memory ({listed}), and "
            f"{device.type} has {there / _GIB:,.1f}; lower model.dim, model.n_layers, "
            "model.vocab_size, model.max_seq_len, train.micro_batch_size or data.seq_len"
        )
