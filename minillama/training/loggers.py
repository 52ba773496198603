"""Where a run logs to: metrics.jsonl always, TensorBoard by one line of config."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from minillama.errors import ConfigError
from minillama.training.metrics import Line, MetricsLogger


class Logger(Protocol):
    """What the trainer needs of a logger."""

    def log(self, line: Line) -> None:
        """Log one line; it has a ``step``."""

    def sync(self) -> None:
        """Put all lines so far where a loss of power does not reach them."""

    def close(self) -> None:
        """Finish writing."""


class TensorBoardLogger:
    """Every number of a line as a scalar; nested ones as ``probe/layer_0/kurtosis``.

    Args:
        folder: where the event files go.
        step: the step that the run resumes from; what was logged after it is hidden.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        self._writer = _tensorboard().SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, line: Line) -> None:
        """Log each number of ``line``."""
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
    """Make sure that the package of each logger is installed, before any work is done.

    Raises:
        ConfigError: one is missing; the message says how to install it.
    """
    if "tensorboard" in names:
        _tensorboard()


def build_loggers(names: Sequence[str], folder: Path, step: int = 0) -> list[Logger]:
    """Return the logger of metrics.jsonl and those in ``names``, all writing into ``folder``."""
    loggers: list[Logger] = [MetricsLogger(folder / "metrics.jsonl")]
    if "tensorboard" in names:
        loggers.append(TensorBoardLogger(folder / "tensorboard", step))
    return loggers


def _tensorboard() -> Any:
    try:  # a call, not a statement: it takes seconds that other runs need not spend
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise ConfigError(
            'loggers: tensorboard is not installed; pip install "minillama[tensorboard]", '
            "or take it out of `loggers`"
        ) from None


def _scalars(line: Line, prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):  # a bool is an int; None has nothing to show
            yield f"{prefix}{name}", value
