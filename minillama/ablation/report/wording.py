"""How the report writes p values and intervals."""

from __future__ import annotations

import math

from minillama.formatting import format_number


def format_p_value(p: float) -> str:
    """Return a p value with its relation, such as ``p = .031``."""
    if math.isnan(p):
        return "p unknown"
    text = "p < .001" if p < 0.001 else f"p = {p:.3f}".replace("0.", ".", 1)
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def format_interval(low: float, high: float, digits: int = 3) -> str:
    """Return an interval, such as ``−0.012 to 0.034``; a dash where there is none."""
    if not math.isfinite(low):
        return format_number(math.nan)
    return f"{format_number(low, digits)} to {format_number(high, digits)}"
