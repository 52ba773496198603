"""Runs an ablation: every cell an ordinary run, spread over workers that share the cores out.

    cells ──prepare──▶ text and tokenizer, once ──▶ Pool ──▶ cells/…, a row of cells.csv each

What a cell leaves on disk is all that counts: a finished one is not run again, an unfinished one
goes on where it was saved, so the same command after a kill at any moment completes the grid.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol

from filelock import FileLock, Timeout

from minillama.ablation.display import Display
from minillama.ablation.estimate import TIMED_STEPS, estimate
from minillama.ablation.grid import Cell, cells
from minillama.ablation.pool import Ended, Pool
from minillama.ablation.sessions import RunningSession
from minillama.ablation.table import CellTable, is_finished
from minillama.config.ablation import AblationConfig
from minillama.config.loading import dotted, read_yaml
from minillama.config.run import parse_run, to_yaml
from minillama.data.prepare import prepare
from minillama.errors import (
    ConfigError,
    InterruptedRunError,
    MinillamaError,
    RunFolderError,
)
from minillama.files import explain_write_errors, write_atomic
from minillama.model.norms import is_ours
from minillama.plan.limit import refuse_what_cannot_fit
from minillama.training.device import pick_device
from minillama.training.interrupt import StopSignal

UNCOUNTED = ("name", "out_dir", "loggers")
"""Fields of a run that do not decide its numbers."""

_POLL = 0.3  # seconds between looks at how far the running cells are

_log = logging.getLogger("minillama")


class CellPool(Protocol):
    """What trains the cells: :class:`Pool` here, or another way to spread them."""

    events: queue.SimpleQueue[Cell | Ended]

    def __enter__(self) -> CellPool: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    @property
    def busy(self) -> bool:
        """Whether a cell is being trained or waits for it."""

    def stop(self) -> None:
        """Start no further cell and end those that run; returns at once."""


def run(
    config: AblationConfig,
    *,
    progress: bool = True,
    make_pool: Callable[[Sequence[Cell], int, int], CellPool] = Pool,
) -> Path:
    """Run every cell that is not finished and return the ablation's folder.

    A cell that diverges or collapses is a result; one that crashes is a row of ``cells.csv`` with
    its error, its output is in ``log.txt`` of its folder, and the others go on.

    Args:
        config: of the ablation; see :func:`minillama.config.load_ablation`.
        progress: show one bar for the whole, and a line for each cell that ends.
        make_pool: what trains the cells, made from them, the number of workers and the threads of
            each; :func:`minillama.ablation.ray_runner.run` brings another.

    Raises:
        ConfigError: an arm is faulty or needs more memory than there is, or the folder holds cells
            of another config.
        DataError, TokenizerError: the text cannot be used.
        RunFolderError: the folder cannot be written, or another ablation is writing into it.
        InterruptedRunError: Ctrl-C or SIGTERM came; what was running is saved.
        MinillamaError: every cell crashed.
    """
    asked = time.perf_counter()
    grid = cells(config)
    for cell in grid:
        # To count the parameters of a user's own norm is to build it: its cell's process may.
        if is_ours(cell.config.model.norm.kind):
            refuse_what_cannot_fit(cell.config, pick_device(cell.config.train.device))
    folder = _folder(config)
    with _claimed(folder):
        _refuse_changed(grid)
        _prepare_data(grid)
        with explain_write_errors(folder):
            write_atomic(folder / "ablation.yaml", to_yaml(_standing_alone(config)))
        table = CellTable(folder, grid)
        table.write()
        todo = [cell for cell in _run_order(grid) if cell.folder not in table.rows]
        if not todo:
            _log.info("%s: all %d cells are finished already", folder, len(grid))
            return folder
        workers, threads = _share_cores(config, grid)
        session = RunningSession(folder, workers, threads, time.perf_counter() - asked)
        with (
            session,
            StopSignal() as stop,
            Display(grid, table, progress) as display,
            make_pool(todo, workers, threads) as pool,
        ):
            for event in _events(pool, stop, display):
                if isinstance(event, Cell):
                    display.started(event)
                else:
                    table.add(event)
                    session.save()
                    display.ended(event)
        if stop.requested:
            raise InterruptedRunError(
                f"stopped with {len(table.rows)} of {len(grid)} cells ended; the others are saved "
                "as far as they came, and the same command goes on"
            )
    crashed = [row for row in table.rows.values() if row["fate"] == "crashed"]
    if len(crashed) == len(grid):
        log = folder / crashed[0]["run_dir"] / "log.txt"
        raise MinillamaError(f"every cell crashed; the first: {crashed[0]['error']}; see {log}")
    if crashed:
        _log.warning("%d of %d cells crashed; run again to try them anew", len(crashed), len(grid))
    return folder


def dry_run(config: AblationConfig) -> str:
    """Return the cells, their tokens and an estimate of the time, from real steps of each arm.

    Raises:
        ConfigError, DataError, TokenizerError, RunFolderError: as :func:`run`.
    """
    grid = cells(config)
    _refuse_changed(grid)
    _prepare_data(grid)
    todo = [cell for cell in grid if not is_finished(cell)]
    lines = [
        f"{cell.folder}: {cell.tokens:,} tokens" + ("" if cell in todo else ", finished already")
        for cell in grid
    ]
    tokens = sum(cell.tokens for cell in todo)
    lines.append(f"{len(todo)} of {len(grid)} cells to run, {tokens:,} tokens")
    if todo:
        workers, threads = _share_cores(config, grid)
        workers = workers or 1
        seconds = estimate(todo, workers, threads)
        minutes = f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"
        lines.append(
            f"about {minutes}, from {TIMED_STEPS} real steps and two validations of each arm "
            f"(workers: {workers}, threads of each: {threads})"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------------------- before the cells


def _folder(config: AblationConfig) -> Path:
    return Path(config.out_dir or f"runs/{config.name}")


def _standing_alone(config: AblationConfig) -> AblationConfig:
    """Return the config with its base in it, so that it can be read from any folder."""
    if isinstance(config.base, str):
        return config.model_copy(update={"base": read_yaml(config.base)})
    return config


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Hold the ablation's folder alone.

    Raises:
        RunFolderError: it cannot be written, or another ablation holds it.
    """
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise RunFolderError(
                f"{folder}: another ablation is running in this folder; wait for it, "
                "or choose another out_dir"
            ) from None
    try:
        yield
    finally:
        lock.release()


def _refuse_changed(grid: Sequence[Cell]) -> None:
    """Make sure that no cell's folder holds a run of another config.

    Raises:
        ConfigError: naming each such cell and its first differing field.
    """
    changed = []
    for cell in grid:
        if not (cell.folder / "config.yaml").is_file():
            continue
        saved = parse_run(read_yaml(cell.folder), str(cell.folder))
        before, now = (dict(dotted(c.model_dump(mode="json"))) for c in (saved, cell.config))
        for name in sorted(before | now):
            was, wanted = before.get(name), now.get(name)
            # stop or run_on is the runner's choice, and no measure differs by it; skip does decide
            stops = name == "train.on_nonfinite" and "skip" not in (was, wanted)
            if name not in UNCOUNTED and not stops and was != wanted:
                changed.append(f"{cell.folder} has {name} = {was!r}, not {wanted!r}")
                break
    if changed:
        shown = "\n  ".join(changed[:5] + ([f"… {len(changed)} in all"] if changed[5:] else []))
        raise ConfigError(
            "cells of another config are here; delete their folders, or keep them and set another "
            f"out_dir\n  {shown}"
        )


def _prepare_data(grid: Sequence[Cell]) -> None:
    """Fill the cache once, so that the workers find their tokens there."""
    seen = set()
    for cell in grid:
        config = cell.config
        key = (config.data.model_dump_json(), config.tokenizer.model_dump_json())
        if key not in seen:
            seen.add(key)
            prepare(config)


def _run_order(grid: Sequence[Cell]) -> list[Cell]:
    """Return the cells seed by seed, arms side by side: half a grid already compares them."""
    return sorted(grid, key=lambda cell: (cell.seed, cell.lr))


def _share_cores(config: AblationConfig, grid: Sequence[Cell]) -> tuple[int, int]:
    """Return how many workers there are and how many threads each has; 0 workers: not limited.

    It is the same for the whole grid and for what is left of it: a thread more changes a sum's last
    bit, and cells of one grid should differ in nothing but their config.
    """
    if config.runner.kind == "ray":  # whatever nodes there are, and come to be
        return config.runner.workers or 0, config.runner.threads or 1
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    workers = config.runner.workers
    if workers is None:
        # an accelerator is one device for all workers, who would fight for its memory
        on_cpu = all(pick_device(cell.config.train.device).type == "cpu" for cell in grid)
        workers = cores if on_cpu else 1
    workers = min(workers, len(grid))
    return workers, config.runner.threads or max(1, cores // workers)


# ------------------------------------------------------------------------------- while they run


def _events(pool: CellPool, stop: StopSignal, display: Display) -> Iterator[Cell | Ended]:
    """Yield what happens in the pool until it is done, passing on the wish to stop."""
    stopping = False
    while True:
        busy = pool.busy  # before the queue is looked at: what comes after is still fetched
        try:
            yield pool.events.get(timeout=_POLL)
            continue
        except queue.Empty:
            display.poll()
        if not busy:
            return
        if stop.requested and not stopping:
            stopping = True
            display.say("stopping: the running cells are being saved")
            pool.stop()
