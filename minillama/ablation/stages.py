"""Runs the stages of an ablation one after the other.

the grid ──choose each arm's rate──▶ stages.json ──▶ fresh seeds ──look──▶ more, or the end
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from minillama.ablation.grid import Cell, cells
from minillama.ablation.stage_plan import StagePlan, largest_plan, make_plan, read_plan, write_plan
from minillama.config.ablation import AblationConfig

_log = logging.getLogger("minillama")


@dataclass(frozen=True)
class Batch:
    """``cells`` that must end before what follows is decided, of all ``stage_cells``."""

    name: str
    cells: Sequence[Cell]
    stage_cells: Sequence[Cell]


def batches(config: AblationConfig, grid: Sequence[Cell]) -> Iterator[Batch]:
    """Yield the grid, then, once it has ended, the seeds of the second stage from look to look.

    The plan is in the ablation's folder before the first cell of the second stage is yielded.

    Raises:
        ConfigError, RunFolderError: as :func:`read_plan` and :func:`write_plan`.
    """
    yield Batch(config.name, grid, grid)
    if config.stages is None:
        return
    folder = Path(config.out_dir)
    plan = read_plan(folder, config)
    if plan is None:
        plan = make_plan(config, _best_rates(folder), datetime.now(UTC).isoformat("T", "seconds"))
        write_plan(folder, plan)
        _log.info("%s: the rates are chosen, and compared on fresh seeds", folder)
    stage_cells = cells(config, plan.places())
    for n_seeds in plan.looks:
        seeds = plan.seeds[:n_seeds]
        now = [cell for cell in stage_cells if cell.seed in seeds]
        yield Batch(f"{config.name}, fresh seeds", now, stage_cells)
        if n_seeds == plan.n_run or (plan.n_run is None and _is_over(folder, plan, n_seeds)):
            break
    write_plan(folder, replace(plan, n_run=n_seeds))


def planned_cells(config: AblationConfig) -> list[Cell]:
    """Return the cells of the second stage that are known so far.

    Raises:
        ConfigError, RunFolderError: as :func:`read_plan`.
    """
    plan = read_plan(Path(config.out_dir), config)
    return cells(config, plan.places()) if plan else []


def most_cells(config: AblationConfig) -> list[Cell]:
    """Return as many cells as a second stage without a plan may have, their rates placeholders."""
    return cells(config, largest_plan(config).places()) if config.stages else []


def _best_rates(folder: Path) -> dict[str, float]:
    # scipy comes with the extra `report`, which an ablation without stages does not need.
    from minillama.ablation.analysis import analyse_arms
    from minillama.ablation.results import read_results

    return {arm.name: arm.best_lr for arm in analyse_arms(read_results(folder))}


def _is_over(folder: Path, plan: StagePlan, n_seeds: int) -> bool:
    """Return whether the stage ends at the look after ``n_seeds``, by its plan's rule."""
    if n_seeds == plan.looks[-1]:
        return True
    from minillama.ablation.analysis import analyse_arms, compare_arms
    from minillama.ablation.results import read_results
    from minillama.ablation.statistics import ALPHA

    results = read_results(folder)
    comparisons = compare_arms(analyse_arms(results), results.margin)
    if plan.until == "decided":
        return all(min(c.p_holm, c.same_holm) < ALPHA for c in comparisons)
    assert plan.until is not None
    return all(c.t95.high - c.t95.low <= plan.until for c in comparisons)
