"""Types of config fields that several sections share."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from minillama.config.loading import LARGEST, NotBool

Positive = Annotated[int, NotBool, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[int, NotBool, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, NotBool, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, NotBool, Field(ge=0, allow_inf_nan=False)]
Factor = Annotated[float, NotBool, Field(ge=1, allow_inf_nan=False)]
Beta = Annotated[float, NotBool, Field(ge=0, lt=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$")]
expand_home = os.path.expanduser  # where there is no home folder, Path.expanduser raises
PathText = Annotated[str, AfterValidator(expand_home)]
"""A path (or a URL), ``~`` being the home folder."""

# What a field determines, as its `json_schema_extra`.  A run with another value of a field without
# one of these marks is a different run.
NO_EFFECT: dict[str, Any] = {"decides": "nothing"}
"""Two runs that differ in it have the same numbers."""
RESUMABLE: dict[str, Any] = {"decides": "numbers, but a resumed run may change it"}
BATCHES: dict[str, Any] = {"decides": "numbers, but not the prepared tokens"}
