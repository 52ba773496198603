"""How long a grid would take, from real steps of each of its arms."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minillama.ablation.grid import Cell
from minillama.ablation.pool import Ended, Pool
from minillama.errors import MinillamaError
from minillama.training.metrics import read_metrics

TIMED_STEPS = 6


def estimate(todo: Sequence[Cell], workers: int, threads: int) -> float:
    """Time a few steps of a cell of each arm, as many at once as in earnest; return seconds."""
    first = {cell.arm: cell for cell in reversed(todo)}
    with tempfile.TemporaryDirectory() as folder:
        short = []
        for i, cell in enumerate(list(first.values()) * workers):
            if i < max(len(first), workers):
                short.append(_shortened(cell, Path(folder) / str(i)))
        ends: list[Ended] = []
        with Pool(short, workers, threads) as pool:
            while len(ends) < len(short):
                event = pool.events.get()
                if isinstance(event, Ended):
                    ends.append(event)
        costs: dict[str, list[tuple[float, float]]] = {}
        for end in ends:
            if end.outcome != "ended":
                raise MinillamaError(f"{end.cell.arm} cannot be timed: {end.error}")
            costs.setdefault(end.cell.arm, []).append(_cost(end.cell))
    total = 0.0
    for cell in todo:
        step, validation = np.mean(costs[cell.arm], axis=0)
        every = cell.config.train.eval_every or cell.steps
        total += cell.steps * step + (1 + -(-cell.steps // every)) * validation
    return float(total) / workers


def _shortened(cell: Cell, folder: Path) -> Cell:
    """Return the cell with a few steps, at a rate so low that it cannot diverge."""
    train = {"steps": TIMED_STEPS, "eval_every": 0, "save_every": 0, "sample_prompt": None}
    update = {
        "out_dir": str(folder),
        "loggers": [],
        "optim": cell.config.optim.model_copy(update={"lr": 1e-6, "warmup_steps": 0}),
        "train": cell.config.train.model_copy(update={**train, "log_every": 1}),
    }
    return Cell(cell.arm, cell.lr, cell.seed, cell.config.model_copy(update=update))


def _cost(cell: Cell) -> tuple[float, float]:
    """Return the seconds of a step, the first one left out, and of a validation with its saving."""
    summary = json.loads((cell.folder / "summary.json").read_text(encoding="utf-8"))
    lines = [line for line in read_metrics(cell.folder / "metrics.jsonl") if "tokens_per_s" in line]
    per_step = cell.config.train.batch_size * cell.config.data.seq_len
    times = [per_step / line["tokens_per_s"] for line in lines]
    return float(np.median(times[1:])), max(0.0, summary["seconds"] - sum(times)) / 2
