"""What run folders contain now, re-read only where they have changed."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from minillama.ablation.analysis import analyse_arms
from minillama.ablation.report.curves import thin
from minillama.ablation.report.figures import page_data
from minillama.ablation.results import CurveReader, Results, Run, read_results, read_run
from minillama.files import is_locked
from minillama.training.metrics import parse_metrics

State = Literal["ok", "undertrained", "collapsed", "diverged", "crashed", "running", "waiting"]

_POINTS = 40_000  # of all raw curves of one figure, as in the report
_RUNNING_POINTS = 300  # of the curve of one running cell
_LOG_BYTES = 3000  # of the end of a crashed cell's log.txt

_Stamp = tuple[tuple[int, int, int] | None, ...]


def _stamp(*paths: Path) -> _Stamp:
    """Return what changes whenever one of the files changes; None for one that is missing."""
    stamps: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            found = path.stat()
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            stamps.append(None)
    return tuple(stamps)


class MetricsTail:
    """The curves of a growing ``metrics.jsonl``; each :meth:`read` parses only its new lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0
        self.reader = CurveReader()

    def read(self) -> None:
        """Add the complete lines that are new; start again where the file was replaced."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self.reader = status.st_ino, 0, CurveReader()
                file.seek(self._offset)
                block = file.read()
        except OSError:
            return
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in parse_metrics(complete, self._path):
            self.reader.add(line)


class LiveRuns:
    """Reads runs for :func:`read_results`; one whose files have not changed is not read again."""

    def __init__(self) -> None:
        self._tails: dict[Path, MetricsTail] = {}
        self._runs: dict[Path, tuple[_Stamp, str | None, Run]] = {}

    def read(
        self, folder: Path, arm: str, lr: float, seed: int, crash: str | None = None, **more: Any
    ) -> Run:
        """Return the run in ``folder``, as :func:`minillama.ablation.results.read_run` does."""
        names = ("metrics.jsonl", "summary.json", "config.yaml")
        stamp = _stamp(*(folder / name for name in names))
        before = self._runs.get(folder)
        if before is None or before[:2] != (stamp, crash):
            tail = self._tails.setdefault(folder, MetricsTail(folder / "metrics.jsonl"))
            tail.read()
            curves = tail.reader.curves()
            run = read_run(folder, arm, lr, seed, crash, curves=curves, **more)
            before = self._runs[folder] = (stamp, crash, run)
        return before[2]


class LiveFolder:
    """An ablation or a single run, and its state for the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = LiveRuns()
        self._figures: tuple[str, dict[str, Any]] = ("", {})

    def state(self, figures_key: str = "") -> dict[str, Any]:
        """Return everything that the page shows, for JSON.

        Args:
            figures_key: of the figures that the page has; they are left out if nothing has changed.

        Raises:
            ConfigError, RunFolderError: as :func:`minillama.ablation.results.read_results`.
        """
        results = read_results(self.folder, read=self._runs.read)
        unfinished = [run for run in results.runs if run.fate == "unfinished"]
        running = [run for run in unfinished if is_locked(run.folder / ".lock")]
        stopped = [run for run in unfinished if run not in running]
        ended = [run for run in results.runs if run.fate != "unfinished"]
        waiting = [*results.missing, *((run.arm, run.lr, run.seed) for run in stopped)]
        key, figures = self._draw(results)
        state = {
            "name": results.name,
            "kind": "ablation" if results.is_ablation else "run",
            "arms": list(results.arms),
            "cells": [_cell(run, "running" if run in running else None) for run in results.runs]
            + [_waiting_cell(*place) for place in results.missing],
            "counts": {
                "total": len(results.runs) + len(results.missing),
                "ended": sum(run.ended for run in ended),
                "failed": sum(run.fate != "ok" for run in ended),
                "running": len(running),
                "waiting": len(waiting),
            },
            "seconds_left": _seconds_left(results, running, len(waiting)),
            "running": [_running(run) for run in running],
            "failed": [_failed(run) for run in ended if run.fate != "ok"],
            "report": (self.folder / "report.html").is_file(),
            "figures_key": key,
        }
        return state | ({} if key == figures_key else {"figures": figures})

    def _draw(self, results: Results) -> tuple[str, dict[str, Any]]:
        """Return the report's figures of the runs that have ended, and a key that identifies them.

        A single run is drawn while it is running.
        """
        drawn = tuple(run for run in results.runs if run.ended or not results.is_ablation)
        sizes = [len(run.curves.steps) + len(run.curves.val_steps) for run in drawn]
        key = str(hash((results.arms, tuple(str(run.folder) for run in drawn), tuple(sizes))))
        if key != self._figures[0]:
            only = replace(results, runs=drawn)
            self._figures = key, page_data(only, analyse_arms(only), (), _POINTS)
        return self._figures


def _cell(run: Run, state: State | None) -> dict[str, Any]:
    fate = "waiting" if run.fate == "unfinished" else run.fate
    return {
        "arm": run.arm,
        "lr": run.lr,
        "seed": run.seed,
        "state": state or fate,
        "loss": _json_number(run.figure("val_loss")),
    }


def _waiting_cell(arm: str, lr: float, seed: int) -> dict[str, Any]:
    return {"arm": arm, "lr": lr, "seed": seed, "state": "waiting", "loss": None}


def _n_steps(run: Run) -> int:
    train = run.config.get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else 0


def _running(run: Run) -> dict[str, Any]:
    curves = run.curves
    x, y = thin(curves.steps, curves.loss, _RUNNING_POINTS)
    return {
        "arm": run.arm,
        "lr": run.lr,
        "seed": run.seed,
        "step": int(curves.steps[-1]) if len(curves.steps) else 0,
        "steps": _n_steps(run),
        "x": np.asarray(x).tolist(),
        "y": [_json_number(value, 5) for value in np.asarray(y).tolist()],
        "val_x": curves.val_steps.tolist(),
        "val_y": [_json_number(value, 5) for value in curves.val_loss.tolist()],
    }


def _failed(run: Run) -> dict[str, Any]:
    failed = {"arm": run.arm, "lr": run.lr, "seed": run.seed, "fate": run.fate, "error": run.error}
    if run.fate == "crashed":
        try:
            with (run.folder / "log.txt").open("rb") as file:
                file.seek(-min(_LOG_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
                failed["log"] = file.read().decode("utf-8", errors="replace")
        except OSError:
            pass
    return failed


def _seconds_left(results: Results, running: list[Run], n_waiting: int) -> float | None:
    """Estimate the time left from the cells that have ended, else from the running cells' speed."""
    totals = [run.figure("seconds") for run in results.runs if run.ended]
    totals = [total for total in totals if math.isfinite(total)]
    left, per_cell = 0.0, float(np.mean(totals)) if totals else math.nan
    for run in running:
        done, steps = len(run.curves.steps) and run.curves.steps[-1], _n_steps(run)
        try:
            began = (run.folder / "config.yaml").stat().st_mtime
        except OSError:
            continue
        if not done or not steps:
            left += per_cell
            continue
        so_far = max(0.0, time.time() - began)  # the clock may have been set back
        whole = per_cell if math.isfinite(per_cell) else so_far * steps / done
        left += whole * (1 - min(1.0, done / steps))
        per_cell = whole if math.isnan(per_cell) else per_cell
    left += n_waiting * per_cell if n_waiting else 0.0
    workers = results.sessions[-1].workers if results.sessions else 1
    return _json_number(left / max(1, min(workers, len(running) + n_waiting)))


def _json_number(value: float, digits: int = 6) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
