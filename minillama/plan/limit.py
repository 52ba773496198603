"""How much memory this machine has for a process, and refusing a run that cannot fit."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from minillama.config import RunConfig
from minillama.errors import ConfigError
from minillama.formatting import format_bytes
from minillama.plan.memory import BLOCK_OBJECTS, PROCESS, Memory, Parallel, estimate_memory

VARIABLE = "MINILLAMA_MEMORY_GIB"
"""Environment variable: how much memory a run may take, instead of what this machine has."""

GIB = 1 << 30
_UNLIMITED = 1 << 60
"""cgroup v1 writes a larger number where there is no limit."""

SURE = 0.75
"""A run is refused only if this share of its estimate does not fit: no estimate is exact."""

_log = logging.getLogger("minillama")


def refuse_what_cannot_fit(
    config: RunConfig, device: torch.device, parallel: Parallel = "none", n_ranks: int = 1
) -> None:
    """Check that ``device`` has the memory for one of ``n_ranks`` to train ``config``.

    Where the estimate is only a little larger, it warns.

    Raises:
        ConfigError: it does not; the message has the estimate by part and what to lower.
    """
    limit = memory_limit(device)
    if limit is None:
        return
    n_layers = config.model.n_layers
    if n_layers * BLOCK_OBJECTS > limit:  # too many to go through
        raise ConfigError(
            f"model.n_layers = {n_layers:,}: their Python objects alone need "
            f"{format_bytes(n_layers * BLOCK_OBJECTS)} of memory, and {device.type} has "
            f"{format_bytes(limit)}; lower it"
        )
    on_cpu = device.type == "cpu"
    memory = estimate_memory(config, parallel, n_ranks, on_cpu=on_cpu)
    needed = memory.peak_on_cpu + PROCESS if on_cpu else memory.peak
    sure = SURE * memory.peak
    if config.train.compile:  # which keeps less; how much, only the compiler knows
        sure -= SURE * (memory.activations + memory.loss)
    shown = [(name, size) for name, size in memory_parts(memory) if size >= needed / 1000]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in shown)
    message = (
        f"training needs about {format_bytes(needed)} of memory ({parts}) and {device.type} has "
        f"{format_bytes(limit)}"
    )
    if sure > limit:
        raise ConfigError(
            f"{message}; lower {_what_to_lower(config, memory, limit)}. If this machine has more, "
            f"set {VARIABLE} in the environment"
        )
    if needed > limit:
        _log.warning("%s: %s; it may not fit", config.name, message)


def memory_parts(memory: Memory) -> list[tuple[str, int]]:
    """Return the bytes of each part by name."""
    hidden = ("embedding_gradients", "accumulates", "recompute")
    return [(name, size) for name, size in vars(memory).items() if name not in hidden]


def _what_to_lower(config: RunConfig, memory: Memory, limit: int) -> str:
    """Name the fields that determine the large parts, those of the largest part first."""
    train, rows = config.train, config.train.micro_batch_size or config.train.batch_size
    per_pass = (
        f"train.micro_batch_size (now {rows}), which changes no result"
        if rows > 1
        else f"data.seq_len (now {config.data.seq_len})"
    )
    causes = [
        (memory.one_pass, per_pass),
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


def memory_limit(device: torch.device) -> int | None:
    """Return the bytes of memory that ``device`` has; None where this cannot be found out.

    The CPU's is the smaller of physical memory plus swap space and what the control groups of this
    process allow.  ``MINILLAMA_MEMORY_GIB`` in the environment overrides both.

    Raises:
        ConfigError: that variable is not a positive number.
    """
    value = os.environ.get(VARIABLE)
    if value is not None:
        return _from_variable(value)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory() if device.type == "cpu" else None


def _from_variable(value: str) -> int:
    try:
        size = float(value)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise ConfigError(f"{VARIABLE} = {value!r} in the environment: must be a number of GiB")
    return int(size * GIB)


def host_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that a process may take here; ``root`` holds /proc and /sys."""
    limits = [*_physical(root), *_cgroup_limits(root)]
    return min(limits) if limits else None


def _physical(root: Path) -> Iterator[int]:
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
        kib = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()}
        yield 1024 * (kib["MemTotal"] + kib.get("SwapTotal", 0))
    except (OSError, ValueError, KeyError, IndexError):
        try:  # macOS has no /proc
            yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            return


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the limits of this process's control groups, version 1 or 2, and of their parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, name = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.max"
        elif "memory" in controllers.split(","):
            mounts, name = ["sys/fs/cgroup/memory"], "memory.limit_in_bytes"
        else:
            continue
        for mount in mounts:
            group = root / mount / path.strip("/")
            # In a container the path may be the host's, and only the mount itself exists.
            for folder in (group, *group.parents):
                yield from _limit_in(folder / name)
                if folder == root / mount:
                    break


def _limit_in(file: Path) -> Iterator[int]:
    try:
        limit = int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # missing, or "max"
        return
    if 0 < limit < _UNLIMITED:
        yield limit
