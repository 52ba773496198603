"""A worker process of an ablation: trains one cell after another.

    parent ──a cell as one line of JSON──▶ stdin │ worker │ stdout ──how it ended──▶ parent

A cell is its ``config`` and ``began``: when the parent gave it out, by ``time.perf_counter()``, a
clock that all processes of a machine share and that is never set back.

The end of stdin means: save what is being trained, then exit.  It comes when the parent closes the
pipe and also when the parent dies, so no worker outlives its parent.

Started as ``python ... minillama.ablation.worker THREADS`` with ``OMP_NUM_THREADS`` and similar
variables set as well, because torch sizes its thread pools when it is imported.
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

_LOCK_SECONDS = 60.0
"""How long to wait for a worker of an earlier, killed ablation that is still saving this cell."""


def main(threads: int) -> None:
    """Train cells until stdin ends, with ``threads`` threads."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    # A shell that starts the parent in the background makes it and its children ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # The pipes belong to the protocol: what a plugin reads is empty, what it prints goes to stderr.
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    jobs: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines, jobs), daemon=True).start()
    try:
        while (job := jobs.get()) is not None:
            answers.write(json.dumps(_train(job)) + "\n")
            answers.flush()
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # nothing was being trained, or nobody reads the answer


def _listen(lines: TextIO, jobs: queue.SimpleQueue[str | None]) -> None:
    for line in lines:
        jobs.put(line)
    jobs.put(None)
    _thread.interrupt_main()  # as Ctrl-C does: the trainer saves and stops


def _train(job: str) -> dict[str, str]:
    """Train one cell with its output in its own log, and return how that ended."""
    cell = json.loads(job)
    folder = Path(cell["config"]["out_dir"])
    try:
        folder.mkdir(exist_ok=True)
        with (folder / "log.txt").open("a", encoding="utf-8") as log:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        config = parse_run(cell["config"], "cell")
        _wait_for_lock(folder)
        train(config, resume=True, progress=False, began=cell["began"])
    except DivergedError as error:
        print(error, flush=True)  # a result like any other; it is in the summary
    except (InterruptedRunError, KeyboardInterrupt) as error:
        message = str(error) or "interrupted"
        print(message, flush=True)
        return {"outcome": "interrupted", "error": message}
    except MinillamaError as error:
        print(error, flush=True)
        return {"outcome": "crashed", "error": str(error)}
    except (Exception, SystemExit) as error:  # a plugin may call sys.exit
        traceback.print_exc()
        sys.stderr.flush()
        return {"outcome": "crashed", "error": f"{type(error).__name__}: {error}"}
    return {"outcome": "ended", "error": ""}


def _wait_for_lock(folder: Path) -> None:
    try:
        FileLock(folder / ".lock", timeout=_LOCK_SECONDS).acquire().lock.release()
    except Timeout:
        return  # the trainer raises an error that explains it


if __name__ == "__main__":
    main(int(sys.argv[1]))
