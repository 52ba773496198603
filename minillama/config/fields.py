"""Types of config fields that several sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from minillama.config.loading import NotBool

Positive = Annotated[int, NotBool, Field(gt=0)]
NonNegative = Annotated[int, NotBool, Field(ge=0)]
Seed = Annotated[int, NotBool, Field(ge=0, lt=2**63)]  # what a torch.Generator takes
PositiveFloat = Annotated[float, NotBool, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, NotBool, Field(ge=0, allow_inf_nan=False)]
Factor = Annotated[float, NotBool, Field(ge=1, allow_inf_nan=False)]
Beta = Annotated[float, NotBool, Field(ge=0, lt=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$")]
