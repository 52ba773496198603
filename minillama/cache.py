"""Where what can be made anew is kept: prepared data and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder: ``$MINILLAMA_CACHE``, else ``minillama`` in the user's cache."""
    own = os.environ.get("MINILLAMA_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    # The XDG specification says that a relative path is to be ignored.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "minillama"
