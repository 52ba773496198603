"""The configs that are part of the package, used by name: ``minillama train tiny``.

They are the repository's ``configs/``; the wheel holds them as ``minillama/configs/``.
"""

from __future__ import annotations

from pathlib import Path

from minillama.errors import ConfigError
from minillama.registry import unknown_name

_PACKAGE = Path(__file__).parents[1]


def shipped_configs() -> dict[str, Path]:
    """Return the path of each shipped config by its name; runs first, then ablations."""
    installed = _PACKAGE / "configs"
    folder = installed if installed.is_dir() else _PACKAGE.parent / "configs"
    paths = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("ablations/*.yaml"))]
    return {path.stem: path for path in paths}


def find_config(config: str | Path) -> Path:
    """Return the path of ``config``: itself if it exists, else the shipped config of that name.

    Raises:
        ConfigError: ``config`` is a bare name, and neither a path nor a shipped config.
    """
    path = Path(config)
    if path.exists() or path.suffix or len(path.parts) != 1:
        return path
    known = shipped_configs()
    if path.name not in known:
        raise ConfigError(f"{unknown_name('config', path.name, known)}; or name a YAML file")
    return known[path.name]


def describe_configs() -> str:
    """Return a list of the shipped configs: name, path, and the first sentence of each."""
    lines = []
    for name, path in shipped_configs().items():
        comment = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        command = "ablate" if path.parent.name == "ablations" and name != "base" else "train"
        lines += [f"minillama {command} {name}", f"    {comment}", f"    {path}"]
    return "\n".join(lines)
