"""What a person sees while an ablation runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from minillama.ablation.grid import Cell
from minillama.ablation.pool import Ended
from minillama.ablation.table import CellTable


class Display:
    """One bar for the whole grid, counted in steps, and a line for each cell that ends."""

    def __init__(self, grid: Sequence[Cell], table: CellTable, show: bool) -> None:
        self._table, self._n_cells = table, len(grid)
        self._done = {cell.folder: cell.steps for cell in grid if cell.folder in table.rows}
        self._running: dict[Path, Cell] = {}
        self._bar = tqdm(
            total=sum(cell.steps for cell in grid),
            initial=sum(self._done.values()),
            unit="step",
            unit_scale=True,
            smoothing=0.05,
            disable=not show,
            dynamic_ncols=True,
        )

    def __enter__(self) -> Display:
        self.poll()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def started(self, cell: Cell) -> None:
        """Follow a cell from now on."""
        self._running[cell.folder] = cell

    def ended(self, ended: Ended) -> None:
        """Say how a cell ended; one that stopped early no longer weighs on the time left."""
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
        place = f"[{len(self._table.rows)}/{self._n_cells}]"
        self.say(f"{place} {cell.arm}, lr {cell.lr:g}, seed {cell.seed}: {what}")
        self.poll()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(line, file=sys.stderr)

    def poll(self) -> None:
        """Move the bar to where the running cells are."""
        if self._bar.disable:
            return
        here = sum(self._done.values())
        here += sum(min(_last_step(folder), cell.steps) for folder, cell in self._running.items())
        self._bar.set_postfix_str(
            f"{len(self._table.rows)}/{self._n_cells} cells, {len(self._running)} running",
            refresh=False,
        )
        self._bar.update(here - self._bar.n)
        self._bar.refresh()


def _last_step(folder: Path) -> int:
    """Return the step that a run has logged last, from the end of its metrics."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(-min(4096, file.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
