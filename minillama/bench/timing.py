"""Time contenders in alternation, and describe the machine.

A round times every contender once, in a random order, so that other work on the machine slows all
of them equally.  By default each is called once untimed before that, since else it would pay for
the memory that the previous one returned to the system.  A ratio is the median, over the rounds, of
two times of the same round; its quartiles are kept beside it.  Times alone do not compare between
machines.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from minillama.formatting import text_table
from minillama.launch import processor_name

K = TypeVar("K")
R = TypeVar("R")


def take_turns(
    contenders: Mapping[K, Callable[[], R]], rounds: int, seconds: float = 0.0
) -> dict[K, list[R]]:
    """Call every contender once a round, in a random order, and return what each returned.

    Args:
        contenders: what to call, by name.
        rounds: how many, at least.
        seconds: more rounds follow until this time has passed.
    """
    returned: dict[K, list[R]] = {name: [] for name in contenders}
    order, draw = list(contenders), random.Random(0)
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        if turn >= rounds and time.perf_counter() >= end:
            break
        draw.shuffle(order)
        for name in order:
            returned[name].append(contenders[name]())
    return returned


def alternate(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    seconds: float = 0.0,
    untimed: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds per call of each contender, one number a round (:func:`take_turns`).

    ``calls`` are timed together.  Before them ``untimed`` is called; None: the contender itself.
    """

    def timed(call: Callable[[], object]) -> float:
        (untimed or call)()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    by_name = {name: partial(timed, call) for name, call in contenders.items()}
    return take_turns(by_name, rounds, seconds)


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Return the :func:`quartiles` of the ratios of two contenders, round by round."""
    return quartiles([a / b for a, b in zip(above, below, strict=True)])


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and, as ``low`` and ``high``, the quartiles."""
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def show_quartiles(values: Mapping[str, float], decimals: int = 2) -> str:
    """Return what :func:`quartiles` returned as text: ``median (low–high)``."""
    median, low, high = (f"{values[key]:.{decimals}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}–{high})"


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Run what is inside with so many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine(load_before: float | None) -> dict[str, Any]:
    """Return what a reader must know of the machine, and how busy it was before and is now."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": load_before,
        "load_after": load_average(),
    }


def load_average() -> float | None:
    """Return the load average of the last minute; None on systems that have none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def table(title: str, note: str, result: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> str:
    """Return a benchmark's rows as a table, under a line about the machine."""
    machine = result["machine"]
    return "\n".join(
        [
            f"{title}, {machine['processor']}, {machine['cores']} cores, torch {machine['torch']}; "
            f"load {machine['load']} before, {machine['load_after']} after",
            note,
            text_table(rows),
        ]
    )
