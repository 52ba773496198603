"""Where checkpoints are on disk, and what their files are called.  Nothing here reads a tensor."""

from __future__ import annotations

import re
from pathlib import Path

from minillama.errors import ConfigError

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.model"
TRAINER_STATE, OPTIMIZER = "trainer_state.pt", "optimizer"
_STEP_NAME = re.compile(r"step-\d{6,}")


def step_folders(checkpoints: Path) -> list[Path]:
    """Return the checkpoints of a run's ``checkpoints/``, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [p for p in checkpoints.iterdir() if _STEP_NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """Return the step that a ``step-NNNNNN`` folder was written at."""
    return int(folder.name.removeprefix("step-"))


def resolve_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint that ``path`` names: itself, or a run folder's best, else its last.

    Raises:
        ConfigError: there is none; the message says what there is.
    """
    path = Path(path)
    try:
        if _is_checkpoint(path):
            return path
        for folder in (path / "checkpoints", path):
            named = [folder / "best", folder / "last", *reversed(step_folders(folder))]
            for candidate in named:
                if _is_checkpoint(candidate):
                    return candidate
        found = _what_is_there(path)
    except OSError as error:  # no permission, or no possible name
        found = error.strerror or str(error)
    raise ConfigError(f"no checkpoint at {path}: {found}")


def _is_checkpoint(path: Path) -> bool:
    if not path.is_dir():
        return False
    files = (WEIGHTS, CONFIG, TRAINER_STATE)
    named = _STEP_NAME.fullmatch(path.resolve().name) is not None
    return named or any((path / file).exists() for file in files)


def _what_is_there(path: Path) -> str:
    if path.exists() and not path.is_dir():
        return f"it is a file; name the folder, {path.parent}"
    if not path.exists():
        parent = next(p for p in path.absolute().parents if p.is_dir())
        return f"no such folder; {parent} holds {_names_in(parent)}"
    if (path / "config.yaml").exists():
        return "this run has written none yet; go on with it by --resume"
    return f"the folder holds {_names_in(path)}; name a run folder or one of its checkpoints"


def _names_in(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"
