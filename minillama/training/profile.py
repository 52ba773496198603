"""Where the time of a step goes: the mean time of each part, and a trace of some steps.

The trace is torch.profiler's, in Chrome's format: open it in ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

PARTS = ("data", "forward", "backward", "clip", "update")
TRACE = "trace.json"

WARMUP = 3
"""Steps before the trace, which are not counted: kernels compile, memory is allocated."""


class StepClock:
    """Adds up the time of each of :data:`PARTS` over the steps of one process, and traces some.

    On a GPU the parts of a step that is not traced are the time to launch kernels, not to run them.

    Args:
        traced: how many steps to trace; 0 for none.
        device: that the model is on.
    """

    def __init__(self, traced: int, device: torch.device) -> None:
        self._traced, self._cuda = traced, device.type == "cuda"
        self._steps, self._started = 0, 0.0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._whole = 0.0
        self._profile: profile | None = None

    @contextmanager
    def step(self, file: Path) -> Iterator[None]:
        """Surround one step; after the last traced one, write ``file``."""
        if self._traced and self._steps == WARMUP:
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._cuda]
            self._profile = profile(activities=activities)
            self._profile.start()
        if self._steps == WARMUP:
            self._seconds, self._whole = dict.fromkeys(PARTS, 0.0), 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            self._whole += time.perf_counter() - start
            self._steps += 1
            if self._profile is not None and self._steps == WARMUP + self._traced:
                self.close(file)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Surround a part of a step, one of :data:`PARTS`."""
        start = time.perf_counter()
        if self._profile is None:
            yield
        else:
            with record_function(name):
                yield
                if self._cuda:
                    torch.cuda.synchronize()
        self._seconds[name] += time.perf_counter() - start

    def close(self, file: Path) -> None:
        """Write the trace, if one is being recorded."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(file))
            self._profile = None

    def report(self) -> str | None:
        """Return one line about the mean step, in ms per part; None before the first step."""
        n = self._steps - WARMUP if self._steps > WARMUP else self._steps
        if not n:
            return None
        parts = [f"{name} {1e3 * seconds / n:.1f}" for name, seconds in self._seconds.items()]
        other = self._whole - sum(self._seconds.values())
        parts.append(f"other {1e3 * max(0.0, other) / n:.1f}")
        return f"a step took {1e3 * self._whole / n:.1f} ms: {', '.join(parts)}"
