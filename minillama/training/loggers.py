"""Where a run's numbers go: metrics.jsonl always, TensorBoard by a line of config.

A line is a mapping with its ``step``, as design and report know it: training lines have ``loss lr
grad_norm clipped tokens tokens_per_s``, validation lines ``val_loss val_bits_per_byte``, probe
lines ``probe``, a map by layer.

JSON has no word for what is not finite, so metrics.jsonl holds the strings ``"NaN"``,
``"Infinity"`` and ``"-Infinity"`` there; :func:`read_metrics` turns them back into numbers.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from minillama.errors import ConfigError
from minillama.files import write_atomic

Line = Mapping[str, Any]

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_log = logging.getLogger("minillama")


class Logger(Protocol):
    """What the trainer needs of a place to log to."""

    def log(self, line: Line) -> None:
        """Take one line; it has a ``step``."""

    def sync(self) -> None:
        """Put all lines so far where a loss of power does not reach them."""

    def close(self) -> None:
        """Take no more lines."""


class MetricsLogger:
    """One JSON object a line, each handed to the system at once, so that a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, line: Line) -> None:
        """Append ``line``."""
        self._file.write(json.dumps(_writable(line), allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until the disk has every line."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardLogger:
    """Every number of a line as a scalar; nested ones as ``probe/layer_0/kurtosis``.

    Args:
        folder: where the event files go.
        step: the step that the run goes on from; what was logged after it is hidden.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self._writer = _tensorboard().SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, line: Line) -> None:
        """Hand each number over."""
        for name, value in _scalars(line):
            if name != "step":
                self._writer.add_scalar(name, value, line["step"])

    def sync(self) -> None:
        """Write out what is queued."""
        self._writer.flush()

    def close(self) -> None:
        """Write out what is queued and close the file."""
        self._writer.close()


def check_loggers(names: Sequence[str]) -> None:
    """Make sure that each logger's package is there, before any work is done.

    Raises:
        ConfigError: one is missing; the message says how to install it.
    """
    if "tensorboard" in names:
        _tensorboard()


def build_loggers(names: Sequence[str], folder: Path, step: int = 0) -> list[Logger]:
    """Return metrics.jsonl's logger and those that ``names`` asks for, writing into ``folder``."""
    loggers: list[Logger] = [MetricsLogger(folder / "metrics.jsonl")]
    if "tensorboard" in names:
        loggers.append(TensorBoardLogger(folder / "tensorboard", step))
    return loggers


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, leaving out any that a crash left torn.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(path)
    try:
        raw_lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a run's own") from None
    lines = []
    for number, raw in enumerate(raw_lines, start=1):
        if not raw:
            continue
        try:
            line = json.loads(raw, object_hook=_readable)
        except ValueError:
            line = None
        if isinstance(line, dict) and "step" in line:
            lines.append(line)
        else:
            _log.warning("%s: line %d is torn and left out", path, number)
    return lines


def cut_metrics(path: Path, keep: Callable[[Line], bool]) -> None:
    """Rewrite a metrics.jsonl with only the lines that ``keep`` wants, all at once."""
    if path.exists():
        kept = [json.dumps(_writable(line)) + "\n" for line in read_metrics(path) if keep(line)]
        write_atomic(path, "".join(kept))


def _tensorboard() -> Any:
    try:  # a call, not a statement: it takes seconds that a run without TensorBoard need not spend
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise ConfigError(
            'loggers: tensorboard is not installed; pip install "minillama[tensorboard]", '
            "or take it out of `loggers`"
        ) from None


def _writable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _writable(item) for key, item in value.items()}
    return value


def _readable(line: dict[str, Any]) -> dict[str, Any]:
    return {k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in line.items()}


def _scalars(line: Line, prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):  # a bool is an int; None has nothing to show
            yield f"{prefix}{name}", value
