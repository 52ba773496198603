"""A pool of worker processes: each is driven by a thread that gives it one cell after another.

When a worker dies, only the cell that it was training is lost, and the pool knows which one; the
thread then starts a new worker and goes on with the next cell.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

from minillama import launch
from minillama.ablation.grid import Cell

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""The thread pools of torch and numpy are sized by these when they are imported."""
_SAVE_SECONDS = 120.0
"""How long workers may take to save their runs when they are asked to stop."""
_SIGNAL_SECONDS = 1.0
"""A signal to all processes reaches some workers before the parent has noticed its own."""


@dataclass(frozen=True)
class Ended:
    """How a cell's training ended: ``ended``, ``crashed`` or ``interrupted``, and the error."""

    cell: Cell
    outcome: str
    error: str = ""


class Worker:
    """One process that runs :mod:`minillama.ablation.worker`.

    It is started in a new session, so that Ctrl-C in a terminal reaches only the parent, which then
    asks its workers to stop.
    """

    def __init__(self, threads: int) -> None:
        self._process = subprocess.Popen(
            launch.module_command("minillama.ablation.worker", str(threads)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | dict.fromkeys(_THREAD_VARIABLES, str(threads)),
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    def train(self, cell: Cell, began: float | None = None) -> Ended:
        """Train ``cell`` and return how that ended, be it by the death of the process.

        Args:
            cell: what to train.
            began: when its starting time begins, by ``time.perf_counter()``; None: now.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            began = began or time.perf_counter()
            job = {"began": began, "config": cell.config.model_dump(mode="json")}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except (OSError, ValueError):  # the pipe broke, or stop() closed it
            answer = ""
        if answer:
            return Ended(cell, **json.loads(answer))
        status = process.wait()
        if status in (0, -signal.SIGINT):  # as stop() makes it, but a plugin can do the same
            error = "the worker exited before its cell was finished"
            return Ended(cell, "interrupted", error)
        if status < 0:
            name = signal.Signals(-status).name
            hint = "; out of memory?" if name == "SIGKILL" else ""
            return Ended(cell, "crashed", f"the worker was killed by {name}{hint}")
        return Ended(cell, "crashed", f"the worker exited with status {status}")

    def stop(self) -> None:
        """Ask the worker to save and exit; does not wait for it."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has exited already
            self._process.stdin.close()

    def kill(self) -> None:
        """End the process at once, without saving."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended, and close its pipes."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None


class Pool:
    """``n_workers`` workers that train ``cells`` in order; the context leaves no process behind.

    ``events`` receives each cell when it starts, and an :class:`Ended` when it has ended.
    """

    def __init__(self, cells: Sequence[Cell], n_workers: int, threads: int) -> None:
        self.events: queue.SimpleQueue[Cell | Ended] = queue.SimpleQueue()
        self._cells = deque(cells)
        self._threads = threads
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._workers: dict[int, Worker] = {}
        self._slots = [
            threading.Thread(target=self._serve, args=(slot,), daemon=True)
            for slot in range(min(n_workers, len(cells)))
        ]

    def __enter__(self) -> Pool:
        for slot in self._slots:
            slot.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
            for slot in self._slots:  # after a second Ctrl-C, do not wait
                slot.join(0 if kind is KeyboardInterrupt else _SAVE_SECONDS)
        finally:
            with self._lock:
                for worker in self._workers.values():
                    worker.kill()

    @property
    def busy(self) -> bool:
        """Whether a cell is being trained or is waiting to be."""
        return any(slot.is_alive() for slot in self._slots)

    def stop(self) -> None:
        """Start no further cell and ask every worker to save and exit; does not wait."""
        self._stopping.set()
        with self._lock:
            for worker in self._workers.values():
                worker.stop()

    def _serve(self, slot: int) -> None:
        while (cell := self._next_cell()) is not None:
            began = time.perf_counter()
            self.events.put(cell)
            try:
                worker = self._worker(slot)
            except OSError as error:
                self.events.put(Ended(cell, "crashed", f"no worker could be started: {error}"))
                continue
            ended = worker.train(cell, began) if worker else Ended(cell, "interrupted")
            if ended.outcome == "interrupted" and not self._stopping.wait(_SIGNAL_SECONDS):
                ended = replace(ended, outcome="crashed")  # the pool did not ask for it
            self.events.put(ended)
        if slot in self._workers:  # it is idle, so there is nothing to save
            self._workers[slot].kill()
            self._workers[slot].wait()

    def _next_cell(self) -> Cell | None:
        with self._lock:
            return self._cells.popleft() if self._cells and not self._stopping.is_set() else None

    def _worker(self, slot: int) -> Worker | None:
        """Return the slot's worker, a new one if the old has died; None if the pool is stopping."""
        with self._lock:
            worker = self._workers.get(slot)
            if worker is not None and not worker.alive:
                worker.wait()
                worker = None
            if worker is None and not self._stopping.is_set():
                worker = self._workers[slot] = Worker(self._threads)
            return worker
