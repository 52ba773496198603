"""A user's own modules, imported so that what they register is known."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from minillama.errors import ConfigError, MinillamaError
from minillama.files import sha256_of_file

_LOADED_PLUGINS: dict[str, ModuleType] = {}


def load_plugins(plugins: Sequence[str]) -> None:
    """Import each plugin, once a process, so that what it registers is known.

    A plugin is a module's dotted name or the path of a ``.py`` file; both are seen from the current
    folder.

    Raises:
        ConfigError: a plugin is missing or raises.
    """
    for index, plugin in enumerate(plugins):
        is_file = plugin.endswith(".py")
        key = str(Path(plugin).resolve()) if is_file else plugin
        if key in _LOADED_PLUGINS:
            continue
        try:
            if not is_file:
                if "" not in sys.path and str(Path.cwd()) not in sys.path:
                    sys.path.append(str(Path.cwd()))
                _LOADED_PLUGINS[key] = importlib.import_module(plugin)
                continue
            if not Path(key).is_file():
                raise FileNotFoundError("no such file")
            _LOADED_PLUGINS[key] = _import_file(key)
        except MinillamaError as error:
            raise ConfigError(f"plugins.{index} = {plugin!r}: {error}") from None
        except (Exception, SystemExit) as error:
            place = ""
            trace = error.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code.co_filename == key:
                    place = f" (line {trace.tb_lineno})"
                trace = trace.tb_next
            raise ConfigError(
                f"plugins.{index} = {plugin!r}: {type(error).__name__}: {error}{place}"
            ) from error


def plugin_hashes(plugins: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 (hex) of each plugin's source; of a package, of all its modules.

    Raises:
        ConfigError: a plugin is missing or raises.
    """
    load_plugins(plugins)
    hashes = {}
    for plugin in plugins:
        key = str(Path(plugin).resolve()) if plugin.endswith(".py") else plugin
        file = Path(_LOADED_PLUGINS[key].__file__ or "")
        files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
        hashes[plugin] = sha256_of_file(*(path for path in files if path.is_file()))
    return hashes


def _import_file(path: str) -> ModuleType:
    stem = re.sub(r"\W", "_", Path(path).stem)  # a dot would make it a module inside another
    name = f"minillama_plugin_{stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As after an import: dataclasses and pickle look a class's module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
