"""The C kernels: compiled once by the machine's own compiler, kept in the cache folder, loaded.

    NAME.c ──cc -march=native──▶ <cache>/kernels/NAME-<dtype>-<key>.so ──ctypes──▶ its functions

The key is a hash of the sources, the options and every macro that the compiler predefines, which
tell its version and the instructions of this machine's processor: a cache may be shared by machines
that differ.  No header of torch is used, so a new torch needs no new kernel.

Threads are those of the OpenMP runtime that torch itself runs on; where it cannot be found, the
kernel runs on one thread.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from minillama.errors import ConfigError
from minillama.files import cache_folder
from minillama.model.kernels.reference import wide_dtype

_LOGGER = logging.getLogger("minillama")
_FOLDER = Path(__file__).parent
_HEADERS = ("cached.h", "kernel.h", "rope.h", "rows.h", "swiglu.h", "tile.h", "units.h")
MACROS = {
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
}
"""The dtypes that kernels are written for, as the sources name them."""
_OPTIONS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fPIC", "-shared"]
_TIMEOUT_S = 60


class Kernel(NamedTuple):
    """RMSNorm's two C functions for one dtype, and the dtype they compute in."""

    forward: Callable[..., None]
    backward: Callable[..., int]
    wide: torch.dtype


class _BuildError(Exception):
    """Why there is no kernel, in words for the user."""


@functools.cache
def load(dtype: torch.dtype) -> Kernel | None:
    """Return RMSNorm's kernel for ``dtype``, compiled if need be; None if it cannot be had."""
    library = load_library("rms_norm", dtype)
    if library is None:
        return None
    pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    forward, backward = library.rms_norm_forward, library.rms_norm_backward
    sizes = [long, long]
    forward.argtypes = [*[pointer] * 4, *sizes, ctypes.c_double, integer, integer]
    forward.restype = None
    backward.argtypes = [*[pointer] * 6, *sizes, integer]
    backward.restype = integer
    return Kernel(forward, backward, wide_dtype(dtype))


def load_library(name: str, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return what ``NAME.c`` compiles to for ``dtype``; None if it cannot be had.

    Why not is logged once.  ``MINILLAMA_KERNELS=0`` in the environment forbids compiled kernels.
    """
    if os.environ.get("MINILLAMA_KERNELS") == "0" or dtype not in MACROS:
        return None
    try:
        library = _built(_FOLDER / f"{name}.c", MACROS[dtype])
    except _BuildError as error:
        _warn_once(str(error))
        return None
    _share_threads(library)
    return library


@functools.cache
def _warn_once(reason: str) -> None:
    _LOGGER.warning(
        "the model runs as plain PyTorch, which is right but slower: %s; "
        "MINILLAMA_KERNELS=0 in the environment asks for that and silences this",
        reason,
    )


def _share_threads(library: ctypes.CDLL) -> None:
    """Tell the library where torch's OpenMP is: among the global symbols of the process."""
    library.share_threads.argtypes = [ctypes.c_void_p] * 3
    library.share_threads.restype = None
    try:
        openmp = ctypes.CDLL(None)
        parallel, thread = openmp.GOMP_parallel, openmp.omp_get_thread_num
        team = openmp.omp_get_num_threads
    except (AttributeError, OSError, TypeError):
        return
    library.share_threads(parallel, thread, team)


def _built(source: Path, macro: str) -> ctypes.CDLL:
    compiler = _find_compiler()
    target, predefined = _native(tuple(compiler))
    options = [*_OPTIONS, *target, f"-D{macro}"]
    sources = [path.read_bytes() for path in (source, *map(_FOLDER.joinpath, _HEADERS))]
    parts = (*sources, repr((compiler, options)).encode(), predefined)
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    name = f"{source.stem}-{macro.lower()}-{key}.so"
    command = [*compiler, *options, str(source), "-lm", "-o"]
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        return _cached(folder / name, command)
    except (OSError, ConfigError, RuntimeError):  # the folder cannot be written, or no home
        with tempfile.TemporaryDirectory(prefix="minillama-") as temporary:
            return _cached(Path(temporary) / name, command)


@functools.cache
def _native(compiler: tuple[str, ...]) -> tuple[list[str], bytes]:
    """Return the options for this machine's processor, and all macros that come with them."""
    target, ask = ["-march=native"], ["-dM", "-E", "-x", "c", os.devnull]
    try:
        return target, _run([*compiler, *target, *ask])
    except _BuildError:  # some compilers know no native target
        return [], _run([*compiler, *ask])


def _cached(path: Path, command: Sequence[str]) -> ctypes.CDLL:
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # damaged; the new one takes its place
            _LOGGER.info("%s cannot be loaded and is compiled anew", path)
    # Whoever else compiles it now writes the same; each puts its own whole file in place.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        _run([*command, str(temporary)])
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise _BuildError(f"the compiled kernel cannot be loaded ({error})") from error


def _find_compiler() -> list[str]:
    """Return the compiler's command: ``$CC`` if it is set, else the first that is installed."""
    own = shlex.split(os.environ.get("CC", ""))
    for command in [own] if own else [["cc"], ["gcc"], ["clang"]]:
        if program := shutil.which(command[0]):
            return [program, *command[1:]]
    tried = f"CC={own[0]}" if own else "cc, gcc and clang"
    raise _BuildError(f"no C compiler was found (tried {tried}); install one, for example gcc")


def _run(command: Sequence[str]) -> bytes:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _BuildError(f"the C compiler failed ({error})") from error
    if done.returncode != 0:
        complaint = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise _BuildError(f"the C compiler failed ({shlex.join(command[:1])}: {complaint[-1]})")
    return done.stdout
