"""The plan of an ablation's second stage: chosen rates and fresh seeds, written before it begins.

    the grid's cells ──choose──▶ stages.json ──cells──▶ looks at the fresh seeds ──▶ the verdict

Once written, the plan decides: a killed ablation continues it, and results of the fresh seeds
cannot change which rates they are compared at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minillama.ablation.grid import Cell, cells
from minillama.config.ablation import AblationConfig
from minillama.config.stages import FIRST_FRESH_SEED, CompareStage
from minillama.errors import ConfigError, RunFolderError
from minillama.files import explain_write_errors, write_atomic

PLAN_FILE = "stages.json"


@dataclass(frozen=True)
class StagePlan:
    """What the second stage runs.

    ``chosen`` is each arm's learning rate, the best over the seeds ``chosen_on``, and ``lrs`` the
    rates that are run for it, ascending.  ``seeds`` are fresh; they are looked at after each number
    in ``looks``.  ``stage`` holds the fields of the config that made the plan, ``time`` (ISO 8601,
    UTC) says when.
    """

    time: str
    chosen_on: tuple[int, ...]
    chosen: Mapping[str, float]
    lrs: Mapping[str, tuple[float, ...]]
    seeds: tuple[int, ...]
    looks: tuple[int, ...]
    stage: Mapping[str, Any]

    def places(self, n_seeds: int | None = None) -> list[tuple[str, float, int]]:
        """Return the (arm, learning rate, seed) of the first ``n_seeds`` fresh seeds, or of all."""
        return [
            (arm, lr, seed)
            for arm, lrs in self.lrs.items()
            for lr in lrs
            for seed in self.seeds[:n_seeds]
        ]


def make_plan(
    config: AblationConfig, best: Mapping[str, float], lrs: Mapping[str, Sequence[float]], time: str
) -> StagePlan:
    """Plan the second stage of ``config``.

    Args:
        config: with stages.
        best: each arm's best learning rate on the grid's seeds.
        lrs: the rates of each arm's grid, ascending.
        time: now.
    """
    assert config.stages is not None
    stage, looks = config.stages[1], config.stages[1].planned_looks()
    chosen_rates = {}
    for arm, lr in best.items():
        at, reach = lrs[arm].index(lr), 1 if stage.rates == "best_and_neighbours" else 0
        chosen_rates[arm] = tuple(lrs[arm][max(0, at - reach) : at + reach + 1])
    return StagePlan(
        time=time,
        chosen_on=tuple(config.seeds),
        chosen=dict(best),
        lrs=chosen_rates,
        seeds=fresh_seeds(config.seeds, looks[-1]),
        looks=looks,
        stage=stage.model_dump(mode="json"),
    )


def fresh_seeds(used: Sequence[int], n: int) -> tuple[int, ...]:
    """Return ``n`` seeds that the grid has not used: 100, 101, …, or above its highest."""
    first = max(FIRST_FRESH_SEED, *(seed + 1 for seed in used))
    return tuple(range(first, first + n))


def write_plan(folder: Path, plan: StagePlan) -> None:
    """Write the plan into the ablation's folder, whole or not at all.

    Raises:
        RunFolderError: the file cannot be written.
    """
    with explain_write_errors(folder):
        write_atomic(folder / PLAN_FILE, json.dumps(asdict(plan), indent=2) + "\n")


def read_plan(folder: Path) -> StagePlan | None:
    """Return the plan in the ablation's folder; None before the second stage.

    Raises:
        RunFolderError: the file is damaged.
    """
    path = folder / PLAN_FILE
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        lists = {key: tuple(raw[key]) for key in ("chosen_on", "seeds", "looks")}
        lrs = {str(arm): tuple(map(float, values)) for arm, values in raw["lrs"].items()}
        chosen = {str(arm): float(lr) for arm, lr in raw["chosen"].items()}
        return StagePlan(**{**raw, **lists, "lrs": lrs, "chosen": chosen})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path} is damaged: {error}; delete it and the cells of the second stage, "
            "or restore it"
        ) from None


def refuse_changed_plan(folder: Path, plan: StagePlan, config: AblationConfig) -> None:
    """Make sure that the config still says what the plan was made from.

    Raises:
        ConfigError: it does not, so that the choice could be made again with the results known.
    """
    assert config.stages is not None
    changed = []
    if dict(plan.stage) != config.stages[1].model_dump(mode="json"):
        changed.append("stages")
    if list(plan.chosen_on) != list(config.seeds):
        changed.append("the first stage's seeds")
    arms = {cell.arm for cell in cells(config)}
    if arms != plan.chosen.keys():
        changed.append("the arms")
    if any(lr not in config.lr for lrs in plan.lrs.values() for lr in lrs):
        changed.append("the learning rates")
    if changed:
        raise ConfigError(
            f"{folder / PLAN_FILE} holds the plan of the second stage of another config "
            f"({', '.join(changed)} changed); a plan is not changed once results may be known: "
            "restore the config, or set another out_dir"
        )


def second_stage_cells(
    config: AblationConfig, plan: StagePlan, n_seeds: int | None = None
) -> list[Cell]:
    """Return the cells of the first ``n_seeds`` fresh seeds, or of all, in the order of places."""
    wide = config.model_copy(update={"seeds": list(plan.seeds[:n_seeds])})
    wanted = set(plan.places(n_seeds))
    return [cell for cell in cells(wide) if (cell.arm, cell.lr, cell.seed) in wanted]


def most_cells(config: AblationConfig) -> list[Cell]:
    """Return as many cells as the second stage may have, before its rates are chosen.

    Their rates are placeholders, the first of the grid.
    """
    assert config.stages is not None
    stage: CompareStage = config.stages[1]
    n_lrs = min(len(config.lr), 3 if stage.rates == "best_and_neighbours" else 1)
    seeds = fresh_seeds(config.seeds, stage.planned_looks()[-1])
    wide = config.model_copy(update={"seeds": list(seeds)})
    return [cell for cell in cells(wide) if cell.lr in config.lr[:n_lrs]]
