"""What a run tells as it goes: lines of metrics and, where it ends, its summary."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from minillama.config import RunConfig
from minillama.training.loggers import Line, Logger, build_loggers
from minillama.training.run_folder import RunFolder


class Journal:
    """Writes into a run's folder, for the main process; silent for the others.

    Args:
        folder: the run's.
        silent: write nothing.
    """

    def __init__(self, folder: RunFolder, *, silent: bool) -> None:
        self._folder, self._silent = folder, silent
        self._loggers: list[Logger] = []
        self._tokens, self._seconds = 0, 0.0  # since the last line about training

    def begin(self, config: RunConfig, step: int) -> None:
        """Write the config and open the loggers, to go on after ``step``."""
        if not self._silent:
            with self._folder.writing():
                self._folder.begin(config)
                self._loggers = build_loggers(config.loggers, self._folder.path, step)

    def write(self, line: Line) -> None:
        """Hand ``line`` to every logger."""
        with self._folder.writing():
            for logger in self._loggers:
                logger.log(line)

    def sync(self) -> None:
        """Put all lines so far where a loss of power does not reach them."""
        for logger in self._loggers:
            logger.sync()

    def summarise(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        if not self._silent:
            with self._folder.writing():
                self._folder.write_summary(summary)

    def close(self) -> None:
        """Take no more lines."""
        for logger in self._loggers:
            with suppress(OSError):  # what could not be written was reported when it was logged
                logger.close()

    def speed(self, tokens: int, seconds: float) -> float:
        """Count a step in; return the tokens per second of all since :meth:`restart_speed`."""
        self._tokens += tokens
        self._seconds += seconds
        return self._tokens / self._seconds

    def restart_speed(self) -> None:
        """Count steps anew: a line has told of them."""
        self._tokens, self._seconds = 0, 0.0
