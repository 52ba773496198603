"""Where an ablation's time went, in words."""

from __future__ import annotations

import math

from minillama.ablation.results import Results, Run
from minillama.ablation.tables import duration, known
from minillama.ablation.verdict import count, listed

PARTS = {
    "training_seconds": "in training steps",
    "validation_seconds": "in validation",
    "starting_seconds": "in starting (process, imports, data, model)",
}
"""What a run's summary tells of its time, in its own words; the rest is saving and logging."""


def where_time_went(results: Results) -> str:
    """Say how long the grid and its cells took, and with what; what was not recorded is left out.

    What the workers had, less what the cells took, is their idle time; that of cells that crashed
    or were killed counts as such, since they left no record.
    """
    told = [run for run in results.runs if all(known(run, key) for key in ("seconds", *PARTS))]
    said = []
    wall = sum(session.seconds + session.preparing_seconds for session in results.sessions)
    if results.sessions:
        workers = sorted({session.workers for session in results.sessions})
        sittings = count(len(results.sessions), "sitting")
        preparing = _time(sum(session.preparing_seconds for session in results.sessions))
        said.append(
            f"the whole took {_time(wall)} in {sittings}, {preparing} of it before the first cell, "
            f"with {listed([count(n, 'worker') for n in workers])}"
        )
    if told:
        cells = sum(map(_whole, told))
        parts = [f"{_time(_sum(told, key))} {what}" for key, what in PARTS.items()]
        rest = cells - sum(_sum(told, key) for key in PARTS)
        parts.append(f"{_time(rest)} in saving, logging and the like")
        which = "the cells" if len(told) == len(results.runs) else f"{count(len(told), 'cell')}"
        said.append(f"{which} took {_time(cells)} together: {listed(parts)}")
        if results.sessions and len(told) == sum(run.ended for run in results.runs):
            had = sum(session.seconds * session.workers for session in results.sessions)
            said.append(f"workers were idle for {_time(had - cells)}")
    timed = [run for run in results.runs if run.ended and known(run, "seconds")]
    if timed:
        longest = max(timed, key=_whole)
        said.append(
            f"the longest cell, {longest.arm}, lr {longest.lr:g}, seed {longest.seed}, "
            f"took {_time(_whole(longest))}"
        )
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _whole(run: Run) -> float:
    """Return a run's seconds from when it was taken up, or from its loop's begin if older."""
    starting = run.figure("starting_seconds")
    return run.figure("seconds") + (starting if math.isfinite(starting) else 0.0)


def _sum(runs: list[Run], key: str) -> float:
    return sum(run.figure(key) for run in runs)


def _time(seconds: float) -> str:
    return f"{max(seconds, 0.0):.1f} s" if seconds < 60 else duration(seconds)
