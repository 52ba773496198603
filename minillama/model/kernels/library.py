"""The C kernels: compiled once by the machine's own compiler, kept in the cache folder, loaded.

    kernels.c ──cc -march=native──▶ <cache>/kernels/<dtype>-<key>-<sha256>.so ──ctypes──▶ functions

The key is a hash of all sources, the options and every macro that the compiler predefines, which
identify its version and the instructions of this machine's processor: machines that differ may
share a cache.  The sha256 is that of the file itself: a truncated or damaged file is not loaded but
built again.  No header of torch is used, so a new torch needs no new kernels.

Threads are those of the OpenMP runtime that torch itself runs on; where it cannot be found, the
kernels run on one thread.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from minillama.errors import ConfigError
from minillama.files import cache_folder
from minillama.model.kernels import torch_private

_LOGGER = logging.getLogger("minillama")
_FOLDER = Path(__file__).parent
MACROS = {
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
    torch.bfloat16: "BFLOAT16",
    torch.float16: "FLOAT16",
}
"""The dtypes that kernels are written for, as the sources name them."""
_OPTIONS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fPIC", "-shared"]
_PROBE_TIMEOUT_S = 20  # for printing its macros: a compiler that hangs already hangs here
_BUILD_TIMEOUT_S = 300  # 6 s alone on one core of 2020


class BuildError(Exception):
    """The C kernels cannot be used; the message is for the user."""


@functools.cache
def load(dtype: torch.dtype) -> Any:
    """Return the C functions for ``dtype``, compiled if need be; None if that is impossible.

    Each function takes its arguments by the names of its prototype in kernels.h, tensors for
    pointers.  Why there is none is logged once.  ``MINILLAMA_KERNELS=0`` in the environment forbids
    compiled kernels.
    """
    if os.environ.get("MINILLAMA_KERNELS") == "0" or dtype not in MACROS:
        return None
    try:
        return load_or_raise(dtype)
    except BuildError as error:
        _warn_once(str(error))
        return None


def load_or_raise(dtype: torch.dtype) -> Any:
    """Return the C functions for ``dtype``, one of :data:`MACROS`, compiled if need be.

    Raises:
        BuildError: that is impossible.
    """
    if torch_private.MISSING is not None:
        raise BuildError(f"torch {torch.__version__} is not supported: {torch_private.MISSING}")
    library = _build(MACROS[dtype])
    return _bind(library, _FOLDER.joinpath("kernels.h").read_text(encoding="utf-8"))


def is_compiled(dtype: torch.dtype) -> bool:
    """Return whether the kernels for ``dtype`` are in the cache, so that loading is quick."""
    try:
        stem, _ = _target(MACROS[dtype])
        paths = (cache_folder() / "kernels").glob(f"{stem}-*.so")
        return any(path.name == _name(stem, path) for path in paths)
    except (BuildError, ConfigError, OSError):
        return False


def forget() -> None:
    """Forget what was loaded and logged, for tests that change the environment."""
    for function in (load, _warn_once, _find_toolchain):
        function.cache_clear()


@functools.cache
def _warn_once(reason: str) -> None:
    _LOGGER.warning(
        "the model runs as plain PyTorch, which is right but slower: %s; "
        "set MINILLAMA_KERNELS=0 in the environment to choose that and silence this",
        reason,
    )


# ------------------------------------------------------------------------------------- building


class _Toolchain(NamedTuple):
    command: list[str]
    macros: bytes


@functools.cache
def _find_toolchain() -> _Toolchain | BuildError:
    """Return the compiler with its options for this processor, and the macros it predefines."""
    try:
        compiler = find_compiler()
        ask = ["-dM", "-E", "-x", "c", os.devnull]
        try:
            command = [*compiler, *_OPTIONS, "-march=native"]
            return _Toolchain(command, _run([*compiler, "-march=native", *ask], _PROBE_TIMEOUT_S))
        except BuildError:  # some compilers know no native target
            return _Toolchain([*compiler, *_OPTIONS], _run([*compiler, *ask], _PROBE_TIMEOUT_S))
    except BuildError as error:
        return error


def find_compiler() -> list[str]:
    """Return the compiler's command: ``$CC`` if it is set, else the first that is installed.

    Raises:
        BuildError: there is none.
    """
    chosen = os.environ.get("CC", "").strip()
    if program := shutil.which(chosen):  # a path may contain spaces
        return [program]
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise BuildError(f"CC={chosen} cannot be read as a command ({error})") from error
    for command in [words] if words else [["cc"], ["gcc"], ["clang"]]:
        if program := shutil.which(command[0]):
            return [program, *command[1:]]
    tried = f"CC={words[0]}" if words else "cc, gcc and clang"
    raise BuildError(f"no C compiler was found (tried {tried}); install one, for example gcc")


def _target(macro: str) -> tuple[str, list[str]]:
    """Return how the library's file name begins, and the command that compiles it, less its file.

    Raises:
        BuildError: there is no compiler that works.
    """
    toolchain = _find_toolchain()
    if isinstance(toolchain, BuildError):
        raise toolchain
    sources = [path.read_bytes() for path in sorted(_FOLDER.glob("*.[ch]"))]
    parts = (*sources, repr((toolchain.command, macro)).encode(), toolchain.macros)
    stem = f"{macro.lower()}-{_digest(*parts)}"
    command = [*toolchain.command, f"-D{macro}", str(_FOLDER / "kernels.c"), "-lm", "-o"]
    return stem, command


def _build(macro: str) -> ctypes.CDLL:
    stem, command = _target(macro)
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        return _load_or_compile(folder, stem, command)
    except (OSError, ConfigError):  # the folder cannot be written, or there is none
        with tempfile.TemporaryDirectory(prefix="minillama-") as temporary:
            return _load_or_compile(Path(temporary), stem, command)


def _load_or_compile(folder: Path, stem: str, command: Sequence[str]) -> ctypes.CDLL:
    for path in folder.glob(f"{stem}-*.so"):
        # Mapping a truncated file would end the process with a bus error.
        if path.name == _name(stem, path):
            try:
                return _open(path)
            except BuildError:
                pass
        _LOGGER.info("%s is damaged and is compiled again", path)
    # Another process may compile the same now; each renames its own complete file.
    temporary = folder / f"{stem}.{uuid.uuid4().hex}"
    try:
        _run([*command, str(temporary)], _BUILD_TIMEOUT_S)
        if not temporary.is_file():
            raise BuildError(f"the C compiler {command[0]} wrote no file")
        path = folder / _name(stem, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return _open(path)


def _name(stem: str, path: Path) -> str:
    return f"{stem}-{_digest(path.read_bytes())}.so"


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the compiled kernels cannot be loaded ({error})") from error


def _run(command: Sequence[str], timeout_s: float) -> bytes:
    """Return what ``command`` prints; kill it and its children after ``timeout_s``."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            printed, complaints = process.communicate(timeout=timeout_s)
        except BaseException:
            if hasattr(os, "killpg"):
                with suppress(ProcessLookupError):  # else it would replace a Ctrl-C
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.communicate()
            raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C compiler failed ({error})") from error
    if process.returncode != 0:
        lines = complaints.decode(errors="replace").strip().splitlines() or ["no message"]
        raise BuildError(f"the C compiler failed ({command[0]}: {lines[-1]})")
    return printed


# ------------------------------------------------------------------------------------- binding


_TYPES: dict[str, Any] = {
    "void": None,
    "long": ctypes.c_long,
    "int": ctypes.c_int,
    "double": ctypes.c_double,
}


class _Variable(NamedTuple):
    """A parameter or a field: its name, its C type and, for a pointer, that it is one."""

    name: str
    type: str
    is_pointer: bool

    @property
    def ctype(self) -> Any:
        return ctypes.c_void_p if self.is_pointer else _TYPES[self.type]


class _Function(NamedTuple):
    result: str
    parameters: list[_Variable]


def _bind(library: ctypes.CDLL, header: str) -> SimpleNamespace:
    """Return the functions of ``library`` and the structs, as ``header`` declares them.

    Raises:
        BuildError: the library is not what the header describes.
    """
    functions, structs = read_header(header)
    bound = SimpleNamespace(**{name: _struct(name, fields) for name, fields in structs.items()})
    for name, (result, parameters) in functions.items():
        function = getattr(library, name, None)
        if function is None:  # in half precision there is RMSNorm alone
            continue
        function.argtypes = [parameter.ctype for parameter in parameters]
        function.restype = _TYPES[result]
        setattr(bound, name, _by_name(function, parameters, structs))
    if not hasattr(bound, "rms_norm_forward"):
        raise BuildError("the C compiler wrote a library without the kernels")
    for name in structs:
        if (size := getattr(bound, name.replace("_t", "_size"), None)) is not None:
            assert size() == ctypes.sizeof(getattr(bound, name)), name
    _share_threads(library)
    return bound


def read_header(header: str) -> tuple[dict[str, _Function], dict[str, list[_Variable]]]:
    """Return the functions and structs that a C header declares, by name."""
    code = re.sub(r"/\*.*?\*/|^#.*?$", "", header, flags=re.DOTALL | re.MULTILINE)
    pattern = r"typedef struct \{(.*?)\} (\w+);"
    structs = {
        name: [field for line in body.split(";") for field in _variables(line)]
        for body, name in re.findall(pattern, code, re.DOTALL)
    }
    functions = {
        name: _Function(
            result,
            [
                variable
                for parameter in parameters.split(",")
                if parameter.strip() != "void"
                for variable in _variables(parameter)
            ],
        )
        for result, name, parameters in re.findall(
            r"(\w+) (\w+)\(([^)]*)\);", re.sub(pattern, "", code, flags=re.DOTALL)
        )
    }
    return functions, structs


def _variables(declaration: str) -> list[_Variable]:
    """Read ``const wide *x, *y``."""
    words = declaration.replace("const ", "").split(None, 1)
    if not words:
        return []
    return [
        _Variable(name.strip(" *\n"), words[0], name.strip().startswith("*"))
        for name in words[1].split(",")
    ]


def _struct(name: str, fields: list[_Variable]) -> type[ctypes.Structure]:
    return type(
        name, (ctypes.Structure,), {"_fields_": [(field.name, field.ctype) for field in fields]}
    )


def _by_name(
    function: Any, parameters: list[_Variable], structs: dict[str, Any]
) -> Callable[..., Any]:
    """Return ``function`` with keyword arguments only: tensors or None, structs and numbers.

    So arguments cannot be swapped.  The wrapper is made from source because a call of it takes
    0.2 µs, where a loop over the arguments would take 1 µs of the 10 µs of a whole small kernel.
    """

    def argument(parameter: _Variable) -> str:
        name = parameter.name
        if parameter.type in structs:
            return f"byref({name})"
        return f"None if {name} is None else {name}.data_ptr()" if parameter.is_pointer else name

    names = ", ".join(parameter.name for parameter in parameters)
    arguments = ", ".join(map(argument, parameters))
    source = f"lambda {'*, ' if names else ''}{names}: function({arguments})"
    wrapper: Callable[..., Any] = eval(source, {"function": function, "byref": ctypes.byref})
    return wrapper


def _share_threads(library: ctypes.CDLL) -> None:
    """Pass the library torch's OpenMP functions, which are global symbols of the process."""
    library.share_threads.argtypes = [ctypes.c_void_p] * 3
    library.share_threads.restype = None
    try:
        openmp = ctypes.CDLL(None)
        functions = openmp.GOMP_parallel, openmp.omp_get_thread_num, openmp.omp_get_num_threads
    except (AttributeError, OSError, TypeError):
        return
    library.share_threads(*functions)
