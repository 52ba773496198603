"""Stops training cleanly on Ctrl-C, SIGTERM (cluster schedulers) or SIGHUP (a closed terminal)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


_REPEAT_SECONDS = 1.0
"""Signals that follow one so soon are the same request: a terminal sends Ctrl-C to every process of
the job, and a launcher such as uv, make or a shell script may pass it on once more."""


class _StopNow(BaseException):
    """Leaves work that can be abandoned at any point."""


class StopSignal:
    """Sets ``requested`` at the first signal; a later one raises KeyboardInterrupt at once.

    Signals within a second of the first are ignored, so that what it asked for is saved.  Further
    ones are ignored until the body has been left, which they would only disturb.
    Handlers are set in the main thread only, as Python requires, and restored at the end.  A signal
    that the process was started to ignore (``nohup``) stays ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._requested_at = 0.0
        self._breakable = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
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
            if time.monotonic() - self._requested_at < _REPEAT_SECONDS:
                return
            for other in self._before:
                signal.signal(other, signal.SIG_IGN)
            raise KeyboardInterrupt
        self.requested, self._requested_at = True, time.monotonic()
        if self._breakable:
            raise _StopNow

    def sync(self) -> None:
        """Learn of a signal that another rank received; a process alone has none."""

    def check(self) -> None:
        """Leave a breakable body if a signal has come; here the handler has done so already."""

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Leave the body at once when a signal comes; only for work that changes no state."""
        self._breakable = True
        try:
            yield
        except _StopNow:
            pass
        finally:
            self._breakable = False


class SyncedStopSignal(StopSignal):
    """A stop signal to any of several ranks, which all of them notice at the same place.

    Further signals are ignored: torchrun may repeat one, and kills every process that has not ended
    after half a minute.

    Args:
        any_rank: returns whether a flag is set on any rank; all of them call it together.
    """

    def __init__(self, any_rank: Callable[[bool], bool]) -> None:
        super().__init__()
        self._any_rank, self._received = any_rank, False

    def __exit__(self, *exception: object) -> None:
        # torchrun sends SIGTERM as soon as a rank has left; one that leaves with an error, such as
        # that a rank was lost, is to report it first.
        if any(exception):
            self._before.pop(signal.SIGTERM, None)
        super().__exit__(*exception)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def sync(self) -> None:
        """Learn of a signal that any rank has received."""
        if not self.requested:
            self.requested = self._any_rank(self._received)

    def check(self) -> None:
        """Leave the breakable body, on all ranks, if a signal has come to any of them."""
        self.sync()
        if self.requested:
            raise _StopNow
