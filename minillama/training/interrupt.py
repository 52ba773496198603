"""Ctrl-C and SIGTERM, the signal of cluster schedulers, as a wish to stop at a clean place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _StopNow(BaseException):
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
            raise _StopNow

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
        except _StopNow:
            pass
        finally:
            self._breakable = False


class AgreedStop(StopSignal):
    """A wish to stop that came to any of several processes, known to all of them at one place.

    Further signals change nothing: torchrun may repeat one, and kills whoever is not gone after
    half a minute.

    Args:
        on_any: tells whether a flag is set in any of the processes; all of them call it.
    """

    def __init__(self, on_any: Callable[[bool], bool]) -> None:
        super().__init__()
        self._on_any, self._heard = on_any, False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._heard = True

    def agree(self) -> None:
        """Hear of a signal that any of the processes got before."""
        if not self.requested:
            self.requested = self._on_any(self._heard)

    def check(self) -> None:
        """Leave the breakable body, in all processes, if a signal has come to any."""
        self.agree()
        if self.requested:
            raise _StopNow
