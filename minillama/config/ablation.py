"""The config of an ablation: a grid of runs, and the workers that train them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from minillama.config.fields import (
    Name,
    NonNegative,
    NonNegativeFloat,
    PathText,
    Positive,
    PositiveFloat,
    expand_home,
)
from minillama.config.hypotheses import Hypothesis
from minillama.config.loading import (
    Section,
    check,
    derived,
    flatten,
    override,
    parse_overrides,
    read_yaml,
    refuse,
    text_fields,
)
from minillama.config.run import OWNED_BY_KIND, RunConfig, without_derived
from minillama.config.shipped import find_config
from minillama.config.stages import ComparisonStage, GridStage
from minillama.errors import ConfigError, FieldError
from minillama.registry import unknown_name


class RunnerConfig(Section):
    """The workers that train the cells of an ablation."""

    kind: Literal["local", "ray"] = Field(
        "local",
        description="local: processes of this machine; ray: tasks on a Ray cluster, whose nodes "
        "need minillama, and the text under the same path, and return all but checkpoints",
    )
    workers: Positive | None = Field(
        None,
        description="cells that train at once; default: one per core, or as many as fit on the "
        "cluster",
    )
    threads: Positive | None = Field(
        None, description="of each worker; default: cores / workers, 1 under ray"
    )
    address: str = Field(
        "auto", description="ray: of the cluster; auto: the one here; local: one is started here"
    )
    gpus: NonNegativeFloat | None = Field(
        None, description="ray: GPUs of a cell, or a share of one; default: 1 on device cuda, or 0"
    )
    retries: NonNegative = Field(3, description="ray: restarts of a cell whose node was lost")
    stop_hopeless: bool = Field(
        True,
        description="end a cell at its first value that is not finite: it has diverged for "
        "certain, so that no measure changes",
    )

    @model_validator(mode="after")
    def _check(self) -> RunnerConfig:
        if self.kind == "local":
            rule = "is of kind: ray alone; leave it out, or set kind: ray"
            defaults = type(self).model_fields
            refuse(
                [
                    FieldError(name, getattr(self, name), rule, "kind")
                    for name in ("address", "gpus", "retries")
                    if getattr(self, name) != defaults[name].default
                ]
            )
        return self


class AblationConfig(Section):
    """A grid of runs: arms × learning rates × seeds."""

    name: Name = "ablation"
    out_dir: PathText = derived(
        lambda ablation: f"runs/{ablation['name']}", "the ablation's folder; default: runs/NAME"
    )
    base: str | dict[str, Any] = Field(
        description="the run config that every cell starts from: a mapping, or a file, relative to "
        "this one"
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="overrides of the base for every cell, by dotted name"
    )
    arms: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)] = Field(
        description="each arm's overrides, by dotted name"
    )
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="dotted names and their values; every arm is run with every combination",
    )
    baseline: str = Field(description="the arm that the others are compared with")
    lr: Annotated[list[PositiveFloat], Field(min_length=1)]
    seeds: list[NonNegative] = Field([0], min_length=1)
    stages: tuple[GridStage, ComparisonStage] | None = Field(
        None,
        description="two: the whole grid, {seeds: [0, 1, 2]}, then each arm at its best rate on "
        "fresh seeds, {seeds: 24, rates: best_and_neighbours}; takes the place of seeds",
    )
    margin: PositiveFloat = Field(
        0.02, description="nats within which two losses count as the same (equivalence test)"
    )
    hypotheses: list[Hypothesis] = Field(
        default_factory=list,
        description="what is expected, recorded before the first cell; the report tells it apart "
        "from what was found afterwards",
    )
    runner: RunnerConfig = RunnerConfig()

    @model_validator(mode="before")
    @classmethod
    def _first_stage(cls, raw: Any) -> Any:
        """Take ``seeds`` from the first stage; if both are set, they are compared afterwards."""
        stages = raw.get("stages") if isinstance(raw, dict) else None
        if isinstance(stages, list) and stages and isinstance(stages[0], dict):
            return {"seeds": stages[0].get("seeds"), **raw}
        return raw

    @field_validator("arms", mode="before")
    @classmethod
    def _empty_arm(cls, arms: Any) -> Any:
        if not isinstance(arms, dict):
            return arms
        return {name: {} if arm is None else arm for name, arm in arms.items()}

    @model_validator(mode="after")
    def _check(self) -> AblationConfig:
        errors = []
        if self.baseline not in self.arms:
            errors.append(
                FieldError("baseline", self.baseline, unknown_name("arm", self.baseline, self.arms))
            )
        lists: dict[str, list[Any]] = {"lr": self.lr, "seeds": self.seeds}
        lists |= {f"axes.{name}": values for name, values in self.axes.items()}
        for path, values in lists.items():
            names = [f"{value:g}" if path == "lr" else repr(value) for value in values]
            if len(set(names)) < len(names):
                errors.append(FieldError(path, values, "names a value twice"))
        claimed = [each.name for each in self.hypotheses]
        if len(set(claimed)) < len(claimed):
            errors.append(FieldError("hypotheses", claimed, "names one twice"))
        if self.stages and self.stages[0].seeds != self.seeds:
            first = self.stages[0].seeds
            rule = f"differs from the first stage's {first}; set both alike, or leave it out"
            errors.append(FieldError("seeds", self.seeds, rule))
        refuse(errors)
        return self


def load_ablation(path: str | Path, overrides: Iterable[str] = ()) -> AblationConfig:
    """Read an ablation config; an override of ``base.`` changes the run config it starts from.

    In the result ``base`` is always a mapping, so that no other file is needed.

    Raises:
        ConfigError: the file, an override or any entry of the grid itself is wrong.  The runs are
            checked by :func:`minillama.ablation.grid.cells`.
    """
    path = find_config(path)
    raw = read_yaml(path)
    if not {"arms", "base"} & raw.keys() and {"model", "train", "optim"} & raw.keys():
        raise ConfigError(f"{path} is the config of a run; train it: minillama train {path}")
    if isinstance(raw.get("base"), str):
        base = path.parent / expand_home(raw["base"])
        raw = {**raw, "base": without_derived(read_yaml(base))}
    owned = {f"base.{section}": keys for section, keys in OWNED_BY_KIND.items()}
    # The file's overrides are applied first, so that `base.` on the command line takes precedence.
    text = text_fields(AblationConfig)
    text |= {f"base.{name}": kind for name, kind in text_fields(RunConfig).items()}
    raw = _folded(override(_folded(raw), parse_overrides(overrides, text), owned))
    return check(AblationConfig, raw, str(path))


def _folded(raw: dict[str, Any]) -> dict[str, Any]:
    """Apply the overrides of every cell to the base."""
    base, overrides = raw.get("base"), raw.get("overrides")
    if not isinstance(base, dict) or not isinstance(overrides, dict):
        return raw
    return {**raw, "base": override(base, flatten(overrides), OWNED_BY_KIND), "overrides": {}}
