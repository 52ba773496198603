"""Import a user's modules, so that the norms and placements they register can be used."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from minillama.errors import ConfigError, MinillamaError

_LOADED_PLUGINS: dict[str, ModuleType] = {}


def load_plugins(plugins: Sequence[str]) -> None:
    """Import each plugin, once per process, so that what it registers can be used.

    A plugin is a module's dotted name or the path of a ``.py`` file; both are relative to the
    current folder.  While a plugin loads, stdin is empty.

    Raises:
        ConfigError: a plugin is missing, raises or exits.
    """
    for index, plugin in enumerate(plugins):
        file = ""
        try:
            if plugin.endswith(".py"):
                file = str(Path(plugin).expanduser().resolve())
            if (key := file or plugin) not in _LOADED_PLUGINS:
                with _empty_stdin():
                    _LOADED_PLUGINS[key] = _import_file(file) if file else _import_module(plugin)
        except MinillamaError as error:
            raise ConfigError(f"plugins.{index} = {plugin!r}: {error}") from None
        except (Exception, SystemExit) as error:  # a plugin that exits must not end a run as done
            place = ""
            trace = error.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code.co_filename == file:
                    place = f" (line {trace.tb_lineno})"
                trace = trace.tb_next
            raise ConfigError(
                f"plugins.{index} = {plugin!r}: {type(error).__name__}: {error}{place}"
            ) from error


def plugin_source_hash(plugins: Sequence[str]) -> str:
    """Return a SHA-256 of the source of ``plugins`` as they are loaded now; empty without any.

    Of a package it covers every ``.py`` file; what a plugin imports from elsewhere is not covered.

    Raises:
        ConfigError: a plugin is missing, raises or exits.
    """
    load_plugins(plugins)
    digest = hashlib.sha256()
    for plugin in plugins:
        file = plugin.endswith(".py")
        module = _LOADED_PLUGINS[str(Path(plugin).expanduser().resolve()) if file else plugin]
        for name, source in _SOURCES[module.__name__]:
            digest.update(f"{name} {len(source)}\n".encode() + source)
    return digest.hexdigest() if plugins else ""


_SOURCES: dict[str, list[tuple[str, bytes]]] = {}
"""The source of each loaded plugin, read when it was imported: the file may change afterwards."""


def _read_sources(module: ModuleType) -> list[tuple[str, bytes]]:
    file = Path(getattr(module, "__file__", None) or "")
    if not file.is_file():  # built in, or a namespace package
        return [(module.__name__, b"")]
    if not hasattr(module, "__path__"):
        return [(file.name, file.read_bytes())]
    root = file.parent
    return [(p.relative_to(root).as_posix(), p.read_bytes()) for p in sorted(root.rglob("*.py"))]


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module = importlib.import_module(name)
    _SOURCES[name] = _SOURCES[module.__name__] = _read_sources(module)
    return module


def _import_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise FileNotFoundError("no such file")
    stem = re.sub(r"\W", "_", Path(path).stem)  # a dot would make it a module inside another
    name = f"minillama_plugin_{stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _SOURCES[name] = [(Path(path).name, Path(path).read_bytes())]
    # As after an import: dataclasses and pickle look a class's module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _empty_stdin() -> Iterator[None]:
    """Make stdin empty: a read from a worker's stdin would never return."""
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before
