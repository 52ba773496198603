"""How many seeds the comparisons of an ablation need, from the cells that have ended.

    folder ──read_results──▶ paired differences at the best rates ──power──▶ seeds, time

Needs the ``report`` extra.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from minillama.ablation.analysis import ArmResult, Comparison, analyse_arms, compare_arms
from minillama.ablation.power import (
    difference_power,
    equivalence_power,
    sd_interval,
    seeds_needed,
)
from minillama.ablation.results import Results, read_results
from minillama.config.ablation import AblationConfig
from minillama.errors import ConfigError
from minillama.formatting import (
    MISSING,
    format_duration,
    format_number,
    join_words,
    pluralize,
    text_table,
)

POWERS = (0.8, 0.9)
"""The powers for which seeds are counted."""


@dataclass(frozen=True)
class SeedPlan:
    """What one comparison of an arm with its baseline needs.

    ``sd`` is the standard deviation of the ``n_pairs`` differences at the arms' best rates, in nats
    per token, and ``sd_low`` to ``sd_high`` its 95 % interval.  ``same``, ``nearly_same`` and
    ``different`` are the seeds needed for each of ``POWERS``: to show by TOST that the two are
    equal within the margin where the true difference is 0, or a quarter of the margin; and to find
    a difference as large as the margin by a t test.  None: more than can be counted.
    ``seconds`` is the time of one more pair of cells here, all workers busy; NaN if not recorded.
    """

    arm: str
    baseline: str
    n_pairs: int
    sd: float
    sd_low: float
    sd_high: float
    same: tuple[int | None, ...]
    nearly_same: tuple[int | None, ...]
    different: tuple[int | None, ...]
    seconds: float


def read_seed_plan(config: AblationConfig) -> str:
    """Return :func:`describe_seed_plan` of the cells in an ablation's folder, with its margin.

    Raises:
        ConfigError: the ablation has not been started.
        RunFolderError: a file of a run is damaged.
    """
    folder = Path(config.out_dir)
    if not (folder / "ablation.yaml").is_file():
        raise ConfigError(
            f"{folder} has no cells to learn from; run the ablation first, a few seeds are enough"
        )
    return describe_seed_plan(read_results(folder), config.margin)


def plan_seeds(results: Results, margin: float | None = None) -> list[SeedPlan]:
    """Return the plan of each comparison with two pairs or more; the grid may be unfinished.

    Args:
        results: of a finished or a pilot grid.
        margin: of equivalence, in nats per token; default: the ablation's own.
    """
    margin = results.margin if margin is None else margin
    arms = analyse_arms(results)
    named = {arm.name: arm for arm in arms}
    workers = max(1, results.sessions[-1].workers) if results.sessions else 1
    return [
        _plan(c, margin, (_cell_seconds(named[c.arm]) + _cell_seconds(named[c.baseline])) / workers)
        for c in compare_arms(arms, margin)
        if len(c.seeds) > 1
    ]


def _plan(c: Comparison, margin: float, seconds: float) -> SeedPlan:
    sd = float(np.std(c.differences, ddof=1))
    low, high = sd_interval(sd, len(c.differences))
    same = partial(equivalence_power, sd=sd, margin=margin)
    return SeedPlan(
        arm=c.arm,
        baseline=c.baseline,
        n_pairs=len(c.differences),
        sd=sd,
        sd_low=low,
        sd_high=high,
        same=tuple(seeds_needed(same, power) for power in POWERS),
        nearly_same=tuple(
            seeds_needed(partial(same, difference=margin / 4), power) for power in POWERS
        ),
        different=tuple(
            seeds_needed(partial(difference_power, sd=sd, difference=margin), power)
            for power in POWERS
        ),
        seconds=seconds,
    )


def _cell_seconds(arm: ArmResult) -> float:
    """Return the mean seconds of a cell at the arm's best rate, its start included if recorded."""
    starting = arm.mean_at_best("starting_seconds")
    return arm.mean_at_best("seconds") + (starting if math.isfinite(starting) else 0.0)


def describe_seed_plan(results: Results, margin: float | None = None) -> str:
    """Return the plan as text: a table of the comparisons, and what its columns mean."""
    margin = results.margin if margin is None else margin
    plans = plan_seeds(results, margin)
    planned = {plan.arm for plan in plans}
    others = [arm for arm in results.arms if arm not in planned and results.baseline_of[arm] != arm]
    few = (
        f"too few pairs for {join_words(others)}: at least two seeds must have ended for an arm "
        "and its baseline at their best learning rates"
    )
    if not plans:
        return few if others else "one arm: there is no comparison to plan"
    head = "same, true difference 0", f"same, true {margin / 4:g}", f"a difference of {margin:g}"
    at = " / ".join(f"{power:.0%}" for power in POWERS)
    rows = [["comparison", "pairs", "sd (95 % interval)", *(f"{name}: {at}" for name in head)]]
    for plan in plans:
        spread = f"{format_number(plan.sd, 4)} ({plan.sd_low:.4f} to {plan.sd_high:.4f})"
        rows.append(
            [f"{plan.arm} − {plan.baseline}", str(plan.n_pairs), spread]
            + [_seeds(needed, plan) for needed in (plan.same, plan.nearly_same, plan.different)]
        )
    lines = [
        f"Seeds needed for each comparison of {results.name}, each arm at its best learning rate, "
        f"margin ±{margin:g} nats per token, and the time they take here:",
        "",
        text_table(rows),
        "",
        "same: TOST at .05 shows the two equal within the margin; a difference: the paired t test "
        "at .05 finds it.",
        "The seeds grow with sd², so few pairs leave them vague; take seeds that did not choose "
        "the rates.",
    ]
    workers = results.sessions[-1].workers if results.sessions else 0
    if workers:
        on = pluralize(workers, "worker")
        lines.append(f"Times: of an arm's and its baseline's cells, on {on}.")
    return "\n".join([*lines, *([few] if others else [])])


def _seeds(needed: Sequence[int | None], plan: SeedPlan) -> str:
    parts = []
    for n in needed:
        if n is None:
            parts.append("more than 10,000")
        elif math.isfinite(plan.seconds):
            parts.append(f"{n} ({format_duration(n * plan.seconds)})")
        else:
            parts.append(f"{n}")
    return " / ".join(parts) or MISSING
