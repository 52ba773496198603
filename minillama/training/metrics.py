"""metrics.jsonl: one JSON object per line, readable whenever the run was killed.

Training lines have ``step loss lr grad_norm clipped tokens tokens_per_s``, validation lines ``step
val_loss val_bits_per_byte``, probe lines ``step probe`` (a map by layer).

JSON has no NaN or infinity, so the file holds the strings ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``; :func:`read_metrics` turns them back into numbers.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from minillama.errors import ConfigError
from minillama.files import write_atomic

Line = Mapping[str, Any]

_TAIL_BYTES = 65536  # where the last lines of a file are looked for first

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_log = logging.getLogger("minillama")


class MetricsLogger:
    """Appends lines to metrics.jsonl, flushing each, so that a killed process loses none."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, line: Line) -> None:
        """Append ``line``."""
        self._file.write(_to_json(line))
        self._file.flush()

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, without those that a crash left incomplete.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; name the metrics.jsonl of a run"
        ) from None
    return parse_metrics(raw, path)


def parse_metrics(raw: bytes, path: Path) -> list[dict[str, Any]]:
    """Return the lines in ``raw``, a part of the file at ``path``; incomplete ones are left out."""
    lines = []
    for number, text in enumerate(raw.split(b"\n"), start=1):
        if not text:
            continue
        try:
            line = json.loads(text, object_hook=_with_nonfinite_numbers)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and _is_complete(line):
            lines.append(line)
        else:
            _log.warning("%s: line %d is incomplete and left out", path, number)
    return lines


def _is_complete(line: Line) -> bool:
    step, probe = line.get("step"), line.get("probe", {})
    return isinstance(step, int) and isinstance(probe, Mapping)


def last_line(path: Path, key: str) -> dict[str, Any] | None:
    """Return the last complete line of a metrics.jsonl that has ``key``; None if none has."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            found = _last_line_of(file, size - min(size, _TAIL_BYTES), key)
            return found or _last_line_of(file, 0, key)
    except OSError:
        return None


def _last_line_of(file: BinaryIO, start: int, key: str) -> dict[str, Any] | None:
    """Return the last complete line with ``key`` from byte ``start`` on."""
    file.seek(start)
    quoted = json.dumps(key).encode()
    for raw in reversed(file.read().split(b"\n")):
        if quoted in raw:  # quicker than parsing each line
            try:
                line = json.loads(raw, object_hook=_with_nonfinite_numbers)
            except ValueError:
                continue
            if isinstance(line, dict) and key in line:
                return line
    return None


def filter_metrics(path: Path, keep: Callable[[Line], bool]) -> None:
    """Rewrite a metrics.jsonl atomically with only the lines for which ``keep`` is true."""
    if path.exists():
        write_atomic(path, "".join(_to_json(line) for line in read_metrics(path) if keep(line)))


def _to_json(line: Line) -> str:
    return json.dumps(_without_nonfinite_numbers(line), allow_nan=False) + "\n"


def _without_nonfinite_numbers(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _without_nonfinite_numbers(item) for key, item in value.items()}
    return value


def _with_nonfinite_numbers(line: dict[str, Any]) -> dict[str, Any]:
    return {k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in line.items()}
