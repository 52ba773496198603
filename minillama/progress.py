"""Progress of long work: a bar in a terminal or a notebook, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import NoReturn

import tqdm.auto

from minillama.formatting import format_duration
from minillama.launch import SafeStream

LINE_EVERY = 15.0
"""Seconds between two lines in a log that is not a terminal."""


def in_notebook() -> bool:
    """Return whether this is a notebook that can show widgets, by tqdm's own check."""
    return tqdm.auto.notebook_tqdm is not tqdm.std.tqdm  # type: ignore[attr-defined]


class ProgressBar:
    """Shows how far work has come; what cannot be written is lost and ends nothing.

    Args:
        name: of the work.
        total: how many steps it has.
        done: how many of them are done already.
        show: False: show nothing.
    """

    def __init__(self, name: str, total: int, done: int = 0, *, show: bool = True) -> None:
        self._name, self._total, self._start, self._done = name, total, done, done
        self._began = self._written = time.monotonic()
        self._stream = SafeStream(sys.stderr)
        self._bar: tqdm.std.tqdm[NoReturn] | None = None
        self._text: str | None = None  # of the last line
        self._show = show and sys.stderr is not None
        if self._show and (in_notebook() or self._stream.isatty()):
            self._bar = tqdm.auto.tqdm(
                desc=name,
                total=total,
                initial=done,
                unit="step",
                dynamic_ncols=True,
                mininterval=0.2,
                file=self._stream,
            )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, text: str = "", steps: int = 1) -> None:
        """Count ``steps`` more as done; ``text`` is shown beside the count."""
        self._done += steps
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(steps)
            if not steps:  # show the text and the time all the same
                self._bar.refresh()
            return
        now = time.monotonic()
        complete = self._done == self._total and text != self._text
        if self._show and (now - self._written >= LINE_EVERY or complete):
            made = self._done - self._start
            left = (now - self._began) / made * (self._total - self._done) if made > 0 else 0
            line = f"{self._name}: step {self._done}/{self._total}, {text}"
            self.print(line + (f", {format_duration(left)} left" if left else ""))
            self._written, self._text = now, text

    def print(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(line, file=self._stream)
        elif self._show:
            self._stream.write(line + "\n")
            self._stream.flush()
