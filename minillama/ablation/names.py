"""Names of arms cut down to what tells them apart, for where there is little room."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BETWEEN_SETTINGS = re.compile(r"\+(?=[\w.-]+=)")
"""What separates an arm's name from a value of an axis, and one such value from the next."""


def short_names(arms: Sequence[str]) -> dict[str, str]:
    """Return a short name for each arm, no two alike.

    ``post+model.n_layers=24+optim.grad_clip=1`` beside the same with 6 layers becomes
    ``n_layers=24``: parts that all arms share are left out, and of a setting's dotted name the last
    part is enough.  Where that would leave nothing of an arm, or make two alike, less is
    cut, in the last resort nothing.
    """
    parts = {arm: _BETWEEN_SETTINGS.split(arm) for arm in arms}
    shared = set.intersection(*map(set, parts.values())) if len(parts) > 1 else set()
    leaves = {arm: [_leaf(part) for part in its] for arm, its in parts.items()}
    differing = {
        arm: [leaf for part, leaf in zip(its, leaves[arm], strict=True) if part not in shared]
        for arm, its in parts.items()
    }
    for names in (differing, leaves):
        joined = {arm: ", ".join(its) for arm, its in names.items()}
        if all(joined.values()) and len(set(joined.values())) == len(joined):
            return joined
    return {arm: arm for arm in arms}


def _leaf(part: str) -> str:
    name, equals, value = part.partition("=")
    return name.rpartition(".")[2] + equals + value
