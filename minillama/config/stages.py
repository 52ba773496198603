"""The stages of an ablation: choose each arm's learning rate, then compare on seeds not yet used."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from minillama.config.fields import Positive, PositiveFloat, Seed
from minillama.config.loading import Section, refuse
from minillama.errors import FieldError

FIRST_FRESH_SEED = 100
"""The second stage counts its seeds from here, or from the one after the highest of the first."""


class GridStage(Section):
    """The first stage: the whole grid, from which each arm's learning rate is chosen."""

    seeds: Annotated[list[Seed], Field(min_length=1)] = Field(
        description="seeds of every arm at every learning rate"
    )


class CompareStage(Section):
    """The second stage: each arm at its chosen rate, on seeds that did not choose it.

    The number of seeds is fixed (``seeds``), or grows over ``looks`` ``until`` the intervals are
    narrow enough or all comparisons are decided, and to ``max_seeds`` at most.
    """

    seeds: Positive | None = Field(
        None, description="how many new seeds (100, 101, …), or leave it out and set until"
    )
    rates: Literal["best", "best_and_neighbours"] = Field(
        "best_and_neighbours",
        description="the learning rates to run: the chosen one, or with it its neighbours in the "
        "grid, which show how much hangs on the choice",
    )
    until: PositiveFloat | Literal["decided"] | None = Field(
        None,
        description="stop at the first look at which every 95% interval is no wider than this many "
        "nats, or (decided) every arm is shown to differ from its baseline or to equal it",
    )
    max_seeds: Positive | None = Field(None, description="with until: the most new seeds")
    looks: list[Positive] | None = Field(
        None,
        description="with until: numbers of seeds after which to look; the last is max_seeds; "
        "default: quarters of max_seeds",
    )

    @model_validator(mode="after")
    def _check(self) -> CompareStage:
        errors = []
        if (self.seeds is None) == (self.until is None):
            rule = "set a number of seeds, or until and max_seeds for one that grows; not both"
            errors.append(FieldError("seeds", self.seeds, rule))
        if (self.until is None) != (self.max_seeds is None):
            errors.append(FieldError("max_seeds", self.max_seeds, "belongs to until: set both"))
        if self.seeds == 1 or self.max_seeds in (1, 2, 3):
            errors.append(
                FieldError(
                    "seeds" if self.seeds else "max_seeds",
                    self.seeds or self.max_seeds,
                    "is too few: two seeds fixed, or four that grow, are the least to compare",
                )
            )
        if self.looks is not None:
            rises = all(a < b for a, b in pairwise(self.looks)) and self.looks[:1] >= [2]
            if self.until is None or not rises or self.looks[-1] != self.max_seeds:
                rule = "must rise from 2 or more to max_seeds, and need until"
                errors.append(FieldError("looks", self.looks, rule))
        refuse(errors)
        return self

    def planned_looks(self) -> tuple[int, ...]:
        """Return the numbers of seeds after which the comparison may end."""
        if self.seeds is not None:
            return (self.seeds,)
        if self.looks is not None:
            return tuple(self.looks)
        assert self.max_seeds is not None
        return tuple(max(2, self.max_seeds * quarter // 4) for quarter in (1, 2, 3, 4))


def seeds_of_first_stage(raw: Any) -> Any:
    """Return an ablation's raw config with ``seeds`` set to those of its first stage.

    Where ``seeds`` is set to something else as well, both are kept, for the error.
    """
    stages = raw.get("stages") if isinstance(raw, dict) else None
    if not isinstance(stages, list) or not stages or not isinstance(stages[0], dict):
        return raw
    return {"seeds": stages[0].get("seeds"), **raw}
