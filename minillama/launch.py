"""How this process was started: its ranks, its CPUs, its output streams.  Loads no torch.

A *rank* is one of the processes that train a model together; torchrun numbers them from 0.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from minillama.errors import MinillamaError, OtherRankError


def by_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """Return this process's rank among all; 0 without torchrun."""
    return int(os.environ["RANK"]) if by_torchrun() else 0


def local_rank() -> int:
    """Return this process's rank on its machine; 0 without torchrun."""
    return int(os.environ["LOCAL_RANK"]) if by_torchrun() else 0


def world_size() -> int:
    """Return how many processes torchrun has started in all; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if by_torchrun() else 1


def local_world_size() -> int:
    """Return how many of them run on this machine; 1 without torchrun."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if by_torchrun() else 1


def restarts() -> int:
    """Return how often torchrun has restarted all processes because one of them died."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"]) if by_torchrun() else 0


def job_id() -> str:
    """Return an id of this torchrun call, the same over its restarts."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{run_id} {socket.gethostname()} {os.getppid()}"


def command(*arguments: str) -> str:
    """Return the command line that runs minillama with ``arguments`` on this many processes."""
    if not by_torchrun():
        return shlex.join(("minillama", *arguments))
    started = ("torchrun", "--nproc-per-node", str(local_world_size()), "-m", "minillama")
    return shlex.join((*started, *arguments))


def on_first_rank(error: MinillamaError) -> MinillamaError:
    """Return what to raise for an ``error`` that every rank raises, so that it is printed once.

    The first rank of each machine raises ``error``; the others end silently with its exit status.
    """
    return error if local_rank() == 0 else OtherRankError(str(error), error.exit_status)


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs this process may use: by its affinity and its container's CPU quota.

    A quota of one and a half CPUs counts as two.

    Args:
        root: the folder that holds ``proc`` and ``sys``.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        allowed = os.cpu_count() or 1
    return max(1, min([allowed, *map(math.ceil, _cpu_quotas(root))]))


def _cpu_quotas(root: Path) -> list[float]:
    """Return the CPU quotas of this process's cgroup and of those above it, in CPUs."""
    cgroups = root / "sys/fs/cgroup"
    try:
        entries = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    quotas = []
    for _, controllers, path in (entry.split(":", 2) for entry in entries):
        if controllers and "cpu" not in controllers.split(","):
            continue
        # cgroup v2 has one hierarchy; v1 has one for each set of controllers.
        top = cgroups if not controllers else cgroups / "cpu"
        place = top / path.strip("/")
        for folder in (place, *place.parents):
            try:
                if controllers:
                    quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
                    period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
                else:
                    quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
                if quota != "max" and int(quota) > 0:
                    quotas.append(int(quota) / int(period))
            except (OSError, ValueError):
                pass  # this level has no quota
            if folder == top:
                break
    return quotas


def processor_name() -> str:
    """Return the model of this machine's processor, or its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package in a new Python process.

    Unlike ``python -m``, it does not put the current folder first on ``sys.path``, where a file of
    the user could shadow a module of the standard library.  This package is found wherever this
    process found it.
    """
    root = str(Path(__file__).resolve().parents[1])
    return [sys.executable, "-P", "-c", _RUN_MODULE, root, module, *arguments]


_RUN_MODULE = """\
import runpy, sys, sysconfig
_, root, module, *arguments = sys.argv
installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
before = [i for i, path in enumerate(sys.path) if path in installed]
sys.path.insert(min(before, default=len(sys.path)), root)
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class SafeStream:
    """A text stream whose output is lost where it cannot be written, such as to a full disk.

    Args:
        stream: where the output goes; None: nowhere.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write ``text`` if that is possible."""
        with suppress(OSError, ValueError, AttributeError):  # full, closed, missing
            self._stream.write(text)  # type: ignore[union-attr]
        return len(text)

    def flush(self) -> None:
        """Flush the stream if that is possible."""
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()  # type: ignore[union-attr]

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # closed
            return False


def open_missing_streams() -> None:
    """Connect closed standard streams to the null device.

    Otherwise the next file that is opened would become stdin, stdout or stderr, and receive what
    libraries print there.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            stream = os.fdopen(number, mode, encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
