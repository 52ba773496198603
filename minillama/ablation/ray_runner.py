"""Runs an ablation on a Ray cluster: each cell is a task whose run folder is sent back.

    driver ──a Cell──▶ task on some node ──▶ worker process ──▶ a temporary run folder
       ▲                                                                    │
       └────────── config.yaml, metrics.jsonl, summary.json, log.txt ◀──────┘

A task takes ``runner.threads`` cores, and a GPU or a share of one; Ray chooses the node.  If the
node is lost, the cell restarts on another one.  Nodes share no folder with the driver, so:

- the same version of minillama must be installed on every node;
- each node prepares the tokens in its own cache: text files, plugins, a tokenizer and init_from
  must exist on every node under the path that the config gives;
- checkpoints are not sent back: a cell that is stopped starts from step 0 in the next call.

The only module that imports ray.
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

_NOT_SENT = ("checkpoints", ".lock")
_POLL_SECONDS = 0.3  # how often the stop signal and the size of the cluster are checked

Answer = tuple[str, str, dict[str, bytes]]
"""A cell's outcome, its error, and the files of its folder."""


def run(config: AblationConfig, *, progress: bool = True) -> Path:
    """Run every cell that is not finished on the cluster at ``runner.address``.

    Raises:
        ConfigError: there is no cluster, or none of its nodes is large enough for a cell.
        MinillamaError: as :func:`minillama.ablation.runner.run`.
    """
    with _connected(config.runner.address):

        def make_pool(cells: Sequence[Cell], workers: int, threads: int) -> RayPool:
            return RayPool(cells, workers, threads, config.runner)

        return runner.run(config, progress=progress, make_pool=make_pool)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect to the cluster, unless the process is connected already."""
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RayError) as error:
        raise ConfigError(
            f"runner.address = {address!r}: no Ray cluster answers ({str(error).splitlines()[0]}); "
            "start one with `ray start --head`, or set runner.address=local to start one here"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


# ------------------------------------------------------------------------------------ on the node


def train_cell(cell: Cell, threads: int) -> Answer:
    """Train ``cell`` in a worker process and a temporary folder on this node."""
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
    """Return the files of a run folder by relative path, without checkpoints."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] not in _NOT_SENT
    }


# ---------------------------------------------------------------------------------- on the driver


class RayPool:
    """Trains ``cells`` as tasks, in order; a context with the interface of :class:`~.pool.Pool`.

    Args:
        cells: what to train.
        workers: how many cells train at once; 0: as many as fit on the cluster.
        threads: cores per cell.
        config: ``gpus`` and ``retries`` are used.

    Raises:
        ConfigError: a cell fits on no node.
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
        if not self._capacity():
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
        """Whether a cell is being trained or is waiting to be."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Start no further cell and end the running ones without saving; does not wait."""
        self._stopping.set()

    def _capacity(self) -> int:
        """Return how many cells the nodes that are alive can train at once."""
        total = 0
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            if node["Alive"]:
                has = node["Resources"]
                on_node = has.get("CPU", 0) // self._threads
                if self._gpus:
                    on_node = min(on_node, has.get("GPU", 0) // self._gpus)
                total += int(on_node)
        return total

    def _serve(self) -> None:
        running: dict[Any, Cell] = {}
        try:
            while True:
                # If every node is lost, one task waits in Ray's queue for a new node.
                limit = self._workers or max(1, self._capacity())
                while self._cells and len(running) < limit and not self._stopping.is_set():
                    cell = self._cells.popleft()
                    self.events.put(cell)
                    running[self._task.remote(cell, self._threads)] = cell
                if not running:
                    return
                done, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_SECONDS)
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
    """Fetch the result of a task and write its files to the cell's folder."""
    try:
        outcome, error, files = ray.get(task)
        if outcome == "interrupted":  # the driver cancels tasks, so this came from the node
            return Ended(cell, "crashed", f"on its node: {error}")
        _write_files(cell, files)
    except TaskCancelledError:
        return Ended(cell, "interrupted")
    except (RayError, RunFolderError) as raised:
        return Ended(cell, "crashed", f"{type(raised).__name__}: {str(raised).splitlines()[0]}")
    return Ended(cell, outcome, error)


def _write_files(cell: Cell, files: Mapping[str, bytes]) -> None:
    """Write a cell's files, the summary last, because with it the cell counts as finished."""
    with explain_write_errors(cell.folder):
        cell.folder.mkdir(exist_ok=True)
        for name in sorted(files, key=lambda name: name == "summary.json"):
            path = cell.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == "config.yaml":  # out_dir in the node's copy is its temporary folder
                write_atomic(path, to_yaml(cell.config))
            elif name == "summary.json":
                write_atomic(path, files[name].decode())
            else:
                path.write_bytes(files[name])
