"""`minillama doctor`: whether this installation works, and what a bug report needs.

    packages, extras, cache ──────────────────────────────┐
    self_test.py, in a process of its own ──checks────────┴──▶ a list, or JSON

The self-test runs in another process, so that a torch that cannot be imported, or a kernel that
ends its process, is a line of the list as well.  Nothing here imports torch.
"""

from __future__ import annotations

import json
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from minillama import __version__
from minillama.errors import MinillamaError
from minillama.files import cache_folder
from minillama.formatting import format_bytes, join_words, pluralize, text_table
from minillama.launch import module_command, processor_name

SELF_TEST_TIMEOUT_S = 900
"""Compiling the kernels for all dtypes takes a minute on a slow machine."""

LITTLE_SPACE = 1 << 30
"""Bytes; a tokenized text and the checkpoints of a small run need about this much."""


@dataclass(frozen=True)
class Check:
    """A line of the list.

    Attributes:
        name: what was looked at.
        state: ``ok``; ``note``: it works, with what the detail says missing; ``broken``.
        detail: what was found.
    """

    name: str
    state: Literal["ok", "note", "broken"]
    detail: str


def diagnose(*, as_json: bool) -> Iterator[str]:
    """Yield the result of all checks as text for people or as one JSON object.

    Raises:
        MinillamaError: something is broken; after the result.
    """
    checks = [_python(), *_packages(), _cache(), *_self_test()]
    broken = [check.name for check in checks if check.state == "broken"]
    if as_json:
        report = {
            "minillama": __version__,
            "works": not broken,
            "checks": [asdict(check) for check in checks],
        }
        yield _without_home(json.dumps(report, indent=2)) + "\n"
    else:
        rows = [(check.state, check.name, check.detail) for check in checks]
        yield _without_home(f"minillama {__version__}\n{text_table(rows)}\n\n")
        yield (
            "With a bug report, send the lines above (no path of your home folder is in them), "
            "the command\nwith all that it printed, and the run folder's config.yaml.\n"
        )
    if broken:
        noun = "does" if len(broken) == 1 else "do"
        raise MinillamaError(f"{join_words(broken)} {noun} not work; see above")


def _without_home(text: str) -> str:
    """Replace the path of the user's home folder, which often holds a person's name, by ``~``."""
    try:
        home = Path.home()
    except RuntimeError:
        return text
    for path in (home, home.resolve()):
        if path != Path(path.anchor):
            text = text.replace(str(path), "~")
    return text


def _python() -> Check:
    found = f"Python {platform.python_version()}, {platform.platform()}, {processor_name()}"
    return Check("machine", "ok", found)


# ------------------------------------------------------------------------------------- packages


def _packages() -> Iterator[Check]:
    try:
        needed, extras = requirements()
    except PackageNotFoundError:
        yield Check("packages", "note", "minillama is not installed, only imported; pip install .")
        return
    if wrong := unmet(needed):
        yield Check("packages", "broken", f"{'; '.join(wrong)}; pip install -U minillama")
    else:
        found = ", ".join(f"{each.name} {version(each.name)}" for each in needed)
        yield Check("packages", "ok", found)
    missing = {extra: wrong for extra, each in extras.items() if (wrong := unmet(each))}
    installed = ", ".join(extra for extra in extras if extra not in missing) or "none"
    if not missing:
        yield Check("extras", "ok", installed)
        return
    reasons = "; ".join(f"{extra}: {', '.join(wrong)}" for extra, wrong in missing.items())
    command = f"pip install 'minillama[{','.join(missing)}]'"
    yield Check("extras", "note", f"{installed}; not {reasons} ({command})")


def requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """Return the packages that minillama needs, and those of each of its extras but ``dev``.

    Raises:
        PackageNotFoundError: minillama is not installed.
    """
    everything = [Requirement(text) for text in requires("minillama") or []]
    needed = [each for each in everything if _applies(each, "")]
    extras = metadata("minillama").get_all("Provides-Extra") or []
    return needed, {
        extra: [
            each
            for each in everything
            if each not in needed and each.name != "minillama" and _applies(each, extra)
        ]
        for extra in extras
        if extra != "dev"
    }


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def unmet(needed: Sequence[Requirement]) -> list[str]:
    """Return what is missing or of another version than ``needed``, in words."""
    wrong = []
    for each in needed:
        try:
            found = version(each.name)
        except PackageNotFoundError:
            wrong.append(f"{each.name} is missing")
            continue
        if not each.specifier.contains(found, prereleases=True):
            wrong.append(f"{each.name} is {found}, needed is {each.specifier}")
    return wrong


# ---------------------------------------------------------------------------------------- the rest


def _cache() -> Check:
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except (OSError, MinillamaError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return Check(
            "cache",
            "broken",
            f"{reason}: {cache_folder()}; set MINILLAMA_CACHE to a folder that can be written",
        )
    state: Literal["ok", "note"] = "ok" if free >= LITTLE_SPACE else "note"
    return Check("cache", state, f"{folder}, {format_bytes(free)} free")


def _self_test() -> Iterator[Check]:
    """Run self_test.py and yield its checks, and how it ended if not well."""
    command = module_command("minillama.commands.self_test")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SELF_TEST_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        limit = pluralize(SELF_TEST_TIMEOUT_S // 60, "minute")
        yield Check("self-test", "broken", f"it did not end within {limit}")
        return
    yield from (Check(**json.loads(line)) for line in done.stdout.splitlines())
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        yield Check("self-test", "broken", f"it was ended by {name} after the checks above")
    elif done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Check("self-test", "broken", last)
