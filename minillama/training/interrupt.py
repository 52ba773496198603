"""Ctrl-C and SIGTERM, the signal of cluster schedulers, as a wish to stop at a clean place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopNow(BaseException):
    """Leaves work that changes nothing and need not be waited for."""


class StopSignal:
    """Catches the first signal and sets ``requested``; a second one ends the program at once.

    Handlers are set only in the main thread, where alone Python allows it, and put back at the end.
    A signal that the process was started to ignore (``nohup``) stays ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._breakable = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    self._before[number] = signal.SIG_DFL if before is None else before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._breakable:
            raise StopNow

    def agree(self) -> None:
        """Hear of a signal that another process got; there is none here."""

    def check(self) -> None:
        """Leave a breakable body if a signal has come; here its handler has done so already."""

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Leave the body at once when a signal comes; only for what changes no state."""
        self._breakable = True
        try:
            yield
        except StopNow:
            pass
        finally:
            self._breakable = False
