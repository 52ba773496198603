"""Names that users write in a config, mapped to the objects they name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from minillama.errors import ConfigError, UnknownNameError

T = TypeVar("T")


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that ``name`` was most likely meant to be, or None if none is close."""
    by_lower = {v.lower(): v for v in valid}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.55)
    return by_lower[close[0]] if close else None


def unknown_name(what: str, name: str, valid: Iterable[str]) -> str:
    """Return the message about an unknown ``name``: the nearest valid one, then all of them."""
    valid = sorted(valid)
    guess = nearest(name, valid)
    hint = f"did you mean {guess!r}? " if guess else ""
    return f"unknown {what} {name!r}; {hint}valid: {', '.join(valid)}"


class Registry(Generic[T]):
    """A table of named things of one sort; asked for a name it lacks, it says which ones it has.

    ``what`` names the sort in messages, for example ``"norm kind"``.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> None:
        """Add ``entry`` under ``name``.

        Raises:
            ConfigError: the name is taken already (by an entry that is not this one).
        """
        if self._entries.setdefault(name, entry) is not entry:
            raise ConfigError(
                f"{self.what} {name!r} is registered already; give yours another name"
            )

    def get(self, name: str) -> T:
        """Return the entry called ``name``.

        Raises:
            UnknownNameError: there is none; the message lists all names and the nearest.
        """
        if name not in self._entries:
            raise UnknownNameError(unknown_name(self.what, name, self._entries))
        return self._entries[name]

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
