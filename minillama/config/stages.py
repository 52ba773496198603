"""The stages of an ablation: choose each arm's learning rate, then compare on fresh seeds."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from minillama.config.fields import NonNegative, Positive, PositiveFloat
from minillama.config.loading import Section, refuse
from minillama.errors import FieldError


class GridStage(Section):
    """The first stage: the whole grid, which chooses each arm's learning rate."""

    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(
        description="seeds of every arm at every learning rate"
    )


class ComparisonStage(Section):
    """The second stage: each arm at its chosen rate, on seeds that did not choose it.

    The number of seeds is fixed (``seeds``), or it grows over ``looks`` ``until`` the intervals are
    narrow enough or every comparison is decided, to at most ``max_seeds``.
    """

    seeds: Positive | None = Field(
        None, description="how many fresh seeds (100, 101, …); or set until and max_seeds"
    )
    rates: Literal["best", "best_and_neighbours"] = Field(
        "best",
        description="the learning rates to run: each arm's best, or its neighbours in the grid as "
        "well, which show how much depends on the choice",
    )
    until: PositiveFloat | Literal["decided"] | None = Field(
        None,
        description="stop at the first look at which every 95% interval is no wider than this many "
        "nats per token, or (decided) every arm is shown to differ from its baseline or to equal "
        "it within the margin",
    )
    max_seeds: Positive | None = Field(None, description="with until: the most fresh seeds")
    looks: list[Positive] | None = Field(
        None,
        description="with until: the numbers of seeds after which to look, the last of them "
        "max_seeds; default: quarters of max_seeds",
    )

    @model_validator(mode="after")
    def _check(self) -> ComparisonStage:
        errors = []
        if (self.seeds is None) == (self.until is None):
            rule = "set seeds for a fixed number, or until and max_seeds for one that grows"
            errors.append(FieldError("seeds", self.seeds, rule))
        if (self.until is None) != (self.max_seeds is None):
            errors.append(FieldError("max_seeds", self.max_seeds, "goes with until: set both"))
        for name in ("seeds", "max_seeds"):
            if getattr(self, name) == 1:
                errors.append(FieldError(name, 1, "must be 2 or more: one pair has no interval"))
        if self.looks is not None:
            rises = all(a < b for a, b in pairwise(self.looks)) and self.looks[:1] >= [2]
            if self.until is None or not rises or self.looks[-1] != self.max_seeds:
                rule = "must rise from 2 or more to max_seeds, and goes with until"
                errors.append(FieldError("looks", self.looks, rule))
        refuse(errors)
        return self

    def planned_looks(self) -> tuple[int, ...]:
        """Return the numbers of seeds after which the comparison may end, ascending."""
        if self.looks is not None:
            return tuple(self.looks)
        if self.max_seeds is not None:
            quarters = {max(2, self.max_seeds * quarter // 4) for quarter in (1, 2, 3, 4)}
            return tuple(sorted(quarters))
        assert self.seeds is not None
        return (self.seeds,)
