"""Checks of what a caller passes to a public function: one sentence, raised at the call."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable
from typing import Any

from minillama.errors import ConfigError


def check_type(name: str, value: object, kind: type) -> None:
    """Raise a TypeError if ``value`` is not a ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, not {type(value).__name__}")


def check_flag(name: str, value: object) -> None:
    """Raise a ConfigError if ``value`` is neither True nor False: ``"no"`` would count as True."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r}: must be True or False")


def whole_number(name: str, value: Any, least: float = -math.inf, rule: str = "") -> int:
    """Return ``value`` as an int; numpy's and torch's integers count as whole numbers.

    Raises:
        ConfigError: it is not one, or is below ``least``; ``rule`` is the message.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{name} = {value!r}: must be a whole number")
    try:
        number = operator.index(value)
    except TypeError:  # an array
        raise ConfigError(f"{name} = {value!r}: must be a whole number") from None
    if number < least:
        raise ConfigError(f"{name} = {value!r}: {rule or f'must be at least {least}'}")
    return number


def finite_number(name: str, value: Any, rule: str, *, positive: bool = False) -> float:
    """Return ``value`` as a float.

    Raises:
        ConfigError: it is not a finite number of at least 0 (above 0, if ``positive``); ``rule`` is
            the message.
    """
    number = math.nan
    if not isinstance(value, bool | str):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # an array, None
            number = float(value)
    if not 0 <= number < math.inf or (positive and number == 0):
        raise ConfigError(f"{name} = {value!r}: {rule}")
    return number


def whole_ids(name: str, ids: Iterable[int]) -> list[int]:
    """Return ``ids`` as a list of ints; a TypeError if they are anything but whole numbers."""
    try:
        # operator.index takes the numbers of numpy and torch, and no fraction or letter.
        return list(map(operator.index, ids))
    except TypeError:
        raise TypeError(
            f"{name} = {ids!r}: must be a list of ids, whole numbers as a tokenizer's encode "
            "returns them"
        ) from None
