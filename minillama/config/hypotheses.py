"""What an ablation is expected to show, written down before it runs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from minillama.config.fields import Name, PositiveFloat
from minillama.config.loading import Section, refuse
from minillama.errors import FieldError


class Hypothesis(Section):
    """A claim on an arm and its baseline, to be tested by the ablation."""

    name: Name
    arm: str = Field(description="in an ablation with axes: with their values, as in the tables")
    baseline: str | None = Field(None, description="default: the baseline of the arm")
    claim: Literal["same", "lower", "higher", "different"] = Field(
        description="of the arm's measure, against the baseline's; same: within the margin"
    )
    measure: Literal["loss", "failures", "S"] = Field(
        "loss", description="validation loss, rate of failure, or LR sensitivity"
    )
    rate: PositiveFloat | Literal["best"] = Field(
        "best", description="the learning rate of both; best: each one's own"
    )
    margin: PositiveFloat | None = Field(
        None, description="of claim: same, in nats per token; default: the ablation's"
    )

    @model_validator(mode="after")
    def _check(self) -> Hypothesis:
        errors = []
        if self.margin is not None and self.claim != "same":
            errors.append(FieldError("margin", self.margin, "is of claim: same alone", "claim"))
        if self.claim == "same" and self.measure == "failures":
            rule = "cannot be tested on failures; claim it of the loss"
            errors.append(FieldError("claim", self.claim, rule, "measure"))
        if self.rate != "best" and self.measure == "S":
            errors.append(
                FieldError("rate", self.rate, "S is of all rates; leave it out", "measure")
            )
        if self.arm == self.baseline:
            errors.append(FieldError("baseline", self.baseline, "is the arm itself"))
        refuse(errors)
        return self
