"""How much memory this machine lets a process have."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from minillama.errors import ConfigError

VARIABLE = "MINILLAMA_MEMORY_GIB"
"""In the environment: how much memory a run may take, in place of what is found here."""

GIB = 1 << 30
_UNLIMITED = 1 << 60
"""What cgroup v1 writes for no limit is larger."""


def memory_limit(device: torch.device) -> int | None:
    """Return the bytes of memory that ``device`` has; None where this cannot be told.

    The CPU's is the smaller of what is built in, with its swap space, and what the control groups
    of this process allow.  ``MINILLAMA_MEMORY_GIB`` in the environment overrules either.

    Raises:
        ConfigError: that variable holds no positive number.
    """
    said = os.environ.get(VARIABLE)
    if said is not None:
        return _from_variable(said)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory() if device.type == "cpu" else None


def _from_variable(said: str) -> int:
    try:
        size = float(said)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise ConfigError(f"{VARIABLE} = {said!r} in the environment: must be a number of GiB")
    return int(size * GIB)


def host_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that a process may take here; ``root`` is where /proc and /sys stand."""
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
    """Yield the limits of this process's control groups, version 1 or 2, and of those above."""
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
            # In a container the path may be the host's, and only the mount itself is there.
            for folder in (group, *group.parents):
                yield from _limit_in(folder / name)
                if folder == root / mount:
                    break


def _limit_in(file: Path) -> Iterator[int]:
    try:
        limit = int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not there, or "max"
        return
    if 0 < limit < _UNLIMITED:
        yield limit
