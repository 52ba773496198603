"""What is valid in a config, but makes a comparison unfair."""

from __future__ import annotations

from functools import reduce

from minillama.config.norms import NORM_KINDS
from minillama.config.placement import PLACEMENTS
from minillama.config.run import RunConfig


def advice(config: RunConfig) -> list[str]:
    """Return what a run lacks that the sources of its norm and its placement have, a line each."""
    norm = config.model.norm
    lines = NORM_KINDS.get(norm.kind).advice(config.model)
    for condition in PLACEMENTS.get(norm.placement).conditions:
        value = reduce(getattr, condition.field.split("."), config)
        if not condition.holds(value):
            lines.append(
                f"placement {norm.placement}: {condition.field} = {value!r}, where its source has "
                f"{condition.needed}; {condition.why}"
            )
    return lines
