"""`minillama runs`: which runs and ablations are in a folder, and how each of them stands.

Reads small files only, loads no torch and no plugin, and writes nothing.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from minillama.ablation.grid import places
from minillama.ablation.stage_plan import read_plan
from minillama.config.ablation import load_ablation
from minillama.config.loading import get_path, read_yaml
from minillama.errors import ConfigError, RunFolderError
from minillama.files import is_locked
from minillama.formatting import MISSING, format_number, text_table
from minillama.training.metrics import last_line

DEPTH = 4
"""Folders are searched this many levels below the one that is named."""

_WRITTEN = ("metrics.jsonl", "summary.json", "cells.csv", "config.yaml", "ablation.yaml")


@dataclass(frozen=True)
class Entry:
    """A line of the list.

    Attributes:
        kind: ``run`` or ``ablation``.
        name: from its config.
        folder: of the run or of the ablation.
        fate: of a run: as in its summary, ``running`` or ``unfinished``; of an ablation:
            ``finished``, ``running`` or ``unfinished``; ``damaged`` if a file of either
            cannot be read.
        val_loss: the last validation loss, nats per token; None: there is none.
        done: steps of a run, ended cells of an ablation.
        total: of its steps or cells; None: its config does not tell.
        crashed: cells of an ablation that crashed.
        changed: when it was last written to, local time in ISO format.
    """

    kind: str
    name: str
    folder: str
    fate: str
    val_loss: float | None
    done: int
    total: int | None
    crashed: int
    changed: str


@dataclass(frozen=True)
class RunState:
    """A run as its files show it; ``summary`` is empty while it is running or was killed.

    Of the summary's entries, those that hold a list or a mapping are left out.
    """

    folder: Path
    name: str
    fate: str
    val_loss: float | None
    steps: int
    config: Mapping[str, Any]
    summary: Mapping[str, Any]


def list_runs(folder: str, *, as_json: bool) -> str:
    """Return a table of the runs and ablations in ``folder``, the last changed first.

    Raises:
        ConfigError: there is no such folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"there is no folder {folder}; `minillama train tiny` makes runs/tiny")
    entries = sorted(
        map(read_entry, find_folders(root)), key=lambda entry: entry.changed, reverse=True
    )
    if as_json:
        return json.dumps([asdict(entry) for entry in entries], indent=2)
    if not entries:
        return f"no runs in {folder}; `minillama train tiny` makes runs/tiny"
    header = ("name", "fate", "loss", "done", "changed", "folder")
    return text_table([header, *map(_row, entries)])


def _row(entry: Entry) -> tuple[str, ...]:
    total = "" if entry.total is None else f"/{entry.total}"
    unit = "steps" if entry.kind == "run" else "cells"
    crashed = f", {entry.crashed} crashed" if entry.crashed else ""
    return (
        entry.name,
        entry.fate,
        MISSING if entry.val_loss is None else format_number(entry.val_loss, 4),
        f"{entry.done}{total} {unit}{crashed}",
        f"{datetime.fromisoformat(entry.changed):%Y-%m-%d %H:%M}",
        entry.folder,
    )


def find_folders(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield ``folder`` itself, or the folders of the runs and ablations below it, each once.

    A link may lead to a folder that is found elsewhere, or around in a circle.
    """
    seen: set[Path] = set()

    def below(folder: Path, depth: int) -> Iterator[Path]:
        try:
            real = folder.resolve()
            inner = sorted(path for path in folder.iterdir() if path.is_dir())
        except (OSError, RuntimeError):  # it may not be read, or is a link to itself
            return
        if real in seen:
            return
        seen.add(real)
        if any((folder / name).is_file() for name in ("ablation.yaml", "config.yaml")):
            yield folder
        elif depth:
            for path in inner:
                if not path.name.startswith("."):
                    yield from below(path, depth - 1)

    return below(folder, depth)


def read_entry(folder: Path) -> Entry:
    """Read how the run or ablation in ``folder`` stands, for the list."""
    return _ablation(folder) if (folder / "ablation.yaml").is_file() else _run(folder)


def read_state(folder: Path) -> RunState:
    """Read how the run in ``folder`` stands.

    Raises:
        ConfigError: it contains no run, or its config is damaged.
    """
    config = _read_config(folder, _written_at(folder / "config.yaml"))
    summary = _read_summary(folder / "summary.json")
    metrics = folder / "metrics.jsonl"
    if is_locked(folder / ".lock"):
        fate = "running"
    else:
        fate = str(summary.get("fate")) if summary.get("finished") else "unfinished"
    val_loss, steps = number(summary.get("val_loss")), number(summary.get("steps"))
    if val_loss is None and not summary.get("finished"):
        val_loss = number((last_line(metrics, "val_loss") or {}).get("val_loss"))
    if steps is None:
        steps = number((last_line(metrics, "loss") or {}).get("step"))
    name = str(config.get("name", folder.name))
    return RunState(folder, name, fate, val_loss, int(steps or 0), config, summary)


def number(value: Any) -> float | None:
    """Return ``value`` if it is a finite number; a file may hold anything."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _run(folder: Path) -> Entry:
    try:
        state = read_state(folder)
    except ConfigError:
        return Entry("run", folder.name, str(folder), "damaged", None, 0, None, 0, _changed(folder))
    total = get_path(state.config, "train.steps")
    return Entry(
        "run",
        state.name,
        str(folder),
        state.fate,
        state.val_loss,
        state.steps,
        total if isinstance(total, int) else None,
        0,
        _changed(folder),
    )


def _ablation(folder: Path) -> Entry:
    try:
        config = load_ablation(folder / "ablation.yaml")
        plan = read_plan(folder, config)
        with (folder / "cells.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
            fates = [row["fate"] for row in rows if row.get("in_grid") != "False"]
    except FileNotFoundError:  # no cell has ended
        fates = []
    except (ConfigError, RunFolderError, OSError, ValueError, KeyError):
        place = str(folder)
        return Entry("ablation", folder.name, place, "damaged", None, 0, None, 0, _changed(folder))
    crashed = fates.count("crashed")
    done, total = len(fates) - crashed, len(places(config)) + len(plan.places() if plan else [])
    fate = "finished" if done == total else "unfinished"
    if is_locked(folder / ".lock"):
        fate = "running"
    return Entry(
        "ablation", config.name, str(folder), fate, None, done, total, crashed, _changed(folder)
    )


def _read_summary(path: Path) -> dict[str, Any]:
    """Return the entries of a summary.json that are texts, numbers or truth values."""
    try:
        summary = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    entries = summary.items() if isinstance(summary, dict) else ()
    return {key: value for key, value in entries if not isinstance(value, list | dict)}


@lru_cache(maxsize=10_000)
def _read_config(folder: Path, written_at: int) -> dict[str, Any]:
    """Read a config once, however often a page asks: YAML takes most of the time of an entry."""
    return read_yaml(folder)


def _written_at(path: Path) -> int:
    """Return when the file was last written, in ns since 1970; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it was not written, or has just been removed
        return 0


def _changed(folder: Path) -> str:
    seconds = max(_written_at(folder / name) for name in _WRITTEN) / 1e9
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
