"""Worker processes, each driven by a thread that feeds it cells one after the other.

A worker that the system kills takes one cell with it, and it is known which: its slot starts a new
worker and goes on with the next cell.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from minillama.ablation.grid import Cell

_POOL_SIZES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""What sizes the thread pools of torch and numpy, read as they are imported."""
_GRACE = 120.0
"""Seconds that workers have to save what they train, once told to stop."""


@dataclass(frozen=True)
class Ended:
    """How a cell left its worker: ``ended``, ``crashed`` (with an error) or ``interrupted``."""

    cell: Cell
    outcome: str
    error: str = ""


class Worker:
    """One process of :mod:`minillama.ablation.worker`.

    It has a session of its own, so that Ctrl-C in a terminal reaches the parent alone, which then
    stops its workers in order.
    """

    def __init__(self, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minillama.ablation.worker", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | dict.fromkeys(_POOL_SIZES, str(threads)),
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    def train(self, cell: Cell, began: float | None = None) -> Ended:
        """Train ``cell``, taken up at ``began`` (None: now), and return how it ended.

        That may be by the death of the process.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            job = {"began": began or time.time(), "config": cell.config.model_dump(mode="json")}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except (OSError, ValueError):  # the pipe broke, or stop() closed it
            answer = ""
        if answer:
            return Ended(cell, **json.loads(answer))
        status = process.wait()
        if status in (0, -signal.SIGINT):  # it left on our wish, before it trained anything
            return Ended(cell, "interrupted")
        if status < 0:
            name = signal.Signals(-status).name
            hint = "; out of memory?" if name == "SIGKILL" else ""
            return Ended(cell, "crashed", f"the worker was ended by {name}{hint}")
        return Ended(cell, "crashed", f"the worker ended with status {status}")

    def stop(self) -> None:
        """Ask the worker to save and leave; returns at once."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it is gone already
            self._process.stdin.close()

    def kill(self) -> None:
        """End the worker where it stands."""
        self._process.kill()

    def wait(self) -> None:
        """Return once the process has ended, and close its pipes."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None


class Pool:
    """``n_workers`` slots that train ``cells`` in their order; a context that leaves no process.

    ``events`` gets a cell as it starts, then how it :class:`Ended`.
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
            for slot in self._slots:  # a second Ctrl-C has no patience
                slot.join(0 if kind is KeyboardInterrupt else _GRACE)
        finally:
            with self._lock:
                for worker in self._workers.values():
                    worker.kill()

    @property
    def busy(self) -> bool:
        """Whether a cell is being trained or waits for it."""
        return any(slot.is_alive() for slot in self._slots)

    def stop(self) -> None:
        """Start no further cell and ask every worker to save and leave; returns at once."""
        self._stopping.set()
        with self._lock:
            for worker in self._workers.values():
                worker.stop()

    def _serve(self, slot: int) -> None:
        while (cell := self._next()) is not None:
            began = time.time()
            self.events.put(cell)
            try:
                worker = self._worker(slot)
            except OSError as error:
                self.events.put(Ended(cell, "crashed", f"no worker could be started: {error}"))
                continue
            self.events.put(worker.train(cell, began) if worker else Ended(cell, "interrupted"))
        if slot in self._workers:  # it trains nothing now, so there is nothing to wait for
            self._workers[slot].kill()
            self._workers[slot].wait()

    def _next(self) -> Cell | None:
        with self._lock:
            return self._cells.popleft() if self._cells and not self._stopping.is_set() else None

    def _worker(self, slot: int) -> Worker | None:
        """Return the slot's worker, a new one if the old is dead; None if all are to stop."""
        with self._lock:
            worker = self._workers.get(slot)
            if worker is not None and not worker.alive:
                worker.wait()
                worker = None
            if worker is None and not self._stopping.is_set():
                worker = self._workers[slot] = Worker(self._threads)
            return worker
