"""The plan of the second stage: chosen rates and fresh seeds, in a file written before it begins.

Once written, the plan decides: an ablation that was killed continues it, and no result on the
fresh seeds can change the rates at which they are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from minillama.ablation.grid import Place, arms
from minillama.config.ablation import AblationConfig
from minillama.errors import ConfigError, RunFolderError
from minillama.files import explain_write_errors, write_atomic

PLAN_FILE = "stages.json"

FIRST_FRESH_SEED = 100
"""Fresh seeds are counted from here, or from the one after the grid's highest."""


@dataclass(frozen=True)
class StagePlan:
    """What the second stage runs and when it ends; rates are peak learning rates by arm.

    ``time`` (ISO 8601, UTC) says when it was made.  ``chosen`` are the rates of ``grid_rates`` with
    the lowest mean loss over ``grid_seeds``, and ``rates`` those to run.  ``looks`` are numbers of
    fresh ``seeds`` after which the stage may end, ``until`` what ends it: every interval that
    narrow (nats per token), or every comparison decided; None for a fixed number of seeds.
    ``n_run`` is the number of seeds with which it has ended; None before.
    """

    time: str
    grid_seeds: tuple[int, ...]
    grid_rates: Mapping[str, tuple[float, ...]]
    chosen: Mapping[str, float]
    rates: Mapping[str, tuple[float, ...]]
    seeds: tuple[int, ...]
    looks: tuple[int, ...]
    until: float | Literal["decided"] | None
    n_run: int | None = None

    def places(self, n_seeds: int | None = None) -> list[Place]:
        """Return the cells of the first ``n_seeds`` fresh seeds; default: of all it will run."""
        seeds = self.seeds[: n_seeds or self.n_run]
        return [Place(a, lr, s) for a, lrs in self.rates.items() for lr in lrs for s in seeds]


def make_plan(config: AblationConfig, chosen: Mapping[str, float], time: str) -> StagePlan:
    """Plan the second stage of ``config``, which has stages.

    Args:
        config: of the ablation.
        chosen: the best learning rate of each arm's grid.
        time: now.
    """
    assert config.stages is not None
    stage = config.stages[1]
    looks = stage.planned_looks()
    grid_rates = {arm.name: tuple(sorted(arm.lrs)) for arm in arms(config)}
    first = max(FIRST_FRESH_SEED, max(config.seeds) + 1)
    reach = 1 if stage.rates == "best_and_neighbours" else 0
    return StagePlan(
        time=time,
        grid_seeds=tuple(config.seeds),
        grid_rates=grid_rates,
        chosen=dict(chosen),
        rates={arm: _around(grid_rates[arm], lr, reach) for arm, lr in chosen.items()},
        seeds=tuple(range(first, first + looks[-1])),
        looks=looks,
        until=stage.until,
    )


def largest_plan(config: AblationConfig) -> StagePlan:
    """Return a plan with as many cells as the second stage may have, its rates placeholders."""
    inner = {arm.name: sorted(arm.lrs)[len(arm.lrs) // 2] for arm in arms(config)}
    return make_plan(config, inner, "")


def _around(rates: Sequence[float], lr: float, reach: int) -> tuple[float, ...]:
    at = rates.index(lr)
    return tuple(rates[max(0, at - reach) : at + reach + 1])


def write_plan(folder: Path, plan: StagePlan) -> None:
    """Write the plan into the ablation's folder.

    Raises:
        RunFolderError: the file cannot be written.
    """
    with explain_write_errors(folder):
        write_atomic(folder / PLAN_FILE, json.dumps(asdict(plan), indent=2) + "\n")


def read_plan(folder: Path, config: AblationConfig) -> StagePlan | None:
    """Return the plan in the ablation's folder; None without stages or before the second one.

    Raises:
        ConfigError: the config has changed since the plan was made.
        RunFolderError: the file is damaged.
    """
    path = folder / PLAN_FILE
    if config.stages is None or not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        plan = StagePlan(
            time=str(raw["time"]),
            grid_seeds=tuple(raw["grid_seeds"]),
            grid_rates={arm: tuple(lrs) for arm, lrs in raw["grid_rates"].items()},
            chosen={arm: float(lr) for arm, lr in raw["chosen"].items()},
            rates={arm: tuple(lrs) for arm, lrs in raw["rates"].items()},
            seeds=tuple(raw["seeds"]),
            looks=tuple(raw["looks"]),
            until=raw["until"],
            n_run=raw["n_run"],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path} is damaged: {error!r}; restore it from a copy") from None
    _refuse_changed(path, plan, config)
    return plan


def _refuse_changed(path: Path, plan: StagePlan, config: AblationConfig) -> None:
    """Make sure that ``config`` still makes the plan, given the rates that were chosen."""
    grid_rates = {arm.name: tuple(sorted(arm.lrs)) for arm in arms(config)}
    changed = ["grid_rates"]
    if grid_rates == plan.grid_rates:
        again = replace(make_plan(config, plan.chosen, plan.time), n_run=plan.n_run)
        names = [field.name for field in fields(plan)]
        changed = [name for name in names if getattr(plan, name) != getattr(again, name)]
    if changed:
        raise ConfigError(
            f"{path} is the plan of the second stage of another config ({', '.join(changed)} "
            "differ); a plan does not change once its results may be known: restore the config, "
            "or set another out_dir"
        )
