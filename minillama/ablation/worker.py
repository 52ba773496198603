"""A worker of an ablation: one process that trains cell after cell.

    parent ──a cell as JSON, a line each──▶ stdin │ worker │ stdout ──how it ended──▶ parent

A cell is its ``config`` and ``began``, the time at which it was taken up.

The end of stdin is the wish to stop: what is being trained is saved first.  It comes when the
parent closes the pipe and also when the parent dies, so no worker outlives it.

Start it as ``python -m minillama.ablation.worker THREADS``, with ``OMP_NUM_THREADS`` and its like
set as well: torch sizes its pools as it is imported.
"""

from __future__ import annotations

import _thread
import json
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TextIO

import torch
from filelock import FileLock, Timeout

from minillama.config.run import parse_run
from minillama.errors import DivergedError, InterruptedRunError, MinillamaError
from minillama.training.trainer import train

_PATIENCE = 60.0
"""Seconds to wait for a worker of an earlier, killed ablation that is still saving this cell."""


def main(threads: int) -> None:
    """Serve until stdin ends; ``threads`` is what torch may use."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    # A shell that starts the parent in the background has it, and us, ignore this signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stdout is for answers alone; what anyone else prints goes elsewhere
    jobs: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, jobs), daemon=True).start()
    try:
        while (job := jobs.get()) is not None:
            answers.write(json.dumps(_train(job)) + "\n")
            answers.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # nothing was being trained, and nobody is there to hear of it


def _listen(lines: TextIO, jobs: queue.SimpleQueue[str | None]) -> None:
    for line in lines:
        jobs.put(line)
    jobs.put(None)
    _thread.interrupt_main()  # as Ctrl-C does: the trainer saves and leaves


def _train(job: str) -> dict[str, str]:
    """Train one cell, its output going to its own log, and say how it ended."""
    cell = json.loads(job)
    config = parse_run(cell["config"], "cell")
    folder = Path(config.out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        _wait_for(folder)
        train(config, resume=True, progress=False, began=cell["began"])
    except DivergedError as error:
        print(error, flush=True)  # a result like any other; the summary has it
    except (InterruptedRunError, KeyboardInterrupt) as error:
        print(str(error) or "interrupted", flush=True)
        return {"outcome": "interrupted", "error": ""}
    except MinillamaError as error:
        print(error, flush=True)
        return {"outcome": "crashed", "error": str(error)}
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        return {"outcome": "crashed", "error": f"{type(error).__name__}: {error}"}
    return {"outcome": "ended", "error": ""}


def _wait_for(folder: Path) -> None:
    try:
        FileLock(folder / ".lock", timeout=_PATIENCE).acquire().lock.release()
    except Timeout:
        return  # the trainer says so, in better words


if __name__ == "__main__":
    main(int(sys.argv[1]))
