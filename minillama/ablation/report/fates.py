"""How runs ended, how far from the line for "collapsed", and how counts change with that line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from minillama.ablation.analysis import ArmResult
from minillama.ablation.failures import FAILED
from minillama.ablation.results import Run

LINE_SHIFTS = (-0.1, -0.05, 0.0, 0.05, 0.1)
"""Nats per token by which the line is moved, to show whether a count depends on its place."""


@dataclass(frozen=True)
class FateRow:
    """The ended runs of one arm at one learning rate.

    ``distances`` are the lowest and the highest loss, in nats per token above the line (below zero:
    under it), None if all diverged.  ``failed`` counts the failed runs, ``failed_at`` those with
    the line moved by each of ``LINE_SHIFTS``, and ``low`` to ``high`` is Wilson's 95% interval of
    the rate of failure.
    """

    arm: str
    lr: float
    n: int
    fates: Counter[str]
    distances: tuple[float, float] | None
    failed: int
    failed_at: tuple[int, ...]
    low: float
    high: float

    @property
    def is_notable(self) -> bool:
        """Whether a run failed, was undertrained, or would have failed with the line moved."""
        return any(self.failed_at) or set(self.fates) != {"ok"}


def failed_with_line_moved(run: Run, shift: float) -> bool:
    """Return whether a run counts as failed if the line for "collapsed" were ``shift`` higher.

    A run above the line does not count while its loss was still falling; old summaries do not
    record that.
    """
    if run.fate == "diverged":
        return True
    return (
        run.has_loss
        and run.distance_to_collapse >= shift
        and not run.summary.get("still_falling", False)
    )


def fate_rows(arms: Sequence[ArmResult]) -> list[FateRow]:
    """Return a row for each arm and learning rate of the grid at which runs ended."""
    return [
        _row(arm.name, lr, [run for run in arm.grid_runs if run.lr == lr and run.ended])
        for arm in arms
        for lr in sorted({run.lr for run in arm.grid_runs if run.ended})
    ]


def failed_in_all(rows: Sequence[FateRow]) -> tuple[int, ...]:
    """Return the number of failed runs of all rows together for each of ``LINE_SHIFTS``."""
    return tuple(sum(row.failed_at[i] for row in rows) for i in range(len(LINE_SHIFTS)))


def _row(arm: str, lr: float, runs: Sequence[Run]) -> FateRow:
    distances = [run.distance_to_collapse for run in runs if run.has_loss]
    failed = sum(run.fate in FAILED for run in runs)
    rate = stats.binomtest(failed, len(runs)).proportion_ci(0.95, method="wilson")
    return FateRow(
        arm=arm,
        lr=lr,
        n=len(runs),
        fates=Counter(run.fate for run in runs),
        distances=(min(distances), max(distances)) if distances else None,
        failed=failed,
        failed_at=tuple(
            sum(failed_with_line_moved(run, shift) for run in runs) for shift in LINE_SHIFTS
        ),
        low=float(rate.low),
        high=float(rate.high),
    )
