"""Runs an ablation on a Ray cluster: a cell is a task, and its run folder comes back as files.

    driver ──a Cell──▶ task on some node ──▶ worker process ──▶ a temporary run folder
       ▲                                                                    │
       └────────── config.yaml, metrics.jsonl, summary.json, log.txt ◀──────┘

A task takes ``runner.threads`` cores, and a GPU or a share of one; Ray finds the node.  If the node
is lost, the cell starts anew on another.  Nodes share no folder with the driver.  So:

- minillama is installed on every node, in the same version;
- each node makes its tokens itself, in its own cache: what the config names by path (text files,
  plugins, a tokenizer, init_from) must be there, under that path, on every node;
- checkpoints stay behind and are deleted with the temporary folder; a cell that is stopped half
  way starts anew at the next call.

The one module that imports ray.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError, TaskCancelledError

from minillama.ablation import runner
from minillama.ablation.grid import Cell
from minillama.ablation.pool import Ended, Worker
from minillama.config.ablation import AblationConfig, RunnerConfig
from minillama.config.run import to_yaml
from minillama.errors import ConfigError, RunFolderError
from minillama.files import explain_write_errors, write_atomic

STAYS = ("checkpoints", ".lock")
"""What of a run folder does not come back."""

_POLL = 0.3  # seconds between looks at the wish to stop, and at the size of the cluster

Answer = tuple[str, str, dict[str, bytes]]
"""A cell's outcome, its error, and the files of its folder."""


def run(config: AblationConfig, *, progress: bool = True) -> Path:
    """Run every cell that is not finished on the cluster at ``runner.address``.

    Raises:
        ConfigError: there is no cluster, or no node of it is large enough for a cell; and as
            :func:`minillama.ablation.runner.run`, like all others.
    """
    with _connected(config.runner.address):

        def make_pool(cells: Sequence[Cell], workers: int, threads: int) -> RayPool:
            return RayPool(cells, workers, threads, config.runner)

        return runner.run(config, progress=progress, make_pool=make_pool)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster, unless the process is one already."""
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RayError) as error:
        raise ConfigError(
            f"runner.address = {address!r}: no Ray cluster answers ({str(error).splitlines()[0]}); "
            "start one by `ray start --head`, or let runner.address=local start one here"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


# ------------------------------------------------------------------------------------ on the node


def train_cell(cell: Cell, threads: int) -> Answer:
    """Train ``cell`` in a worker process and a temporary folder of this node."""
    with tempfile.TemporaryDirectory(prefix="minillama-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "run"
        here = cell.config.model_copy(update={"out_dir": str(folder)})
        worker = Worker(threads)
        try:
            ended = worker.train(dataclasses.replace(cell, config=here))
        finally:
            worker.kill()
            worker.wait()
        return ended.outcome, ended.error, _files(folder)


def _files(folder: Path) -> dict[str, bytes]:
    """Return what is in a run folder by its path there, but for what stays."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in STAYS
    }


# ---------------------------------------------------------------------------------- on the driver


class RayPool:
    """Trains ``cells`` as tasks, in their order; a context, as :class:`~.pool.Pool` is.

    Args:
        cells: what to train.
        workers: cells at once; 0: as many as the cluster has room for.
        threads: cores of a cell.
        config: the rest.

    Raises:
        ConfigError: no node has room for a cell.
    """

    def __init__(
        self, cells: Sequence[Cell], workers: int, threads: int, config: RunnerConfig
    ) -> None:
        self.events: queue.SimpleQueue[Cell | Ended] = queue.SimpleQueue()
        self._cells = deque(cells)
        self._workers, self._threads = workers, threads
        self._gpus = config.gpus
        if self._gpus is None:
            on_gpu = any(cell.config.train.device.startswith("cuda") for cell in cells)
            self._gpus = 1.0 if on_gpu else 0.0
        self._task = ray.remote(num_cpus=threads, num_gpus=self._gpus, max_retries=config.retries)(
            train_cell
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        if not self._room():
            raise ConfigError(
                f"no node of the Ray cluster has {threads} cores and {self._gpus:g} GPUs for a "
                "cell; lower runner.threads or runner.gpus, or add a node"
            )

    def __enter__(self) -> RayPool:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._thread.join(0 if kind is KeyboardInterrupt else None)

    @property
    def busy(self) -> bool:
        """Whether a cell is being trained or waits for it."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Start no further cell and end those that run, unsaved; returns at once."""
        self._stopping.set()

    def _room(self) -> int:
        """Return how many cells the nodes that are up can train at once."""
        room = 0
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            if node["Alive"]:
                has = node["Resources"]
                room_here = has.get("CPU", 0) // self._threads
                if self._gpus:
                    room_here = min(room_here, has.get("GPU", 0) // self._gpus)
                room += int(room_here)
        return room

    def _serve(self) -> None:
        running: dict[Any, Cell] = {}
        try:
            while True:
                # Where every node is lost, one task waits for a new one in Ray's own queue.
                limit = self._workers or max(1, self._room())
                while self._cells and len(running) < limit and not self._stopping.is_set():
                    cell = self._cells.popleft()
                    self.events.put(cell)
                    running[self._task.remote(cell, self._threads)] = cell
                if not running:
                    return
                done, _ = ray.wait(list(running), num_returns=1, timeout=_POLL)
                for task in done:
                    self.events.put(_ended(running.pop(task), task))
                if self._stopping.is_set():
                    for task, cell in running.items():
                        ray.cancel(task, force=True)
                        self.events.put(Ended(cell, "interrupted"))
                    return
        except Exception as error:  # the cluster itself is gone
            for cell in [*running.values(), *self._cells]:
                self.events.put(Ended(cell, "crashed", f"{type(error).__name__}: {error}"))


def _ended(cell: Cell, task: Any) -> Ended:
    """Fetch what a task brought, and lay its files down in the cell's folder."""
    try:
        outcome, error, files = ray.get(task)
        if outcome != "interrupted":
            _lay_down(cell, files)
    except TaskCancelledError:
        return Ended(cell, "interrupted")
    except (RayError, RunFolderError) as fault:
        return Ended(cell, "crashed", f"{type(fault).__name__}: {str(fault).splitlines()[0]}")
    if outcome == "interrupted":  # nobody asked for it: the node is being shut down
        return Ended(cell, "crashed", "its worker was stopped on the node")
    return Ended(cell, outcome, error)


def _lay_down(cell: Cell, files: Mapping[str, bytes]) -> None:
    """Write a cell's files, the summary last, since by it a cell counts as finished."""
    with explain_write_errors(cell.folder):
        for name in sorted(files, key=lambda name: name == "summary.json"):
            path = cell.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == "config.yaml":  # the node's own names its temporary folder
                write_atomic(path, to_yaml(cell.config))
            elif name == "summary.json":
                write_atomic(path, files[name].decode())
            else:
                path.write_bytes(files[name])
