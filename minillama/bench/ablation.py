"""A small ablation on one worker with all threads, and on several that share them.

The same 8 cells (2 arms × 2 learning rates × 2 seeds) in each contender, each time into a new
folder, as ``minillama ablate`` runs them: each starts new processes, which import all modules.
Tokenization and the compilation of the kernels, which happen once, are done before, into a separate
cache, and reported separately.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from minillama.ablation.grid import cells
from minillama.ablation.results import read_results
from minillama.ablation.runner import run
from minillama.bench.timing import (
    load_average,
    machine,
    quartiles,
    ratios,
    show_quartiles,
    table,
    take_turns,
)
from minillama.config.ablation import AblationConfig
from minillama.data.prepare import prepare
from minillama.errors import MinillamaError

N_CELLS = 8

BASE: dict[str, Any] = {
    "model": {"dim": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 64, "init": "fan_in"},
    "tokenizer": {"kind": "bpe", "vocab_size": 512},
    "data": {"source": {"kind": "pydocs"}, "seq_len": 64, "val_fraction": 0.01},
    "optim": {"lr": 1e-2, "warmup_steps": 30},
    "train": {"steps": 150, "batch_size": 8, "eval_every": 0, "device": "cpu"},
}
"""The base of every cell: the shipped ablations' model, validated at init and at the end."""


def bench(
    threads: Sequence[int] = (1,), rounds: int = 5, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run the grid with ``max(threads)`` threads, split among different numbers of workers.

    Args:
        threads: the greatest counts; workers are 1, 2, 4 … up to it and to the number of cells.
        rounds: how often each contender runs.
        base: the run config under every cell; None: :data:`BASE`.

    Returns:
        ``once``, the seconds of tokenization and of compilation; ``rows``, one for each contender:
        ``wall_s`` of the grid, ``ratio`` of it to one worker's in the same round, ``overhead_s``
        per cell (its worker's time outside training and validation, idle time included), and the
        time until a cell's first step: ``first_start_s``, the slowest of a round, which includes
        starting a process, and ``later_start_s``, the median of those on a running worker; all
        with quartiles; ``machine``.
    """
    load_before, cores = load_average(), max(threads)
    shares = [w for w in (1, 2, 4, 8) if w <= min(cores, N_CELLS)]
    with tempfile.TemporaryDirectory(prefix="minillama-") as name, _own_cache(Path(name)):
        folder, base = Path(name), BASE if base is None else base
        once = _pay_once(base, folder, cores)

        def measure(workers: int) -> dict[str, float]:
            new = tempfile.mkdtemp(dir=folder)
            return _measure(_grid(base, Path(new) / "grid", workers, cores // workers))

        measured = take_turns({n: partial(measure, n) for n in shares}, rounds)
    rows = []
    for workers, runs in measured.items():
        rows.append(
            {
                "workers": workers,
                "threads": cores // workers,
                "rounds": rounds,
                "ratio": ratios([r["wall_s"] for r in runs], [r["wall_s"] for r in measured[1]]),
                **{key: quartiles([each[key] for each in runs]) for key in runs[0]},
            }
        )
    return {
        "benchmark": "ablation",
        "cells": N_CELLS,
        "once": once,
        "rows": rows,
        "machine": machine(load_before),
    }


def show(result: Mapping[str, Any]) -> str:
    """Return the result of :func:`bench` as a text table."""
    lines = [
        ["workers", "threads of each", "rounds", "s", "over one worker", "overhead per cell, s"]
    ]
    lines[0] += ["first start, s", "later starts, s"]
    for row in result["rows"]:
        lines.append([str(row[key]) for key in ("workers", "threads", "rounds")])
        keys = ("wall_s", "ratio", "overhead_s", "first_start_s", "later_start_s")
        lines[-1] += [show_quartiles(row[key]) for key in keys]
    once = result["once"]
    note = (
        f"before, once: {once['tokenization_s']:.1f} s of tokenization, "
        f"{once['compilation_s']:.1f} s of compilation; medians over the rounds (quartiles)"
    )
    return table(f"an ablation of {result['cells']} cells", note, result, lines)


@contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    before = os.environ.get("MINILLAMA_CACHE")
    os.environ["MINILLAMA_CACHE"] = str(folder / "cache")
    try:
        yield
    finally:
        if before is None:
            del os.environ["MINILLAMA_CACHE"]
        else:
            os.environ["MINILLAMA_CACHE"] = before


def _grid(base: Mapping[str, Any], folder: Path, workers: int, threads: int) -> AblationConfig:
    return AblationConfig.model_validate(
        {
            "name": "bench",
            "out_dir": str(folder),
            "base": dict(base),
            "arms": {"rmsnorm": {}, "layernorm": {"model.norm.kind": "layernorm"}},
            "baseline": "rmsnorm",
            "lr": [3e-3, 1e-2],
            "seeds": [0, 1],
            "runner": {"workers": workers, "threads": threads},
        }
    )


def _pay_once(base: Mapping[str, Any], folder: Path, threads: int) -> dict[str, float]:
    """Fill the cache; the kernels' compilation is what a first cell takes longer than a second."""
    start = time.perf_counter()
    prepare(cells(_grid(base, folder / "once", 1, threads))[0].config)
    tokenization = time.perf_counter() - start
    walls = []
    for name in ("cold", "warm"):
        config = _grid(base, folder / name, 1, threads)
        short = {"train.steps": 2, "optim.warmup_steps": 0}
        update = {"lr": [3e-3], "seeds": [0], "overrides": short}
        start = time.perf_counter()
        run(config.model_copy(update=update), progress=False)
        walls.append(time.perf_counter() - start)
    return {"tokenization_s": tokenization, "compilation_s": max(0.0, walls[0] - walls[1])}


def _measure(config: AblationConfig) -> dict[str, float]:
    """Run the grid and return its times in seconds."""
    start = time.perf_counter()
    folder = run(config, progress=False)
    wall = time.perf_counter() - start
    results = read_results(folder)
    if len(results.runs) != N_CELLS or not all(each.ended for each in results.runs):
        errors = {each.error for each in results.runs if each.error}
        raise MinillamaError(f"a cell of the benchmark crashed: {', '.join(errors) or 'no reason'}")
    workers, busy, starts = results.sessions[-1].workers, 0.0, []
    for each in results.runs:
        validation = each.figure("validation_seconds")
        busy += each.figure("training_seconds") + validation
        starts.append(each.figure("starting_seconds") + validation / 2)  # the one at init
    starts.sort(reverse=True)
    return {
        "wall_s": wall,
        "overhead_s": (wall * workers - busy) / N_CELLS,
        "first_start_s": starts[0],
        "later_start_s": statistics.median(starts[workers:] or starts),
    }
