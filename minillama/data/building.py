"""Building a folder of the cache once, whole or not at all, whoever else is at it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from minillama.errors import DataError

_LOGGER = logging.getLogger("minillama")


def build_once(
    folder: Path,
    is_whole: Callable[[Path], bool],
    build: Callable[[Path], None],
    *,
    goes_on: bool = False,
) -> None:
    """Make sure that ``folder`` is there and whole; if it is not, ``build`` fills a new one.

    ``build`` writes into a temporary sibling, which takes the place of ``folder`` in one step, so
    that nobody ever sees half of it.  If it ``goes_on`` from where it was stopped, it is given
    ``folder`` itself and has to see to that.  Of several processes one builds and the others wait.

    Raises:
        DataError: the folder cannot be written.
    """
    if is_whole(folder):
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _LOGGER.info("waiting for another process that prepares the same data")
            lock.acquire()
        try:
            if not is_whole(folder):
                if goes_on:
                    folder.mkdir(exist_ok=True)
                    build(folder)
                else:
                    _replace(folder, build)
        finally:
            lock.release()
    except OSError as error:
        raise DataError(
            f"cannot write {folder}: {error.strerror or error}; set the environment variable "
            "MINILLAMA_CACHE to a folder that can be written and has space"
        ) from error


def _replace(folder: Path, build: Callable[[Path], None]) -> None:
    for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        build(temporary)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
