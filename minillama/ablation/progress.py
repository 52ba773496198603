"""What an ablation shows and records while it runs: the progress bar, cells.csv, sessions.json."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minillama.ablation.grid import Cell, Place
from minillama.ablation.pool import Ended
from minillama.ablation.results import (
    COLUMNS,
    SESSIONS_FILE,
    Session,
    read_left_out,
    read_run,
    read_sessions,
    table_row,
)
from minillama.errors import RunFolderError
from minillama.files import explain_write_errors, write_atomic
from minillama.progress import ProgressBar
from minillama.training.metrics import last_line
from minillama.training.run_folder import RunFolder


def is_finished(cell: Cell) -> bool:
    """Return whether the cell's run has ended, according to its summary."""
    summary = RunFolder(cell.folder).read_summary()
    return summary is not None and summary["finished"] is True


class CellTable:
    """The cells that have ended, as rows of cells.csv, which is rewritten whenever one ends.

    ``rows`` are those of ``cells``.  Finished cells of an earlier, wider config follow in the file.
    """

    def __init__(self, folder: Path, cells: Sequence[Cell]) -> None:
        self._folder = folder
        self.cells: dict[Path, Cell] = {}
        self.rows: dict[Path, dict[str, Any]] = {}
        self.extend(cells)

    def extend(self, cells: Sequence[Cell]) -> None:
        """Add the cells that are not in the table yet, and write it."""
        new = [cell for cell in cells if cell.folder not in self.cells]
        if not new:
            return
        self.cells |= {cell.folder: cell for cell in new}
        for cell in new:
            if is_finished(cell):
                self._add(cell, None)
        inside = [folder.relative_to(self._folder) for folder in self.cells]
        left_out = read_left_out(self._folder, inside)
        self._left_out = [table_row(run, self._folder) for run in left_out]
        self.write()

    def have_ended(self, cells: Sequence[Cell]) -> bool:
        """Return whether all these cells have ended, and none of them crashed."""
        rows = [self.rows.get(cell.folder) for cell in cells]
        return all(row is not None and row["fate"] != "crashed" for row in rows)

    def ended(self) -> list[Place]:
        """Return the places of all runs in the folder that have ended, outside the grid as well."""
        rows = [*self.rows.values(), *self._left_out]
        return [
            Place(row["arm"], row["lr"], row["seed"]) for row in rows if row["fate"] != "crashed"
        ]

    def add(self, ended: Ended) -> None:
        """Add a cell that ended or crashed; an interrupted one has no row yet."""
        if ended.outcome == "interrupted":
            return
        self._add(ended.cell, ended.error if ended.outcome == "crashed" else None)
        self.write()

    def write(self) -> None:
        """Write the file, its rows in the order of the cells, then those outside them."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        rows = [self.rows[folder] for folder in self.cells if folder in self.rows]
        writer.writerows(rows + self._left_out)
        with explain_write_errors(self._folder):
            write_atomic(self._folder / "cells.csv", text.getvalue())

    def _add(self, cell: Cell, crash: str | None) -> None:
        run = read_run(cell.folder, cell.arm, cell.lr, cell.seed, crash)
        self.rows[cell.folder] = table_row(run, self._folder)


class RunningSession:
    """Records this call of the ablation in sessions.json; a context.

    The file is rewritten whenever a cell ends, so a call that is killed loses only the time since
    the last one.
    """

    def __init__(self, folder: Path, workers: int, threads: int, preparing_seconds: float) -> None:
        self._folder, self._earlier = folder, read_sessions(folder)
        self._began = time.perf_counter()
        self._fixed = (preparing_seconds, workers, threads)

    def __enter__(self) -> RunningSession:
        self.save()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RunFolderError):
            self.save()

    def save(self) -> None:
        """Record the time up to now.

        Raises:
            RunFolderError: the file cannot be written.
        """
        session = Session(time.perf_counter() - self._began, *self._fixed)
        entries = [asdict(each) for each in (*self._earlier, session)]
        with explain_write_errors(self._folder):
            text = json.dumps(entries, indent=2, allow_nan=False) + "\n"
            write_atomic(self._folder / SESSIONS_FILE, text)


class Display:
    """Shows the progress of a stage, counted in steps, and a line for each cell that ends.

    Args:
        name: of the stage.
        cells: all of its cells.
        table: those that have ended.
        show: False: show nothing.
    """

    def __init__(self, name: str, cells: Sequence[Cell], table: CellTable, show: bool) -> None:
        self._table, self._cells, self._show = table, cells, show
        self._done = {cell.folder: cell.steps for cell in cells if cell.folder in table.rows}
        self._running: dict[Path, Cell] = {}
        self._shown = sum(self._done.values())
        self._bar = ProgressBar(name, sum(cell.steps for cell in cells), self._shown, show=show)
        self.print = self._bar.print

    def __enter__(self) -> Display:
        self.poll()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.__exit__()

    def started(self, cell: Cell) -> None:
        """Follow the progress of a cell from now on."""
        self._running[cell.folder] = cell

    def ended(self, ended: Ended) -> None:
        """Print how a cell ended; one that stopped early counts with all its steps."""
        cell = ended.cell
        self._running.pop(cell.folder, None)
        if ended.outcome == "interrupted":
            self._done[cell.folder] = _last_step(cell.folder)
            return
        self._done[cell.folder] = cell.steps
        row = self._table.rows[cell.folder]
        what = f"{row['fate']}: {row['error']}" if row["fate"] == "crashed" else row["fate"]
        if row["val_loss"] is not None:
            what += f", validation loss {row['val_loss']:.4f}"
        if row["seconds"] is not None:
            what += f", {row['seconds']:.0f} s"
        self._bar.print(f"[{self._count()}] {cell.arm}, lr {cell.lr:g}, seed {cell.seed}: {what}")
        self.poll()

    def poll(self) -> None:
        """Update the bar from the logs of the running cells."""
        if not self._show:
            return
        steps = sum(self._done.values())
        steps += sum(min(_last_step(folder), cell.steps) for folder, cell in self._running.items())
        text = f"{self._count()} cells, {len(self._running)} running"
        self._bar.update(text, steps - self._shown)
        self._shown = steps

    def _count(self) -> str:
        n_ended = sum(cell.folder in self._table.rows for cell in self._cells)
        return f"{n_ended}/{len(self._cells)}"


def _last_step(folder: Path) -> int:
    """Return the last step that a run has logged."""
    return int((last_line(folder / "metrics.jsonl", "step") or {}).get("step", 0))
