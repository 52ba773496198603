"""From an ablation's config to its cells: arms × axes × learning rates × seeds, each a RunConfig.

base ──overrides──▶ ──an arm's──▶ ──a value of each axis──▶ ──lr, seed, folder──▶ Cell
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillama.config import RunConfig
from minillama.config.ablation import AblationConfig
from minillama.config.loading import flatten, override, read_yaml
from minillama.config.run import OWNED_BY_KIND, parse_run, without_derived
from minillama.errors import ConfigError, FieldError
from minillama.training.assemble import assemble

SET_BY_GRID = {
    "optim.lr": "lr",
    "train.seed": "seeds",
    "train.on_nonfinite": "runner.stop_hopeless",
    "name": "the grid",
    "out_dir": "the grid",
}
"""Fields of a run that an arm may not set, and what sets them."""


@dataclass(frozen=True)
class Arm:
    """One arm, or one arm at one value of each axis.

    ``baseline`` names the arm it is compared with: the baseline at the same values of the axes.
    """

    name: str
    baseline: str
    overrides: Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run of the grid; ``config`` is checked, resolved and knows its folder."""

    arm: str
    lr: float
    seed: int
    config: RunConfig

    @property
    def folder(self) -> Path:
        """The cell's run folder."""
        return Path(self.config.out_dir)

    @property
    def steps(self) -> int:
        """Updates that the run makes."""
        return self.config.train.steps

    @property
    def tokens(self) -> int:
        """Tokens that the run trains on."""
        return self.steps * self.config.train.batch_size * self.config.data.seq_len


def cell_path(arm: str, lr: float, seed: int) -> Path:
    """Return a cell's folder, seen from its ablation's."""
    return Path("cells") / arm / f"lr-{lr:g}" / f"seed-{seed}"


def arms(config: AblationConfig) -> list[Arm]:
    """Return every arm at every combination of the axes, in the order of the config."""
    leaves = [name.rpartition(".")[2] for name in config.axes]
    shorts = [
        leaf if leaves.count(leaf) == 1 else name
        for leaf, name in zip(leaves, config.axes, strict=True)
    ]
    out = []
    for name, overrides in config.arms.items():
        for values in itertools.product(*config.axes.values()):
            point = dict(zip(config.axes, values, strict=True))
            suffix = "".join(
                f"+{short}={_label(value)}" for short, value in zip(shorts, values, strict=True)
            )
            merged = flatten(overrides) | flatten(point)
            out.append(Arm(name + suffix, config.baseline + suffix, merged))
    return out


def cells(config: AblationConfig) -> list[Cell]:
    """Return every cell of the grid in the order arm, learning rate, seed.

    Raises:
        ConfigError: with every fault of every arm, each under ``arms.NAME: ``; what is wrong with
            the base itself is named once, under ``base: ``.
    """
    base = read_yaml(config.base) if isinstance(config.base, str) else config.base
    base = override(without_derived(base), flatten(config.overrides), OWNED_BY_KIND)
    base = override(base, {"optim.lr": config.lr[0], "train.seed": config.seeds[0]}, {})
    base.pop("out_dir", None)
    base_faults = _checked(base, "base")[1]
    faults: dict[str, FieldError] = {}
    out: list[Cell] = []
    names = [arm.name for arm in arms(config)]
    root = Path(config.out_dir)
    for arm in arms(config):
        run, found = None, _forbidden(arm)
        if names.count(arm.name) > 1:
            found.append(FieldError("", None, "two values of an axis give this arm the same name"))
        try:
            run, more = _checked(override(base, arm.overrides, OWNED_BY_KIND), f"arms.{arm.name}")
            found += more
        except ConfigError as error:  # an override that leads nowhere
            found.append(FieldError("", None, str(error)))
        for fault in found:
            where = "base" if fault in base_faults else f"arms.{arm.name}"
            fault = (
                FieldError(f"{where}: {fault.path}", fault.value, fault.rule)
                if fault.path
                else FieldError("", None, f"{where}: {fault.rule.removeprefix(where + ': ')}")
            )
            faults.setdefault(str(fault), fault)
        if run is not None:
            out += _cells_of(arm.name, run, config, root)
    if faults:
        raise ConfigError.of(f"ablation {config.name}", list(faults.values()))
    return out


def _cells_of(arm: str, run: RunConfig, config: AblationConfig, root: Path) -> Iterator[Cell]:
    on_nonfinite = "stop" if config.runner.stop_hopeless else "run_on"
    if run.train.on_nonfinite == "skip":  # then no single value makes a cell hopeless
        on_nonfinite = "skip"
    for lr, seed in itertools.product(config.lr, config.seeds):
        cell = run.model_copy(
            update={
                "name": f"{arm}-lr-{lr:g}-seed-{seed}",
                "out_dir": str(root / cell_path(arm, lr, seed)),
                "optim": run.optim.model_copy(update={"lr": lr}),
                "train": run.train.model_copy(update={"seed": seed, "on_nonfinite": on_nonfinite}),
            }
        )
        yield Cell(arm, lr, seed, cell)


def _checked(raw: Mapping[str, Any], where: str) -> tuple[RunConfig | None, list[FieldError]]:
    try:
        run = assemble(parse_run(raw, where), where)
        parallel, rule = run.train.parallel, "a cell is trained by one process; leave it out"
        return run, [] if parallel == "none" else [FieldError("train.parallel", parallel, rule)]
    except ConfigError as error:
        return None, list(error.field_errors) or [FieldError("", None, str(error))]


def _forbidden(arm: Arm) -> list[FieldError]:
    return [
        FieldError(name, arm.overrides[name], f"is set by {by}; leave it out")
        for name, by in SET_BY_GRID.items()
        if name in arm.overrides
    ]


def _label(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", text).strip("-") or "none"
