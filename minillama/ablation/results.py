"""Reads the files of an ablation or of a single run into tables and curves.

    ablation.yaml, cells.csv, sessions.json, stages.json, hypotheses.json
    cells/<arm>/lr-<lr>/seed-<seed>/{config.yaml, metrics.jsonl, summary.json}

Loads no model and imports no plugin, so a report can be made on any machine.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minillama.ablation.grid import Arm, Place, cell_folders, places
from minillama.ablation.grid import arms as arms_of
from minillama.ablation.hypotheses import RecordedHypothesis, read_hypotheses
from minillama.ablation.measures import gradient_figures, spike_score
from minillama.ablation.stage_plan import StagePlan, read_plan
from minillama.config.ablation import load_ablation
from minillama.config.loading import read_yaml
from minillama.errors import ConfigError, RunFolderError
from minillama.formatting import MISSING, format_number, html_table
from minillama.training.metrics import read_metrics
from minillama.training.stability import distance_to_collapse

Floats = NDArray[np.float64]

COLUMNS = (
    *("arm", "lr", "seed", "fate", "val_loss", "train_loss", "steps", "tokens", "seconds"),
    *("run_dir", "best_val_loss", "best_step", "init_val_loss", "unigram_entropy"),
    *("val_bits_per_byte", "tokens_per_s", "n_params", "n_norm_params", "spike_score"),
    *("grad_norm_max", "grad_norm_p99", "clipped_share", "threads", "config_hash"),
    *("weights_hash", "data_hash", "error"),
    *("training_seconds", "validation_seconds", "starting_seconds"),
    *("distance_to_collapse", "still_falling", "in_grid"),
)
"""The columns of ``cells.csv``; ``in_grid``: whether the present config still has the cell.

A value that is not known is empty.  ``grad_norm_max`` and ``grad_norm_p99`` are ``inf`` where a
gradient was not finite, which readers of CSV take for the number.
"""

_TEXTS = ("arm", "fate", "run_dir", "config_hash", "weights_hash", "data_hash", "error")

TRAINED = ("ok", "undertrained", "collapsed")
"""Fates of a run that took all its steps."""

ENDED = (*TRAINED, "diverged")
"""Fates of a run that ended by itself; ``crashed`` and ``unfinished`` ones did not."""

SESSIONS_FILE = "sessions.json"


@dataclass(frozen=True)
class Curves:
    """The lines of ``metrics.jsonl`` as arrays; a value that is not finite is NaN."""

    steps: Floats
    loss: Floats
    grad_norm: Floats
    clipped: NDArray[np.bool_]
    val_steps: Floats
    val_loss: Floats
    probes: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    skipped: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """Steps whose update was skipped."""


@dataclass(frozen=True)
class Run:
    """One run: its place in the grid, its fate and the content of its files."""

    arm: str
    lr: float
    seed: int
    folder: Path
    fate: str
    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    curves: Curves
    error: str = ""
    in_grid: bool = True
    """Whether the present config has this cell; if not, a wider one before it had."""

    def figure(self, key: str) -> float:
        """Return a number of the summary, NaN where it is missing or null."""
        value = self.summary.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if number and value is not None else math.nan

    def has_figure(self, key: str) -> bool:
        """Whether the summary has a finite number under ``key``."""
        return math.isfinite(self.figure(key))

    @property
    def distance_to_collapse(self) -> float:
        """How far its loss lies above the line for "collapsed", in nats per token.

        NaN without a loss.
        """
        return distance_to_collapse(self.figure("val_loss"), self.figure("unigram_entropy"))

    @property
    def has_loss(self) -> bool:
        """Whether it ended with a loss worth drawing; that of a diverged run is far too large."""
        return self.fate in TRAINED and self.has_figure("val_loss")

    @property
    def ended(self) -> bool:
        """Whether the run ended by itself, with a good result or a bad one."""
        return self.fate in ENDED


@dataclass(frozen=True)
class Session:
    """One call of the ablation.

    ``preparing_seconds`` passed before the first cell was started, ``seconds`` since then.
    """

    seconds: float
    preparing_seconds: float
    workers: int
    threads: int


@dataclass(frozen=True)
class Results:
    """An ablation's runs in the order of its grid, or a single run.

    ``lrs`` are the learning rates of all arms together, ascending; see :meth:`lrs_of`.  ``seeds``
    are the grid's.  With a ``plan``, ``runs`` and ``missing`` contain those of its fresh seeds too.
    ``left_out`` are finished runs in the folder that the present config does not have: they count
    nowhere, but are listed, so that a narrower config cannot hide them.
    """

    name: str
    folder: Path
    arms: tuple[str, ...]
    baseline_of: Mapping[str, str]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    margin: float
    runs: tuple[Run, ...]
    is_ablation: bool = True
    missing: tuple[tuple[str, float, int], ...] = field(default=())
    sessions: tuple[Session, ...] = ()
    grid_arms: Mapping[str, Arm] = field(default_factory=dict)
    left_out: tuple[Run, ...] = ()
    plan: StagePlan | None = None
    hypotheses: tuple[RecordedHypothesis, ...] = ()
    hypothesis_names: frozenset[str] = frozenset()
    """Those of the present config."""

    def of_grid(self) -> Results:
        """Return the results with the grid's runs alone, without those of fresh seeds."""
        return replace(self, runs=tuple(run for run in self.runs if run.seed in self.seeds))

    def lrs_of(self, arm: str) -> tuple[float, ...]:
        """Return the learning rates of one arm, ascending."""
        return tuple(sorted(self.grid_arms[arm].lrs)) if arm in self.grid_arms else self.lrs

    def _repr_html_(self) -> str:
        """Show a notebook the mean loss over seeds of each arm at each learning rate."""
        rows = [["loss, nats per token", *(f"{lr:g}" for lr in self.lrs), "cells"]]
        for arm in self.arms:
            runs = self.of_arm(arm)
            row = [arm, *(self._cell([run for run in runs if run.lr == lr]) for lr in self.lrs)]
            fates = Counter(run.fate for run in runs)
            rows.append([*row, ", ".join(f"{n} {fate}" for fate, n in fates.items())])
        return html_table(self.name, rows)

    @staticmethod
    def _cell(runs: Sequence[Run]) -> str:
        losses = [run.figure("val_loss") for run in runs if run.has_loss]
        shown = format_number(float(np.mean(losses))) if losses else MISSING
        return f"{shown} ({len(losses)} of {len(runs)})" if len(losses) < len(runs) else shown

    def left_out_reasons(self) -> dict[str, int]:
        """Return why runs are left out, and how many for each reason, the first that applies."""
        reasons = []
        for run in self.left_out:
            if run.arm not in self.arms:
                reasons.append(f"arm {run.arm}")
            elif run.lr not in self.lrs_of(run.arm):
                reasons.append(f"learning rate {run.lr:g}")
            else:
                reasons.append(f"seed {run.seed}")
        return dict(Counter(reasons))

    def of_arm(self, arm: str) -> list[Run]:
        """Return the runs of one arm."""
        return [run for run in self.runs if run.arm == arm]


class RunReader(Protocol):
    """Reads a run's folder: :func:`read_run`, or one that remembers what it has read."""

    def __call__(
        self, folder: Path, arm: str, lr: float, seed: int, crash: str | None = None
    ) -> Run:
        """Return the run; ``crash`` is the error of one that crashed."""


def read_results(folder: str | Path, read: RunReader | None = None) -> Results:
    """Read an ablation's folder, or a single run's, finished or not.

    Args:
        folder: of the ablation or the run.
        read: reads each run; default: :func:`read_run`.

    Raises:
        ConfigError: the folder holds neither.
        RunFolderError: one of its files is damaged.
    """
    folder, read = Path(folder), read or read_run
    if (folder / "ablation.yaml").is_file():
        return _read_ablation(folder, read)
    if (folder / "config.yaml").is_file():
        config = read_yaml(folder / "config.yaml")
        name = str(config.get("name", folder.name))
        try:
            lr = float(config.get("optim", {}).get("lr", math.nan))
            seed = int(config.get("train", {}).get("seed", 0))
        except (AttributeError, TypeError, ValueError) as error:
            raise RunFolderError(f"{folder / 'config.yaml'} is damaged: {error}") from None
        run = read(folder, name, lr, seed)
        return Results(
            name, folder, (name,), {name: name}, (lr,), (run.seed,), 0.02, (run,), is_ablation=False
        )
    raise ConfigError(
        f"{folder} holds neither an ablation (ablation.yaml) nor a run (config.yaml); "
        "name the folder that `minillama ablate` or `minillama train` wrote"
    )


def _read_ablation(folder: Path, read: RunReader) -> Results:
    config = load_ablation(folder / "ablation.yaml")
    arms = {arm.name: arm for arm in arms_of(config)}
    errors = _crashes(folder / "cells.csv")
    runs, missing = [], []
    plan = read_plan(folder, config)
    folders = cell_folders([*places(config), *(plan.places() if plan else [])])
    for place, cell in folders.items():
        error = errors.get(place)
        if (folder / cell / "config.yaml").is_file() or error is not None:
            runs.append(read(folder / cell, *place, crash=error))
        else:
            missing.append(place)
    return Results(
        name=config.name,
        folder=folder,
        arms=tuple(arms),
        baseline_of={arm.name: arm.baseline for arm in arms.values()},
        lrs=tuple(sorted({lr for arm in arms.values() for lr in arm.lrs})),
        seeds=tuple(config.seeds),
        margin=config.margin,
        runs=tuple(runs),
        missing=tuple(missing),
        sessions=read_sessions(folder),
        grid_arms=arms,
        left_out=tuple(read_left_out(folder, folders.values(), read)),
        plan=plan,
        hypotheses=read_hypotheses(folder),
        hypothesis_names=frozenset(each.name for each in config.hypotheses),
    )


def read_left_out(folder: Path, grid: Iterable[Path], read: RunReader | None = None) -> list[Run]:
    """Return the finished runs of an ablation's folder that are not in ``grid``, sorted.

    A run's arm is the one that ``cells.csv`` names, else the name of its folder.

    Args:
        folder: of the ablation.
        grid: folders of the cells of the present config, relative to ``folder``.
        read: reads each run; default: :func:`read_run`.

    Raises:
        RunFolderError: a summary is damaged.
    """
    read = read or read_run
    named = {row.get("run_dir"): row.get("arm") or "" for row in _rows(folder / "cells.csv")}
    inside, found = set(grid), {}
    for summary in (folder / "cells").glob("*/lr-*/seed-*/summary.json"):
        cell = summary.parent.relative_to(folder)
        if cell not in inside:
            arm = named.get(cell.as_posix()) or cell.parts[1]
            with suppress(ValueError):  # not a folder that the grid has named
                lr, seed = (part.partition("-")[2] for part in cell.parts[2:])
                found[Place(arm, float(lr), int(seed))] = summary.parent
    runs = (read(path, *place) for place, path in sorted(found.items()))
    return [replace(run, in_grid=False) for run in runs if run.ended]


def read_run(
    folder: Path,
    arm: str,
    lr: float,
    seed: int,
    crash: str | None = None,
    curves: Curves | None = None,
) -> Run:
    """Read one run's folder.

    Args:
        folder: of the run.
        arm, lr, seed: its place in the grid.
        crash: the error, if it crashed.
        curves: those of its metrics.jsonl; None: read them.

    Raises:
        RunFolderError: its summary is damaged.
    """
    summary: Mapping[str, Any] = {}
    if (folder / "summary.json").is_file():
        try:
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunFolderError(f"{folder / 'summary.json'} is damaged: {error}") from None
        _check_summary(summary, folder / "summary.json")
    if summary.get("finished"):
        fate = str(summary.get("fate", "ok"))
    else:
        fate = "unfinished" if crash is None else "crashed"
    config = read_yaml(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    for section in ("model", "data", "optim", "train"):
        if not isinstance(config.get(section, {}), Mapping):
            raise RunFolderError(f"{folder / 'config.yaml'} is damaged: {section} has no fields")
    curves = read_curves(folder / "metrics.jsonl") if curves is None else curves
    return Run(arm, lr, seed, folder, fate, summary, config, curves, crash or "")


def _check_summary(summary: Any, path: Path) -> None:
    """Refuse a summary.json in which a program other than ours has left something else."""
    if not isinstance(summary, dict):
        raise RunFolderError(f"{path} is damaged: it holds no object")
    for key in COLUMNS:
        if key in _TEXTS or not isinstance(value := summary.get(key), str | list | dict):
            continue
        raise RunFolderError(f"{path} is damaged: {key} is {value!r:.40}, not a number")


class CurveReader:
    """Collects the lines of a ``metrics.jsonl``; of several lines for a step, the last counts."""

    def __init__(self) -> None:
        self._train: dict[int, Mapping[str, Any]] = {}
        self._val: dict[int, float] = {}
        self._probes: dict[int, Mapping[str, Any]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one line."""
        step = int(line["step"])
        if "loss" in line:
            self._train[step] = line
        if "val_loss" in line:
            self._val[step] = _number(line["val_loss"])
        if "probe" in line:
            self._probes[step] = line["probe"]

    def curves(self) -> Curves:
        """Return the curves so far."""
        train, steps, val_steps = self._train, sorted(self._train), sorted(self._val)
        norms = [_number(train[s].get("grad_norm")) for s in steps]
        return Curves(
            steps=np.array(steps, dtype=np.float64),
            loss=np.array([_number(train[s]["loss"]) for s in steps], dtype=np.float64),
            grad_norm=np.array(norms, dtype=np.float64),
            clipped=np.array([bool(train[s].get("clipped")) for s in steps], dtype=np.bool_),
            skipped=np.array(["skipped" in train[s] for s in steps], dtype=np.bool_),
            val_steps=np.array(val_steps, dtype=np.float64),
            val_loss=np.array([self._val[s] for s in val_steps], dtype=np.float64),
            probes=tuple((s, self._probes[s]) for s in sorted(self._probes)),
        )


def read_curves(path: Path) -> Curves:
    """Read ``metrics.jsonl`` if it exists."""
    reader = CurveReader()
    for line in read_metrics(path) if path.is_file() else []:
        reader.add(line)
    return reader.curves()


def table_row(run: Run, root: Path) -> dict[str, Any]:
    """Return a run's row of ``cells.csv``; unknown values are None."""
    curves = run.curves
    # After the first value that is not finite the weights are NaN, so later values mean nothing.
    (lost,) = np.nonzero(~np.isfinite(curves.loss + curves.grad_norm) & ~curves.skipped)
    valid = slice(int(lost[0]) + 1 if len(lost) else None)
    applied = ~curves.skipped[valid]
    gradients = gradient_figures(
        curves.grad_norm[valid][applied], curves.clipped[valid][applied].tolist()
    )
    known = {
        "arm": run.arm,
        "lr": run.lr,
        "seed": run.seed,
        "fate": run.fate,
        "run_dir": run.folder.relative_to(root).as_posix(),
        "spike_score": spike_score(curves.loss[valid], curves.grad_norm[valid]),
        "grad_norm_max": gradients.max,
        "grad_norm_p99": gradients.p99,
        "clipped_share": gradients.clipped_share,
        "error": run.error or None,
        "in_grid": run.in_grid,
        "distance_to_collapse": run.distance_to_collapse,
    }
    row = {column: known.get(column, run.summary.get(column)) for column in COLUMNS}
    return {key: None if value != value else value for key, value in row.items()}


def read_sessions(folder: Path) -> tuple[Session, ...]:
    """Return the recorded calls of an ablation, oldest first.

    Raises:
        RunFolderError: the file is damaged.
    """
    path = folder / SESSIONS_FILE
    if not path.is_file():
        return ()
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return tuple(
            Session(
                float(entry["seconds"]),
                float(entry["preparing_seconds"]),
                int(entry["workers"]),
                int(entry["threads"]),
            )
            for entry in entries
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path} is damaged: {error}; delete it, then the report leaves out the times"
        ) from None


def _crashes(path: Path) -> dict[tuple[str, float, int], str]:
    """Return the errors of the cells that crashed, by arm, learning rate and seed.

    Raises:
        RunFolderError: the file is damaged.
    """
    try:
        return {
            (row["arm"], float(row["lr"]), int(row["seed"])): row.get("error") or ""
            for row in _rows(path)
            if row.get("fate") == "crashed"
        }
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged_table(path, error) from None


def _rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a cells.csv; none if there is no file."""
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (ValueError, csv.Error) as error:
        raise _damaged_table(path, error) from None


def _damaged_table(path: Path, error: Exception) -> RunFolderError:
    return RunFolderError(
        f"{path} is damaged: {error}; delete it, then `minillama ablate` writes it again"
    )


def _number(value: Any) -> float:
    """Return a finite number unchanged, anything else as NaN."""
    number = float(value) if isinstance(value, int | float) else math.nan
    return number if math.isfinite(number) else math.nan
