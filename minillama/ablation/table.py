"""cells.csv, and which cells are finished."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minillama.ablation.grid import Cell
from minillama.ablation.pool import Ended
from minillama.ablation.results import COLUMNS, read_run, row_of
from minillama.files import explain_write_errors, write_atomic


def is_finished(cell: Cell) -> bool:
    """Whether the cell's run has ended, by its own summary."""
    try:
        summary = json.loads((cell.folder / "summary.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and summary.get("finished") is True


class CellTable:
    """cells.csv: the cells that have ended, in the order of the grid, rewritten at each end."""

    def __init__(self, folder: Path, grid: Sequence[Cell]) -> None:
        self._folder, self._grid = folder, grid
        self.rows: dict[Path, dict[str, Any]] = {}
        for cell in grid:
            if is_finished(cell):
                self._read(cell, None)

    def add(self, ended: Ended) -> None:
        """Take in a cell that ended, good or bad; one that was interrupted has no row yet."""
        if ended.outcome == "interrupted":
            return
        self._read(ended.cell, ended.error if ended.outcome == "crashed" else None)
        self.write()

    def write(self) -> None:
        """Write the file at once."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        rows = [self.rows[cell.folder] for cell in self._grid if cell.folder in self.rows]
        writer.writerows(rows)
        with explain_write_errors(self._folder):
            write_atomic(self._folder / "cells.csv", text.getvalue())

    def _read(self, cell: Cell, crash: str | None) -> None:
        run = read_run(cell.folder, cell.arm, cell.lr, cell.seed, crash)
        self.rows[cell.folder] = row_of(run, self._folder)
