"""Files and folders that are there whole or not at all, whenever the power goes.

    write beside it, under a temporary name ─▶ fsync ─▶ rename ─▶ fsync the parent

A rename replaces a file at once, so a reader sees the old or the new and never a part.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minillama.errors import RunFolderError

TEMPORARY = ".unfinished-"
"""How the name of whatever is not yet, or no longer, whole begins."""


@contextmanager
def writing(what: Path) -> Iterator[None]:
    """Turn whatever the system says against writing ``what`` into one line.

    Raises:
        RunFolderError: the body raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{what} cannot be written: {error.strerror or error}") from error


def sync(path: Path) -> None:
    """Wait until the disk has the file, or the entries of the folder, at ``path``."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return  # Windows opens no folder
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, replacing what is there at once."""
    temporary = _temporary_name(path.parent)
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes ``path`` once the body has filled it with files.

    If the body raises, nothing is left.  Each file is on the disk before the folder has its name.

    Raises:
        FileExistsError: ``path`` is there already.
    """
    if path.exists():
        raise FileExistsError(f"{path} is there already")
    temporary = _temporary_name(path.parent)
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)


def point_link(link: Path, target: Path) -> None:
    """Let ``link`` lead to ``target``, a folder beside it; a copy where the system has no links."""
    temporary = _temporary_name(link.parent)
    try:
        temporary.symlink_to(target.name, target_is_directory=True)
    except (OSError, NotImplementedError):
        try:
            shutil.copytree(target, temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    if link.is_dir() and not link.is_symlink():
        drop_folder(link)  # a folder that is not empty cannot be replaced
    temporary.replace(link)
    sync(link.parent)


def drop_folder(path: Path) -> None:
    """Remove the folder ``path``; it loses its name first, so that no part of it is ever found."""
    doomed = path.rename(_temporary_name(path.parent))
    shutil.rmtree(doomed, ignore_errors=True)


def drop_unfinished(folder: Path) -> None:
    """Remove from ``folder`` what a kill has left unfinished."""
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _temporary_name(folder: Path) -> Path:
    return folder / f"{TEMPORARY}{secrets.token_hex(8)}"


def cache_folder() -> Path:
    """Return the cache folder: ``$MINILLAMA_CACHE``, else ``minillama`` in the user's cache."""
    own = os.environ.get("MINILLAMA_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    # The XDG specification says that a relative path is to be ignored.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "minillama"
