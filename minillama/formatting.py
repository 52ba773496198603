"""Numbers, durations, lists and tables as text for people: one function for each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

MISSING = "–"
"""Printed where there is no number."""


def format_number(value: float, digits: int = 3) -> str:
    """Return ``value`` with ``digits`` decimals and a true minus sign: ``−0.125``, ``∞``, ``–``."""
    if not math.isfinite(value):
        return "∞" if value == math.inf else MISSING
    return f"{value:.{digits}f}".replace("-", "−")


def format_si(value: float, unit: str = "") -> str:
    """Return ``value`` in three digits with an SI prefix: ``1.23 M``, ``312 TFLOP/s``."""
    if not math.isfinite(value):
        return MISSING
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def format_bytes(n_bytes: float) -> str:
    """Return a size in the largest binary unit that keeps it above 1: ``1.50 GiB``."""
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n_bytes >= 1 << exponent:
            return f"{n_bytes / (1 << exponent):.2f} {unit}"
    return f"{n_bytes:.0f} bytes"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units: ``12.3 s``, ``3 min 20 s``, ``2 days 5 h``."""
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 59.95:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{pluralize(days, 'day')} {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def pluralize(n: int, noun: str, plural: str | None = None) -> str:
    """Return ``n`` with its noun: ``1 seed``, ``3 seeds``; ``plural`` if an s is not enough."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def join_words(words: Iterable[str], conjunction: str = "and") -> str:
    """Return the words as a list in prose: ``a, b and c``; nothing of none."""
    *most, last = list(words) or [""]
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines, left-aligned, each column as wide as its widest entry."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def html_table(caption: str, rows: Iterable[Sequence[str]]) -> str:
    """Return the rows as an HTML table for a notebook; all text is escaped.

    The first cell of a row is its heading.
    """
    lines = (
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for first, *cells in rows
    )
    return f"<table><caption>{escape(caption)}</caption>{''.join(lines)}</table>"


def finite_json(figures: Mapping[str, Any]) -> str:
    """Return one strict JSON object, null for what is not finite and ``not_finite`` naming it.

    ``{"loss": inf}`` becomes ``{"loss": null, "not_finite": {"loss": "inf"}}``.
    """
    odd = {
        key: str(value)
        for key, value in figures.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    kept = {**figures, **dict.fromkeys(odd)}
    return json.dumps({**kept, "not_finite": odd} if odd else kept, allow_nan=False)
