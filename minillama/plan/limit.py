"""A run that cannot fit is refused before it takes the memory, with what it would need."""

from __future__ import annotations

import logging

import torch

from minillama.config import RunConfig
from minillama.errors import ConfigError
from minillama.plan.machine import GIB, VARIABLE, memory_limit
from minillama.plan.memory import BLOCK_OBJECTS, PROCESS, Memory, Parallel, estimate_memory

SURE = 0.75
"""A run is refused only where this share of its estimate is too much: no estimate is perfect."""

_log = logging.getLogger("minillama")


def refuse_what_cannot_fit(
    config: RunConfig, device: torch.device, parallel: Parallel = "none", n_ranks: int = 1
) -> None:
    """Make sure that ``device`` has the memory for one of ``n_ranks`` to train ``config``.

    Takes less than a millisecond.  Where the estimate is but a little beyond, it only warns.

    Raises:
        ConfigError: it has not; the message has the estimate by part and what to lower.
    """
    limit = memory_limit(device)
    if limit is None:
        return
    n_layers = config.model.n_layers
    if n_layers * BLOCK_OBJECTS > limit:  # so many that they should not be gone through, either
        raise ConfigError(
            f"model.n_layers = {n_layers:,}: as objects alone they need "
            f"{_gib(n_layers * BLOCK_OBJECTS)} of memory, and {device.type} has {_gib(limit)}; "
            "lower it"
        )
    on_cpu = device.type == "cpu"
    memory = estimate_memory(config, parallel, n_ranks, on_cpu=on_cpu)
    needed = memory.peak_on_cpu + PROCESS if on_cpu else memory.peak
    sure = SURE * memory.peak
    if config.train.compile:  # which keeps less, by an amount that only the compiler knows
        sure -= SURE * (memory.activations + memory.loss)
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in listed(memory) if size >= GIB / 100)
    told = (
        f"training needs about {_gib(needed)} of memory ({parts}) and {device.type} has "
        f"{_gib(limit)}"
    )
    if sure > limit:
        raise ConfigError(
            f"{told}; lower {_what_to_lower(config, memory, limit)}. Should this machine have "
            f"more, set {VARIABLE} in the environment"
        )
    if needed > limit:
        _log.warning("%s: %s; it may not fit", config.name, told)


def listed(memory: Memory) -> list[tuple[str, int]]:
    """Return the parts by name."""
    hidden = ("embedding_gradients", "gaps", "accumulates")
    return [(name, size) for name, size in vars(memory).items() if name not in hidden]


def _what_to_lower(config: RunConfig, memory: Memory, limit: int) -> str:
    """Name the fields that the large parts come from, those of the largest part first."""
    train, rows = config.train, config.train.micro_batch_size or config.train.batch_size
    per_pass = (
        f"train.micro_batch_size (now {rows}), which changes no result"
        if rows > 1
        else f"data.seq_len (now {config.data.seq_len})"
    )
    causes = [
        (memory.activations + memory.loss + memory.copies, per_pass),
        (
            memory.weights + memory.gradients + memory.optimizer,
            "model.dim, model.n_layers or model.vocab_size",
        ),
        (
            memory.other,
            f"train.batch_size (now {train.batch_size}) or model.max_seq_len "
            f"(now {config.model.max_seq_len})",
        ),
    ]
    causes.sort(reverse=True)
    named = [causes[0][1]] + [fields for size, fields in causes[1:] if size > limit / 3]
    return "; and ".join(named)


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size < 10 * GIB else f"{size / GIB:,.0f} GiB"
