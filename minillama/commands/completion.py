"""`minillama completion`: a script for the shell that completes commands, configs and run folders.

The script answers by itself; a Tab starts no Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

import shtab

from minillama.config.shipped import shipped_configs

_CONFIGS = dict.fromkeys(("bash", "zsh"), "_minillama_configs")
_RUNS = dict.fromkeys(("bash", "zsh"), "_minillama_runs")

COMPLETERS = {
    "CONFIG": _CONFIGS,
    "CHECKPOINT": _RUNS,
    "RUN": _RUNS,
    "DIR": _RUNS,
    "FILE": shtab.FILE,
    "PATH": shtab.FILE,
}
"""What completes an argument, by its metavar."""

_BASH = """\
_minillama_configs() {{
  compgen -W {names} -- "$1"
  compgen -f -X '!*.y?(a)ml' -- "$1"
  compgen -d -- "$1"
}}
_minillama_runs() {{
  local folder
  for folder in "$1"* runs/"$1"*; do
    if [ -f "$folder/config.yaml" ] || [ -f "$folder/ablation.yaml" ]; then echo "$folder"; fi
  done
  compgen -d -- "$1"
}}
"""

_ZSH = """\
_minillama_configs() {{
  compadd -- {names}
  _files -g '*.(yaml|yml)'
}}
_minillama_runs() {{
  local -a found
  found=(runs/*/config.yaml(N:h) runs/*/ablation.yaml(N:h))
  compadd -a -- found
  _files -/
}}
"""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of ``parser`` for ``shell``, bash or zsh."""
    for action in _actions(parser):
        if isinstance(action.metavar, str) and action.metavar in COMPLETERS:
            # What shtab reads; argparse itself has no such attribute.
            vars(action)["complete"] = COMPLETERS[action.metavar]
    names = list(shipped_configs())
    if shell == "bash":
        preamble = "shopt -s extglob\n" + _BASH.format(names=shlex.quote(" ".join(names)))
    else:
        preamble = _ZSH.format(names=shlex.join(names))
    return str(shtab.complete(parser, shell, preamble=preamble))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
