"""`minillama compare`: where the configs of several runs differ, and what came of them.

Losses are put side by side only as far as they mean the same: in nats per token on the same tokens,
in bits per byte on the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from minillama.commands.runs import RunState, number, read_state
from minillama.config.loading import fields_of, flatten
from minillama.config.run import RunConfig
from minillama.errors import ConfigError
from minillama.formatting import (
    MISSING,
    format_duration,
    format_number,
    join_words,
    text_table,
)

NAMES_OF_THE_RUN = ("name", "out_dir")
"""Fields that differ between any two runs."""

HELD_OUT = ("data.source", "data.val_fraction", "data.split_seed")
"""What decides the validation text."""


class Figure(NamedTuple):
    """A row of the results: the key in summary.json, its label, how it is printed."""

    key: str
    label: str
    show: Callable[[float], str]


def _loss(value: float) -> str:
    return format_number(value, 4)


def _whole(value: float) -> str:
    return f"{value:,.0f}"


FIGURES = (
    Figure("val_loss", "validation loss, nats per token", _loss),
    Figure("best_val_loss", "best validation loss", _loss),
    Figure("val_bits_per_byte", "bits per byte", _loss),
    Figure("train_loss", "training loss, last logged", _loss),
    Figure("n_params", "parameters", _whole),
    Figure("tokens", "training tokens", _whole),
    Figure("tokens_per_s", "tokens/s", _whole),
    Figure("seconds", "time", format_duration),
)

SPEED = ("machine", "device", "threads", "processes")
"""What must be the same for two speeds to be compared."""


class Comparable(NamedTuple):
    """Which losses of the runs may be compared, and why not the others."""

    nats_per_token: bool
    bits_per_byte: bool
    why: str


def compare(folders: Sequence[str], *, as_json: bool) -> str:
    """Return the differences between the runs in ``folders`` and their results.

    Raises:
        ConfigError: fewer than two runs are named, or a folder contains none.
    """
    if len(folders) < 2:
        raise ConfigError("compare needs two run folders or more; `minillama runs` lists them")
    states = [_state(Path(folder)) for folder in folders]
    differing, comparable = differences(states), comparability(states)
    if as_json:
        return json.dumps(
            {
                "runs": [str(state.folder) for state in states],
                "config": differing,
                "results": [
                    {"fate": state.fate, "steps": state.steps}
                    | {figure.key: _value(state, figure.key) for figure in FIGURES}
                    for state in states
                ],
                "comparable": comparable._asdict(),
            },
            indent=2,
        )
    names = [state.name for state in states]
    if len(set(names)) < len(names):
        names = [str(state.folder) for state in states]
    table = [("", *names)]
    if differing:
        table += [(path, *map(_shown, values)) for path, values in differing.items()]
    else:
        table += [("(no field differs)", *[""] * len(names))]
    table += [("", *[""] * len(names)), ("fate", *[state.fate for state in states])]
    table += [("steps", *[f"{state.steps:,}" for state in states])]
    for figure in FIGURES:
        values = [_value(state, figure.key) for state in states]
        if any(value is not None for value in values):
            row = [MISSING if value is None else figure.show(value) for value in values]
            table.append((figure.label, *row))
    return "\n".join([text_table(table), "", *_notes(states, comparable)])


def _state(folder: Path) -> RunState:
    if (folder / "ablation.yaml").is_file():
        raise ConfigError(
            f"{folder} is an ablation; see its report: minillama report {folder}, or compare runs "
            "below its cells/"
        )
    if not folder.is_dir():
        raise ConfigError(f"there is no run folder {folder}; `minillama runs` lists them")
    return read_state(folder)


def differences(states: Sequence[RunState]) -> dict[str, list[Any]]:
    """Return the dotted names of the fields that differ, each with its value in every run.

    A field that an earlier version did not have counts with its default.
    """
    defaults = {
        path: field.default
        for path, field in fields_of(RunConfig)
        if field.default is not PydanticUndefined
    }
    configs = [flatten(state.config) for state in states]
    names = sorted({name for config in configs for name in config} - {*NAMES_OF_THE_RUN})
    values = {name: [c.get(name, defaults.get(name)) for c in configs] for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def comparability(states: Sequence[RunState]) -> Comparable:
    """Return which losses may be compared: those on the same text, cut into the same tokens.

    By the hashes in the summaries or, where an earlier version wrote none, by the config.
    """
    differing = differences(states)
    sources = [state.summary.get("source_sha256") for state in states]
    if None not in sources:
        other_text = len(set(sources)) > 1
    else:
        other_text = any(name.startswith("data.source") for name in differing)
    other_text = other_text or any(name in HELD_OUT for name in differing)
    if other_text:
        why = "the validation texts differ, so the losses cannot be compared"
        return Comparable(False, False, why)
    tokenizers = [state.summary.get("tokenizer_sha256") for state in states]
    if None not in tokenizers:
        other_tokens = len(set(tokenizers)) > 1
    else:
        counts = {state.summary.get("n_val_tokens") for state in states} - {None}
        settings = any(name.startswith("tokenizer.") for name in differing)
        other_tokens = settings or len(counts) > 1
    if other_tokens:
        why = "the tokenizers differ, so compare bits per byte, not losses per token"
        return Comparable(False, True, why)
    return Comparable(True, True, "")


def _notes(states: Sequence[RunState], comparable: Comparable) -> list[str]:
    notes = [comparable.why] if comparable.why else []
    differing = differences(states)
    if comparable.nats_per_token or comparable.bits_per_byte:
        if "data.seq_len" in differing:
            notes.append("data.seq_len differs: a longer window lowers the loss by itself")
        if sum(_value(state, "val_loss") is not None for state in states) > 1:
            notes.append(
                "one run each: a small difference may be chance; `minillama ablate` repeats over "
                "seeds and tests it"
            )
    other = [key for key in SPEED if len({state.summary.get(key) for state in states}) > 1]
    if other:
        notes.append(f"the speeds cannot be compared: {join_words(other)} differ")
    return notes


def _value(state: RunState, key: str) -> float | None:
    return state.val_loss if key == "val_loss" else number(state.summary.get(key))


def _shown(value: Any) -> str:
    if value is None:
        return MISSING
    return json.dumps(value) if isinstance(value, list | Mapping | bool) else str(value)
