"""What torchrun tells each of the processes that it starts.  Nothing here loads torch.

A *rank* is one of the processes that train a model together; torchrun numbers them from 0.
"""

from __future__ import annotations

import os
import shlex
import socket

from minillama.errors import MinillamaError, OtherRankError


def by_torchrun() -> bool:
    """Tell whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """Return this process's number among all; 0 without torchrun."""
    return int(os.environ["RANK"]) if by_torchrun() else 0


def local_rank() -> int:
    """Return this process's number on its machine; 0 without torchrun."""
    return int(os.environ["LOCAL_RANK"]) if by_torchrun() else 0


def world_size() -> int:
    """Return how many processes there are in all; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if by_torchrun() else 1


def local_world_size() -> int:
    """Return how many processes there are on this machine; 1 without torchrun."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if by_torchrun() else 1


def restarts() -> int:
    """Return how often torchrun has started all processes again because one of them died."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"]) if by_torchrun() else 0


def job() -> str:
    """Return what stays the same over the restarts of one torchrun, and only there."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{run_id} {socket.gethostname()} {os.getppid()}"


def command(*arguments: str) -> str:
    """Return the command line that runs minillama with ``arguments`` on as many processes."""
    if not by_torchrun():
        return shlex.join(("minillama", *arguments))
    started = ("torchrun", "--nproc-per-node", str(local_world_size()), "-m", "minillama")
    return shlex.join((*started, *arguments))


def alike(error: MinillamaError) -> MinillamaError:
    """Return what to raise for an ``error`` that every rank meets, so that one of a machine tells.

    The others end in silence, with the same exit status.
    """
    return error if local_rank() == 0 else OtherRankError(str(error), error.exit_status)
