"""Where a run logs to: metrics.jsonl always, others by one line of config.

The others must not matter to a run: one that fails, at its start, in the middle or when it is
closed, is left out from then on, with one warning.
"""

from __future__ import annotations

import csv
import importlib
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from minillama.config import RunConfig
from minillama.config.loading import flatten
from minillama.errors import ConfigError
from minillama.files import write_atomic
from minillama.training.metrics import Line, MetricsLogger, read_metrics

PROJECT = "minillama"
"""The project of runs in trackio and wandb; WANDB_PROJECT in the environment takes precedence."""

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}
"""The module that each logger needs; csv needs none."""

_log = logging.getLogger("minillama")


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
        config: of the run.
        folder: of the run.
        step: the step that the run resumes from; what was logged after it is hidden.
    """

    def __init__(self, config: RunConfig, folder: Path, step: int) -> None:
        writer = _module("tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, line: Line) -> None:
        """Log each number of ``line``."""
        for name, value in _scalars(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def sync(self) -> None:
        """Write out what is queued."""
        self._writer.flush()

    def close(self) -> None:
        """Write out what is queued and close the file."""
        self._writer.close()


class CsvLogger:
    """metrics.csv: the training and validation lines of metrics.jsonl as one table.

    A resumed run writes it again from metrics.jsonl, which is cut back to the step it resumes from.
    Probes, which are maps by layer, are not in it.
    """

    COLUMNS = (
        *("step", "loss", "lr", "grad_norm", "clipped", "tokens", "tokens_per_s"),
        *("val_loss", "val_bits_per_byte", "skipped", "spike"),
    )

    def __init__(self, config: RunConfig, folder: Path, step: int) -> None:
        path = folder / "metrics.csv"
        write_atomic(path, ",".join(self.COLUMNS) + "\n")
        self._file = path.open("a", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(
            self._file, self.COLUMNS, extrasaction="ignore", lineterminator="\n"
        )
        for line in read_metrics(folder / "metrics.jsonl") if step else ():
            self.log(line)

    def log(self, line: Line) -> None:
        """Append a row, unless it is a probe."""
        if "probe" not in line:
            self._writer.writerow(line)
            self._file.flush()

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TrackioLogger:
    """A run of trackio, in its local store unless its environment variables name another place."""

    def __init__(self, config: RunConfig, folder: Path, step: int) -> None:
        with redirect_stdout(sys.stderr):
            self._run = _module("trackio").init(
                project=PROJECT,
                name=config.name,
                group=config.group,
                config=_described(config),
                resume="allow" if step else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, line: Line) -> None:
        """Log the numbers of ``line``."""
        self._run.log(_scalars(line), step=line["step"])

    def sync(self) -> None:
        """Do nothing: a thread of trackio writes."""

    def close(self) -> None:
        """Wait until everything is stored."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


class WandbLogger:
    """A run of Weights & Biases, its files in the run folder; WANDB_MODE=offline needs no network.

    A resumed run continues the same one; wandb ignores the steps that it has already.
    """

    def __init__(self, config: RunConfig, folder: Path, step: int) -> None:
        wandb = _module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=config.name,
            group=config.group,
            config=_described(config),
            dir=str(folder),
            id=_wandb_id(folder, step),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, line: Line) -> None:
        """Log the numbers of ``line``."""
        self._run.log(_scalars(line), step=line["step"])

    def sync(self) -> None:
        """Do nothing: a process of wandb writes."""

    def close(self) -> None:
        """Wait until everything is written, and sent unless offline."""
        self._run.finish()


_LOGGERS: dict[str, Callable[[RunConfig, Path, int], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "trackio": TrackioLogger,
    "wandb": WandbLogger,
    "csv": CsvLogger,
}


class HarmlessLogger:
    """A logger whose errors end nothing: after the first one, which is logged, it is not used."""

    def __init__(self, name: str, config: RunConfig, folder: Path, step: int) -> None:
        self._name = name
        self._logger: Logger | None = None
        self._attempt(lambda: self._start(config, folder, step))

    def log(self, line: Line) -> None:
        """Log one line."""
        if (logger := self._logger) is not None:
            self._attempt(lambda: logger.log(line))

    def sync(self) -> None:
        """Put all lines so far where a loss of power does not reach them."""
        if (logger := self._logger) is not None:
            self._attempt(logger.sync)

    def close(self) -> None:
        """Finish writing."""
        if (logger := self._logger) is not None:
            self._attempt(logger.close)

    def _start(self, config: RunConfig, folder: Path, step: int) -> None:
        self._logger = _LOGGERS[self._name](config, folder, step)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:
            self._logger = None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            _log.warning(
                "the logger %s has failed and logs no more, the run goes on: %s", self._name, reason
            )


def check_loggers(names: Sequence[str]) -> None:
    """Make sure that the package of each logger is installed, before any work is done.

    Raises:
        ConfigError: one is missing; the message says how to install it.
    """
    for name in names:
        if name in PACKAGES:
            _import(name)


def build_loggers(config: RunConfig, folder: Path, step: int = 0) -> list[Logger]:
    """Return the logger of metrics.jsonl and those that ``config`` names.

    Args:
        config: of the run.
        folder: of the run.
        step: the step that the run resumes from.
    """
    others = (HarmlessLogger(name, config, folder, step) for name in config.loggers)
    return [MetricsLogger(folder / "metrics.jsonl"), *others]


def _import(name: str) -> None:
    try:
        _module(name)
    except ImportError:
        raise ConfigError(
            f'loggers: {name} is not installed; pip install "minillama[{name}]", '
            "or take it out of `loggers`"
        ) from None
    except Exception:  # it is installed and broken, which build_loggers reports
        return


def _module(name: str) -> Any:
    # A call, not a statement: it takes seconds that other runs need not spend.
    return importlib.import_module(PACKAGES[name])


def _described(config: RunConfig) -> dict[str, Any]:
    """Return all fields by dotted name, and as ``arm``, ``lr``, ``seed`` a cell's place."""
    place = {"arm": config.arm, "lr": config.optim.lr, "seed": config.train.seed}
    return place | flatten(config.model_dump(mode="json", exclude={"arm"}))


def _wandb_id(folder: Path, step: int) -> str:
    """Return the id of the run at wandb: a new one at step 0, the same after a resume."""
    path = folder / "wandb_id"
    if step == 0 or not path.is_file():
        write_atomic(path, secrets.token_hex(8))
    return path.read_text(encoding="ascii")


def _scalars(line: Line) -> dict[str, float]:
    """Return the numbers of a line but for its step, nested ones by their path."""
    return {name: value for name, value in _numbers(line, "") if name != "step"}


def _numbers(line: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):  # a bool is an int; None has nothing to show
            yield f"{prefix}{name}", value
