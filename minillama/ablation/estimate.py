"""The estimate that an ablation prints before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minillama.ablation.grid import Cell
from minillama.formatting import format_duration, pluralize
from minillama.plan.compute import DEFAULT_MFU, count_flops
from minillama.plan.report import device_of


def describe_work(
    todo: Sequence[Cell], later: Sequence[Cell], rows: Sequence[Mapping[str, Any]], workers: int
) -> str:
    """Say how many cells there are to run and about how long they take.

    Args:
        todo: cells to run.
        later: of a second stage that is not planned yet, at most.
        rows: of ``cells.csv``, of the cells that have ended.  Their seconds per token give the
            time; without any, the FLOPs do.
        workers: cells that train at once; 0: not known, and no time is given.
    """
    text = f"{pluralize(len(todo), 'cell')} to run"
    if later:
        text += f", then at most {len(later)} with fresh seeds"
    if not workers:
        return text
    cells = [*todo, *later]
    timed = [row for row in rows if row["seconds"] and row["tokens"]]
    if timed:
        seconds = _from_rows(cells, timed) / workers
        source = f"from {pluralize(len(timed), 'cell')} that ended"
    else:
        seconds = _from_flops(cells)
        source = "from FLOPs alone, so roughly; --dry-run times real steps"
    return f"{text}: about {format_duration(seconds)} on {pluralize(workers, 'worker')} ({source})"


def _from_rows(cells: Sequence[Cell], rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of all cells by those per token of their arm's rows, else of all rows."""
    per_token: dict[str, list[float]] = {}
    for row in rows:
        seconds = row["seconds"] + (row["starting_seconds"] or 0.0)
        per_token.setdefault(row["arm"], []).append(seconds / row["tokens"])
    means = {arm: float(np.mean(values)) for arm, values in per_token.items()}
    other = float(np.mean(list(means.values())))
    return sum(cell.tokens * means.get(cell.arm, other) for cell in cells)


def _from_flops(cells: Sequence[Cell]) -> float:
    """Return the seconds of all cells if they have the whole device to share."""
    first = cells[0].config
    peak = device_of(first, None).peak(first.train.dtype)
    return sum(count_flops(cell.config).total for cell in cells) / (peak * DEFAULT_MFU)
