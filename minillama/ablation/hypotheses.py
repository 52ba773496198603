"""The record of an ablation's hypotheses: when each was written, and what had been seen by then.

A hypothesis is planned if no run that decides it had ended when it was recorded.  Once one has, the
record keeps it: it does not change, and it is reported even if the config drops it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minillama.ablation.grid import Place, arms
from minillama.config.ablation import AblationConfig
from minillama.config.hypotheses import Hypothesis
from minillama.errors import ConfigError, FieldError, RunFolderError
from minillama.files import explain_write_errors, write_atomic
from minillama.registry import unknown_name

RECORD_FILE = "hypotheses.json"


@dataclass(frozen=True)
class RecordedHypothesis:
    """A hypothesis with its baseline and margin filled in.

    ``time`` (ISO 8601, UTC) says when it was recorded, and ``n_seen`` how many of the runs that
    decide it had ended by then; ``sha256`` is of its fields.
    """

    hypothesis: Hypothesis
    time: str
    n_seen: int
    sha256: str

    @property
    def is_planned(self) -> bool:
        """Whether it was recorded before any run that decides it had ended."""
        return self.n_seen == 0


def hypotheses_of(config: AblationConfig) -> list[Hypothesis]:
    """Return the config's hypotheses with their baselines and margins filled in.

    Raises:
        ConfigError: lists each that names an arm or a rate that the grid does not have.
    """
    grid_arms = {arm.name: arm for arm in arms(config)}
    out, errors = [], []
    for i, given in enumerate(config.hypotheses):
        arm = grid_arms.get(given.arm)
        baseline = given.baseline or (arm.baseline if arm else config.baseline)
        for field, name in (("arm", given.arm), ("baseline", baseline)):
            path = f"hypotheses.{i}.{field}"
            if name not in grid_arms:
                errors.append(FieldError(path, name, unknown_name("arm", name, grid_arms)))
            elif given.rate != "best" and given.rate not in grid_arms[name].lrs:
                rule = f"{given.rate:g} is not a rate of {name}"
                errors.append(FieldError(f"hypotheses.{i}.rate", given.rate, rule))
        if arm and baseline == given.arm:
            rule = f"is the baseline, {baseline}; name another baseline for it"
            errors.append(FieldError(f"hypotheses.{i}.arm", given.arm, rule))
        margin = (given.margin or config.margin) if given.claim == "same" else None
        out.append(given.model_copy(update={"baseline": baseline, "margin": margin}))
    if errors:
        raise ConfigError.of(f"ablation {config.name}", errors)
    return out


def record_hypotheses(config: AblationConfig, ended: Iterable[Place]) -> None:
    """Write the config's hypotheses into its folder; those recorded before keep their time.

    Args:
        config: of the ablation.
        ended: the places of all runs in the folder that have ended.

    Raises:
        ConfigError: one that was recorded is another now, and runs that decide it have ended.
        RunFolderError: the file is damaged or cannot be written.
    """
    folder, places = Path(config.out_dir), list(ended)
    now = datetime.now(UTC).isoformat("T", "seconds")
    wanted = {
        each.name: RecordedHypothesis(each, now, _n_seen(each, config, places), _hash(each))
        for each in hypotheses_of(config)
    }
    kept, changed = {}, []
    for old in read_hypotheses(folder):
        name = old.hypothesis.name
        new = wanted.get(name)
        if new is not None and new.sha256 == old.sha256:
            kept[name] = old
        elif _n_seen(old.hypothesis, config, places):
            kept[name] = old
            if new is not None:
                changed.append(f"{name}, recorded {old.time}")
    if changed:
        raise ConfigError(
            f"hypotheses changed although runs that decide them have ended: {'; '.join(changed)}; "
            "restore them, and give what you expect now a name of its own, to be marked as late"
        )
    record = wanted | kept
    if record or (folder / RECORD_FILE).is_file():
        entries = [
            {**vars(each), "hypothesis": each.hypothesis.model_dump(mode="json")}
            for each in record.values()
        ]
        with explain_write_errors(folder):
            write_atomic(folder / RECORD_FILE, json.dumps(entries, indent=2) + "\n")


def read_hypotheses(folder: Path) -> tuple[RecordedHypothesis, ...]:
    """Return the hypotheses that were recorded in an ablation's folder.

    Raises:
        RunFolderError: the file is damaged, or a hypothesis in it was edited.
    """
    path = folder / RECORD_FILE
    if not path.is_file():
        return ()
    try:
        record = tuple(
            RecordedHypothesis(
                Hypothesis(**entry["hypothesis"]),
                str(entry["time"]),
                int(entry["n_seen"]),
                str(entry["sha256"]),
            )
            for entry in json.loads(path.read_text(encoding="utf-8"))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(f"{path} is damaged: {error!r}; restore it from a copy") from None
    edited = [each.hypothesis.name for each in record if _hash(each.hypothesis) != each.sha256]
    if edited:
        raise RunFolderError(
            f"{path} was edited after it was written ({', '.join(edited)}); restore it from a copy"
        )
    return record


def _n_seen(hypothesis: Hypothesis, config: AblationConfig, ended: Sequence[Place]) -> int:
    """Return how many of the runs that decide the hypothesis have ended."""
    h = hypothesis
    fresh_only = config.stages is not None and h.rate == "best" and h.measure != "S"
    return sum(
        place.arm in (h.arm, h.baseline)
        and (h.rate == "best" or place.lr == h.rate)
        and not (fresh_only and place.seed in config.seeds)
        for place in ended
    )


def _hash(hypothesis: Hypothesis) -> str:
    fields: dict[str, Any] = hypothesis.model_dump(mode="json")
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
