"""Runs an ablation: every cell is an ordinary training run, given to a pool of workers.

    cells ──prepare──▶ text and tokenizer, once ──▶ Pool ──▶ cells/…, a row of cells.csv each

A second stage, if the config has one, follows once the whole grid has ended; see ``stages.py``.
All state is in the cells' folders: a finished cell is not run again and an unfinished one resumes
from its last save, so after a kill at any moment the same command completes the grid.
"""

from __future__ import annotations

import json
import logging
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from minillama import launch
from minillama.ablation.estimate import describe_work
from minillama.ablation.grid import Cell, cells
from minillama.ablation.hypotheses import hypotheses_of, record_hypotheses
from minillama.ablation.pool import Ended, Pool
from minillama.ablation.progress import CellTable, Display, RunningSession, is_finished
from minillama.ablation.results import read_results
from minillama.ablation.stages import batches, most_cells, planned_cells
from minillama.config.ablation import AblationConfig
from minillama.config.loading import read_yaml
from minillama.config.run import deciding_fields, parse_run, to_yaml
from minillama.data.prepare import prepare
from minillama.errors import (
    CellsCrashedError,
    ConfigError,
    InterruptedRunError,
    MinillamaError,
    RunFolderError,
)
from minillama.files import explain_write_errors, lock, write_atomic
from minillama.formatting import format_duration
from minillama.model.norms import is_builtin
from minillama.plan.limit import refuse_what_cannot_fit
from minillama.training.device import pick_device
from minillama.training.interrupt import StopSignal
from minillama.training.metrics import read_metrics
from minillama.training.run_folder import RunFolder
from minillama.training.summary import hash_config

_POLL_SECONDS = 0.3  # how often the progress and the stop signal are checked
_TIMED_STEPS = 6  # of each arm, by a dry run

_log = logging.getLogger("minillama")


class CellPool(Protocol):
    """What trains the cells: :class:`Pool`, or another way to distribute them."""

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
        """Whether a cell is being trained or is waiting to be."""

    def stop(self) -> None:
        """Start no further cell and end those that are running; does not wait."""


def run(
    config: AblationConfig,
    *,
    progress: bool = True,
    make_pool: Callable[[Sequence[Cell], int, int], CellPool] = Pool,
) -> Path:
    """Run every cell that is not finished and return the ablation's folder.

    A cell that diverges or collapses is a result.  One that crashes becomes a row of ``cells.csv``
    with its error, and its output is in ``log.txt`` of its folder; the other cells still run.

    Args:
        config: of the ablation; see :func:`minillama.config.ablation.load_ablation`.
        progress: show one bar for the whole grid, and a line for each cell that ends.
        make_pool: makes what trains the cells, from the cells, the number of workers and the
            threads of each; see :func:`minillama.ablation.ray_runner.run` for another one.

    Raises:
        ConfigError: an arm or a hypothesis is wrong, an arm needs more memory than there is, or the
            folder holds cells, a plan or hypotheses of another config.
        DataError, TokenizerError: the text cannot be used.
        RunFolderError: the folder cannot be written, another ablation is writing into it, or it was
            removed.
        InterruptedRunError: Ctrl-C or SIGTERM; the running cells were saved first.
        CellsCrashedError: every cell crashed; see :func:`check_crashes` for some of them.
    """
    started = time.perf_counter()
    grid = cells(config)
    hypotheses_of(config)
    for cell in grid:
        # Counting the parameters of a user's norm means building it, which only workers should do.
        if is_builtin(cell.config.model.norm.kind):
            refuse_what_cannot_fit(cell.config, pick_device(cell.config.train.device))
    folder = Path(config.out_dir)
    with _lock_folder(folder) as is_in_place:
        planned = planned_cells(config)
        _refuse_changed([*grid, *planned])
        _prepare_data(grid)
        with explain_write_errors(folder):
            write_atomic(folder / "ablation.yaml", to_yaml(_with_base(config)))
        table = CellTable(folder, [*grid, *planned])
        record_hypotheses(config, table.ended())
        shares = _share_cores(config, grid)
        session: RunningSession | None = None
        with ExitStack() as stack:
            stop = stack.enter_context(StopSignal())
            for batch in batches(config, grid):
                table.extend(batch.stage_cells)
                todo = [cell for cell in _run_order(batch.cells) if cell.folder not in table.rows]
                if not todo:
                    continue
                with explain_write_errors(folder):
                    for cell in todo:  # not made by workers, who would make a removed folder again
                        cell.folder.parent.mkdir(parents=True, exist_ok=True)
                if session is None:
                    if progress:
                        later = [] if planned_cells(config) else most_cells(config)
                        rows = list(table.rows.values())
                        _log.info("%s", describe_work(todo, later, rows, shares[0]))
                        how = "`minillama report %s` shows what has ended so far, at any time"
                        _log.info(how, folder)
                    session = RunningSession(folder, *shares, time.perf_counter() - started)
                    stack.enter_context(session)
                with (
                    Display(batch.name, batch.stage_cells, table, progress) as display,
                    make_pool(todo, *shares) as pool,
                ):
                    for event in _events(pool, stop, display):
                        if not is_in_place():
                            raise RunFolderError(
                                f"{folder} was removed, moved or replaced while this ablation was "
                                "running in it; restore it, and the same command continues"
                            )
                        if event is not None:
                            _record(event, display, table, session)
                if stop.requested:
                    raise InterruptedRunError(
                        f"stopped with {len(table.rows)} of {len(table.cells)} cells ended; the "
                        "running ones were saved, and the same command continues"
                    )
                if not table.have_ended(batch.cells):  # they decide what the next stage runs
                    break
        if session is None:
            _log.info("%s: all %d cells are finished already", folder, len(table.cells))
    if all(row["fate"] == "crashed" for row in table.rows.values()):
        check_crashes(folder)
    return folder


def _record(
    event: Cell | Ended, display: Display, table: CellTable, session: RunningSession
) -> None:
    """Show and record that a cell was started or has ended."""
    if isinstance(event, Cell):
        display.started(event)
    else:
        table.add(event)
        session.save()
        display.ended(event)


def check_crashes(folder: Path) -> None:
    """Raise an error if cells of the ablation in ``folder`` crashed.

    Raises:
        CellsCrashedError: says how many, and the error of the first.
    """
    results = read_results(folder)
    crashed = [run for run in results.runs if run.fate == "crashed"]
    if crashed:
        n_cells = len(results.runs) + len(results.missing)
        which = "every cell" if len(crashed) == n_cells else f"{len(crashed)} of {n_cells} cells"
        raise CellsCrashedError(
            f"{which} crashed; the first: {crashed[0].error}; see {crashed[0].folder / 'log.txt'}; "
            "the same command runs them again"
        )


# ---------------------------------------------------------------------------------------- dry run


def dry_run(config: AblationConfig) -> str:
    """Return the cells, their tokens and an estimate of the time, from real steps of each arm.

    A second stage whose rates are not chosen yet counts with as many cells as it may have.

    Raises:
        ConfigError, DataError, TokenizerError, RunFolderError: as :func:`run`.
    """
    grid = cells(config)
    hypotheses_of(config)
    planned = planned_cells(config)
    known = [*grid, *planned]
    _refuse_changed(known)
    _prepare_data(grid)
    todo = [cell for cell in known if not is_finished(cell)]
    lines = [
        f"{cell.folder}: {cell.tokens:,} tokens" + ("" if cell in todo else ", finished already")
        for cell in known
    ]
    tokens = sum(cell.tokens for cell in todo)
    lines.append(f"{len(todo)} of {len(known)} cells to run, {tokens:,} tokens")
    if config.stages and not planned:
        later = most_cells(config)
        tokens = sum(cell.tokens for cell in later)
        lines.append(
            f"then at most {len(later)} cells with fresh seeds at the rates that are best in the "
            f"grid ({config.stages[1].rates}), {tokens:,} tokens"
        )
        todo += later
    if todo:
        workers, threads = _share_cores(config, grid)
        workers = workers or 1
        lines.append(
            f"about {format_duration(_estimate_seconds(todo, workers, threads))}, from "
            f"{_TIMED_STEPS} real steps and two validations of each arm "
            f"(workers: {workers}, threads per worker: {threads})"
        )
    return "\n".join(lines)


def _estimate_seconds(todo: Sequence[Cell], workers: int, threads: int) -> float:
    """Estimate the time of the grid from a few steps of each arm, on as many workers at once."""
    first = list({cell.arm: cell for cell in reversed(todo)}.values())
    costs: dict[str, list[tuple[float, float]]] = {cell.arm: [] for cell in first}
    with tempfile.TemporaryDirectory() as folder:
        repeated = (first * workers)[: max(len(first), workers)]
        short = [_shortened(cell, Path(folder) / str(i)) for i, cell in enumerate(repeated)]
        n_ended = 0
        with Pool(short, workers, threads) as pool:
            while n_ended < len(short):
                event = pool.events.get()
                if not isinstance(event, Ended):
                    continue
                if event.outcome != "ended":
                    raise MinillamaError(f"{event.cell.arm} cannot be timed: {event.error}")
                costs[event.cell.arm].append(_measured_seconds(event.cell))
                n_ended += 1
    total = 0.0
    for cell in todo:
        step, validation = np.mean(costs[cell.arm], axis=0)
        every = cell.config.train.eval_every or cell.steps
        total += cell.steps * step + (1 + -(-cell.steps // every)) * validation
    return float(total) / workers


def _shortened(cell: Cell, folder: Path) -> Cell:
    """Return the cell with a few steps, at a learning rate so low that it cannot diverge."""
    train = {"steps": _TIMED_STEPS, "eval_every": 0, "save_every": 0, "sample_prompt": None}
    update = {
        "out_dir": str(folder),
        "loggers": [],
        "optim": cell.config.optim.model_copy(update={"lr": 1e-6, "warmup_steps": 0}),
        "train": cell.config.train.model_copy(update={**train, "log_every": 1}),
    }
    return Cell(cell.arm, cell.lr, cell.seed, cell.config.model_copy(update=update))


def _measured_seconds(cell: Cell) -> tuple[float, float]:
    """Return the seconds of a step (the first one excluded) and of a validation with its save."""
    summary = json.loads((cell.folder / "summary.json").read_text(encoding="utf-8"))
    lines = [line for line in read_metrics(cell.folder / "metrics.jsonl") if "tokens_per_s" in line]
    per_step = cell.config.train.batch_size * cell.config.data.seq_len
    times = [per_step / line["tokens_per_s"] for line in lines]
    return float(np.median(times[1:])), max(0.0, summary["seconds"] - sum(times)) / 2


# ------------------------------------------------------------------------------- before the cells


def _with_base(config: AblationConfig) -> AblationConfig:
    """Return the config with its base as a mapping, so that it can be read from any folder."""
    if isinstance(config.base, str):
        return config.model_copy(update={"base": read_yaml(config.base)})
    return config


@contextmanager
def _lock_folder(folder: Path) -> Iterator[Callable[[], bool]]:
    busy = (
        f"{folder}: another ablation is running in this folder; wait for it, "
        "or choose another out_dir"
    )
    with ExitStack() as stack:
        with explain_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            is_in_place = stack.enter_context(lock(folder / ".lock", busy=busy, timeout=0))
        yield is_in_place


def _refuse_changed(grid: Sequence[Cell]) -> None:
    """Make sure that no cell's folder holds a run of another config or of plugins with other code.

    Raises:
        ConfigError: lists these cells, each with the first field that differs.
    """
    changed = []
    for cell in grid:
        if not (cell.folder / "config.yaml").is_file():
            continue
        saved = parse_run(read_yaml(cell.folder), str(cell.folder))
        before, now = map(deciding_fields, (saved, cell.config))
        for name in sorted(before | now):
            was, wanted = before.get(name), now.get(name)
            # The runner chooses between stop and run_on, and no measure depends on it.
            stops = name == "train.on_nonfinite" and "skip" not in (was, wanted)
            if not stops and was != wanted:
                changed.append(f"{cell.folder} has {name} = {was!r}, not {wanted!r}")
                break
        else:
            summary = RunFolder(cell.folder).read_summary()
            if saved.plugins and summary and summary["config_hash"] != hash_config(saved):
                changed.append(f"{cell.folder} was made before a file of plugins was edited")
    if changed:
        shown = "\n  ".join(changed[:5] + ([f"… {len(changed)} in all"] if changed[5:] else []))
        raise ConfigError(
            "cells of another config or plugin are in this folder; delete their folders, or set "
            f"another out_dir to keep them\n  {shown}"
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
    """Return the cells by seed, then learning rate: half a grid already compares all arms."""
    return sorted(grid, key=lambda cell: (cell.seed, cell.lr))


def _share_cores(config: AblationConfig, grid: Sequence[Cell]) -> tuple[int, int]:
    """Return the number of workers (0: no limit) and the number of threads of each.

    It does not depend on how many cells are left: another number of threads changes the last bit of
    a sum, and cells of one grid should differ only in their config.
    """
    if config.runner.kind == "ray":  # as many as the nodes that the cluster has at any time
        return config.runner.workers or 0, config.runner.threads or 1
    cores = launch.usable_cpus()
    workers = config.runner.workers
    if workers is None:
        # All workers would share the memory of one accelerator.
        on_cpu = all(pick_device(cell.config.train.device).type == "cpu" for cell in grid)
        workers = cores if on_cpu else 1
    workers = min(workers, len(grid))
    return workers, config.runner.threads or max(1, cores // workers)


def _events(pool: CellPool, stop: StopSignal, display: Display) -> Iterator[Cell | Ended | None]:
    """Yield the pool's events until it is done, None where there is none for a while.

    A stop signal stops the pool.
    """
    stopping = False
    while True:
        busy = pool.busy  # checked before the queue, so that no event is missed
        try:
            yield pool.events.get(timeout=_POLL_SECONDS)
            continue
        except queue.Empty:
            display.poll()
            yield None
        if not busy:
            return
        if stop.requested and not stopping:
            stopping = True
            display.print("stopping: the running cells are being saved")
            pool.stop()
