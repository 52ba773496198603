"""Files and folders that are complete or absent, even after a power cut.

    write under a temporary name beside it ─▶ fsync ─▶ rename ─▶ fsync the parent folder

A rename replaces a file atomically, so a reader sees the old one or the new one, never a part.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from minillama.errors import ConfigError, RunFolderError

TEMPORARY_PREFIX = ".unfinished-"
"""How the names of unfinished files and folders begin."""

_log = logging.getLogger("minillama")


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the body into a one-line error about writing ``path``.

    Raises:
        RunFolderError: the body raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror or error}") from error


def fsync(path: Path) -> None:
    """Wait until the file, or the entries of the folder, at ``path`` are on the disk."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return  # Windows cannot open a folder
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file that the body writes there replaces ``path`` atomically.

    If the body raises, ``path`` stays as it was and the temporary file is removed.
    """
    temporary = _temporary_path(path)
    try:
        yield temporary
        fsync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path``, text as UTF-8, replacing an older file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``path`` once the body has filled it.

    If the body raises, the temporary folder is removed.  All files are on the disk before the
    folder has its name.

    Args:
        path: its parent must exist.
        replace: remove an older folder at ``path`` just before the rename.

    Raises:
        FileExistsError: ``path`` exists, and ``replace`` is false.
    """
    if path.exists() and not replace:
        raise FileExistsError(f"{path} already exists")
    temporary = _temporary_path(path)
    try:
        temporary.mkdir()
        yield temporary
        for entry in temporary.rglob("*"):
            fsync(entry)
        fsync(temporary)
        if replace and path.exists():
            remove_folder(path)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync(path.parent)


def replace_link(link: Path, target: Path) -> None:
    """Point ``link`` at ``target``, a folder beside it; copy it where links are not supported."""
    temporary = _temporary_path(link)
    try:
        temporary.symlink_to(target.name, target_is_directory=True)
    except (OSError, NotImplementedError):
        try:
            shutil.copytree(target, temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    if link.is_dir() and not link.is_symlink():
        remove_folder(link)  # rename does not replace a folder that is not empty
    temporary.replace(link)
    fsync(link.parent)


def remove_folder(path: Path) -> None:
    """Remove the folder ``path``; it is renamed first, so that no half of it is ever found."""
    renamed = path.rename(_temporary_path(path))
    shutil.rmtree(renamed, ignore_errors=True)


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Remove the unfinished files and folders that killed processes left in ``folder``.

    Args:
        folder: where they are; no other process may be writing there.
        name: only those that would have become ``folder / name``.
    """
    pattern = f"{TEMPORARY_PREFIX}*" if name is None else f"{TEMPORARY_PREFIX}{name[:_KEPT]}-*"
    for path in folder.glob(pattern):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


_KEPT = 64  # characters of a name; file systems allow 255 bytes in all


def _temporary_path(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name[:_KEPT]}-{secrets.token_hex(8)}")


@contextmanager
def lock(path: Path, *, busy: str, timeout: float | None = None) -> Iterator[Callable[[], bool]]:
    """Hold the lock file ``path`` while the body runs; only one process can.

    Yields a function that returns whether the file is still at ``path``.  If its folder is removed,
    moved or replaced, another process can take the lock at this path.

    Args:
        path: of the lock file, which is created where it is missing.
        busy: what to say where another process holds the lock: the message of the error, or of the
            log line if there is no timeout.
        timeout: how many seconds to wait for the lock; None: forever.

    Raises:
        RunFolderError: another process still holds the lock after ``timeout`` seconds.
        OSError: the lock file cannot be created.
    """
    file_lock = FileLock(path)
    try:
        file_lock.acquire(timeout=max(timeout or 0, _ASKING_SECONDS))
    except Timeout:
        if timeout is not None:
            raise RunFolderError(busy) from None
        _log.info("%s", busy)
        file_lock.acquire()
    locked = path.stat()

    def is_in_place() -> bool:
        try:
            return os.path.samestat(locked, path.stat())
        except OSError:
            return False

    try:
        yield is_in_place
    finally:
        file_lock.release()


_ASKING_SECONDS = 0.2
"""For how long a lock that seems held is tried again: :func:`is_locked` may be what holds it."""


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock file ``path``; if none does, takes it briefly."""
    if not path.is_file():
        return False
    file_lock = FileLock(path)
    try:
        file_lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # a folder of someone else's, in which this user cannot lock
        return False
    file_lock.release()
    return False


def sha256_of_file(*paths: Path) -> str:
    """Return the SHA-256 (hex) of the content of ``paths``, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return the cache folder: ``$MINILLAMA_CACHE``, else ``minillama`` in the user's cache.

    Raises:
        ConfigError: the variable is not set, and the user has no home folder.
    """
    own = os.environ.get("MINILLAMA_CACHE")
    # The XDG specification says that a relative path is to be ignored.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if own:
            return Path(own).expanduser().absolute()
        return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "minillama"
    except RuntimeError:
        raise ConfigError(
            "there is no home folder to keep the cache in; set the environment variable "
            "MINILLAMA_CACHE to a folder that can be written"
        ) from None
