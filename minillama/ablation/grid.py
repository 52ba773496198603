"""Expands an ablation's config into its cells: arms × axes × learning rates × seeds.

base ──overrides──▶ ──the arm's──▶ ──one value of each axis──▶ ──lr, seed, folder──▶ Cell
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    "group": "the grid",
    "arm": "the grid",
}
"""Fields of a run that an arm may not set, and what sets them instead."""

_LONGEST_FOLDER_NAME = 100


class Place(NamedTuple):
    """The place of a cell in the grid; ``arm`` is the name of an :class:`Arm`."""

    arm: str
    lr: float
    seed: int


@dataclass(frozen=True)
class Arm:
    """One arm, or one arm at one value of each axis.

    Args:
        name: its name in tables: that of the config and a suffix for each axis.
        baseline: the name of the arm it is compared with: the baseline at the same axis values.
        overrides: of the base, by dotted name.
        lrs: its learning rates, in the order of the config.
        config_arm: its name in the config.
        point: the label of its value on each axis, by the axis's short name.
    """

    name: str
    baseline: str
    overrides: Mapping[str, Any]
    lrs: tuple[float, ...]
    config_arm: str
    point: Mapping[str, str]


@dataclass(frozen=True)
class Cell:
    """One run of the grid; ``config`` is complete and contains the run folder."""

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
        """Number of optimizer steps of the run."""
        return self.config.train.steps

    @property
    def tokens(self) -> int:
        """Number of tokens that the run trains on."""
        return self.steps * self.config.train.batch_size * self.config.data.seq_len


def places(config: AblationConfig) -> list[Place]:
    """Return the place of every cell of the grid in the order arm, learning rate, seed."""
    return [
        Place(arm.name, lr, seed) for arm in arms(config) for lr in arm.lrs for seed in config.seeds
    ]


def cell_folders(places: Iterable[Place], arms: Iterable[str] = ()) -> dict[Place, Path]:
    """Return the folder of each cell, relative to the ablation's.

    Args:
        places: of the cells.
        arms: names of all arms of the ablation, if ``places`` are not those of the whole grid.
    """
    places = list(places)
    names = dict.fromkeys([*arms, *(place.arm for place in places)])
    arm_folders = _arm_folders(list(names))
    return {
        place: Path("cells") / arm_folders[place.arm] / f"lr-{place.lr:g}" / f"seed-{place.seed}"
        for place in places
    }


def _arm_folders(arms: Sequence[str]) -> dict[str, str]:
    """Return a folder name for each arm: its own name if it is short, safe and unique.

    Otherwise the start of the name and a hash of it.  Names that differ only in case are not unique
    on every file system.
    """
    folders: dict[str, str] = {}
    used: set[str] = set()
    for arm in arms:
        folder = re.sub(r"[^A-Za-z0-9._=+-]+", "-", arm)[:_LONGEST_FOLDER_NAME].rstrip(".")
        if folder != arm or folder.lower() in used:
            folder = f"{folder[:60]}-{hashlib.sha256(arm.encode()).hexdigest()[:12]}"
        used.add(folder.lower())
        folders[arm] = folder
    return folders


def arms(config: AblationConfig) -> list[Arm]:
    """Return every arm at every combination of axis values, in the order of the config."""
    leaves = [name.rpartition(".")[2] for name in config.axes]
    shorts = [
        leaf if leaves.count(leaf) == 1 else name
        for leaf, name in zip(leaves, config.axes, strict=True)
    ]
    out = []
    for name, overrides in config.arms.items():
        for values in itertools.product(*config.axes.values()):
            point = dict(zip(config.axes, values, strict=True))
            labels = {short: _label(value) for short, value in zip(shorts, values, strict=True)}
            suffix = "".join(f"+{short}={label}" for short, label in labels.items())
            merged = flatten(overrides) | flatten(point)
            out.append(
                Arm(name + suffix, config.baseline + suffix, merged, tuple(config.lr), name, labels)
            )
    return out


def cells(config: AblationConfig, at: Sequence[Place] | None = None) -> list[Cell]:
    """Return the cells at the places ``at``, in the order arm, learning rate, seed.

    ``at`` may lie outside the grid, with the arms of the config; default: the whole grid.

    Raises:
        ConfigError: lists every error of every arm, each under ``arms.NAME: ``; errors of the base
            itself are listed once, under ``base: ``.
    """
    base = read_yaml(config.base) if isinstance(config.base, str) else config.base
    base = override(without_derived(base), flatten(config.overrides), OWNED_BY_KIND)
    base = override(base, {"optim.lr": config.lr[0], "train.seed": config.seeds[0]}, {})
    base.pop("out_dir", None)
    base_errors = _checked(base, "base")[1]
    errors: dict[str, FieldError] = {}
    out: list[Cell] = []
    grid_arms = arms(config)
    names = [arm.name for arm in grid_arms]
    root = Path(config.out_dir)
    folders = cell_folders(places(config) if at is None else at, names)
    for arm in grid_arms:
        run, found = None, _forbidden(arm)
        if names.count(arm.name) > 1:
            found.append(FieldError("", None, "two values of an axis give this arm the same name"))
        try:
            run, more = _checked(override(base, arm.overrides, OWNED_BY_KIND), f"arms.{arm.name}")
            found += more
        except ConfigError as error:  # an override that does not fit the config's structure
            found.append(FieldError("", None, str(error)))
        for found_error in found:
            where = "base" if found_error in base_errors else f"arms.{arm.name}"
            path, value, rule = found_error.path, found_error.value, found_error.rule
            named = (
                FieldError(f"{where}: {path}", value, rule)
                if path
                else FieldError("", None, f"{where}: {rule.removeprefix(where + ': ')}")
            )
            errors.setdefault(str(named), named)
        if run is not None:
            out += [
                _cell(place, run, config, root / folder)
                for place, folder in folders.items()
                if place.arm == arm.name
            ]
    if errors:
        raise ConfigError.of(f"ablation {config.name}", list(errors.values()))
    return out


def _cell(place: Place, run: RunConfig, config: AblationConfig, folder: Path) -> Cell:
    on_nonfinite = "stop" if config.runner.stop_hopeless else "run_on"
    if run.train.on_nonfinite == "skip":  # one non-finite value does not decide the cell's fate
        on_nonfinite = "skip"
    train = {"seed": place.seed, "on_nonfinite": on_nonfinite}
    update = {
        "name": "-".join(folder.parts[-3:]),
        "out_dir": str(folder),
        "group": config.name,
        "arm": place.arm,
        "optim": run.optim.model_copy(update={"lr": place.lr}),
        "train": run.train.model_copy(update=train),
    }
    return Cell(*place, run.model_copy(update=update))


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
