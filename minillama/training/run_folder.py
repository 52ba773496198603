"""A run's folder: who may write into it, what it holds, what a resume may change.

runs/NAME/ config.yaml  metrics.jsonl  summary.json  tensorboard/  report.html  report.png
           checkpoints/ step-000100/ …  last → step-000200  best → step-000100
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minillama import launch
from minillama.config import RunConfig
from minillama.config.fields import NO_EFFECT, RESUMABLE
from minillama.config.loading import flatten
from minillama.config.run import to_yaml, with_mark
from minillama.errors import ConfigError, DivergedError, FieldError, RunFolderError
from minillama.files import (
    explain_write_errors,
    lock,
    remove_folder,
    remove_unfinished,
    replace_link,
    write_atomic,
)
from minillama.training.checkpoint_folders import step_folders, step_of
from minillama.training.outcome import hash_config

OURS = (
    "config.yaml",
    "metrics.jsonl",
    "summary.json",
    "report.html",
    "report.png",
    "checkpoints/last",
    "checkpoints/best",
    "checkpoints/step-*",
    "checkpoints",
    "tensorboard/events.out.tfevents.*",
    "tensorboard",
    ".torchrun",
)
"""What an overwritten run loses, in this order; a folder only if nothing else is in it."""

MAY_CHANGE = with_mark(NO_EFFECT) | with_mark(RESUMABLE)
"""The fields in which a resumed run may differ from its beginning."""

_log = logging.getLogger("minillama")


class RunFolder:
    """The folder of one run; get it from :meth:`claim`, which keeps all others out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self._job = path / ".torchrun"

    @classmethod
    @contextmanager
    def claim(cls, path: Path, *, resume: bool, overwrite: bool) -> Iterator[RunFolder]:
        """Make the folder, make sure that it can be written, and hold it alone.

        Raises:
            ConfigError: it is a file, or it holds a run and nothing says what is to become of it.
            RunFolderError: it cannot be written, or another run is writing into it now.
        """
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite exclude each other; give one of them")
        for place in (path, *path.parents):
            if place.exists() and not place.is_dir():
                raise ConfigError(f"out_dir = {path}: {place} is a file; name a folder")
        folder = cls(path)
        with explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            # Without a name of its own, so that two that begin at once do not miss their file.
            with tempfile.TemporaryFile(dir=path) as trial:
                trial.write(b"this folder can be written")
                trial.flush()
                os.fsync(trial.fileno())
        busy = (
            f"{path}: another run is writing into this folder; wait for it, "
            "or choose another out_dir"
        )
        with lock(path / ".lock", busy=busy, timeout=0):
            folder._refuse_to_mix(resume=resume, overwrite=overwrite)
            with explain_write_errors(path):
                remove_unfinished(path)
                remove_unfinished(folder.checkpoints)
            yield folder

    def _refuse_to_mix(self, *, resume: bool, overwrite: bool) -> None:
        here = (self.config, self.metrics, self.summary)
        if resume or overwrite or not (any(p.exists() for p in here) or self.newest()):
            return
        summary = self.read_summary()
        what = "a finished run" if summary and summary["finished"] else "an unfinished run"
        raise ConfigError(
            f"{self.path} already holds {what}; --resume goes on with it, --overwrite replaces it, "
            "out_dir=FOLDER keeps it"
        )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say of a fault in writing what is safe, and how to go on.

        Raises:
            RunFolderError: the body met one.
        """
        try:
            with explain_write_errors(self.path):
                yield
        except RunFolderError as error:
            newest = self.newest()
            safe = f"{newest} is whole" if newest else "no checkpoint was written before"
            raise RunFolderError(
                f"{error}; {safe}; make room or choose another out_dir, then go on by --resume"
            ) from error

    def restarted(self) -> bool:
        """Tell whether torchrun has started the run that is in here again, after a death.

        A run of before, which this one was refused to mix with or was to replace, is another.
        """
        try:
            job = self._job.read_text(encoding="utf-8")
        except OSError:
            return False
        return launch.restarts() > 0 and job == launch.job_id()

    def begin(self, config: RunConfig) -> None:
        """Write the config and make room for checkpoints; an older summary is true no longer."""
        if launch.by_torchrun():
            write_atomic(self._job, launch.job_id())
        self.summary.unlink(missing_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        write_atomic(self.config, to_yaml(config))

    def clear(self) -> None:
        """Remove what a run leaves, and nothing that is not ours."""
        for pattern in OURS:
            for path in self.path.glob(pattern):
                if path.is_symlink() or path.is_file():
                    path.unlink()
                elif path.name not in ("checkpoints", "tensorboard"):
                    shutil.rmtree(path)
                elif not any(path.iterdir()):
                    path.rmdir()

    # ---------------------------------------------------------------------------- checkpoints

    def newest(self) -> Path | None:
        """Return the newest checkpoint; its name alone says that it is whole."""
        folders = step_folders(self.checkpoints)
        return folders[-1] if folders else None

    def holds(self, step: int) -> bool:
        """Tell whether the checkpoint of ``step`` is there."""
        return self._step_folder(step).exists()

    def save(
        self, step: int, best_step: int | None, keep_last: int, write: Callable[[Path], None]
    ) -> None:
        """Let ``write`` make the checkpoint of ``step``, unless it is there, and drop older ones.

        The ``keep_last`` newest stay, and the best.
        """
        if not self.holds(step):
            write(self._step_folder(step))
        self.link(step, best_step)
        folders = step_folders(self.checkpoints)
        kept = {best_step, *(step_of(folder) for folder in folders[-keep_last:])}
        for folder in folders:
            if step_of(folder) not in kept:
                remove_folder(folder)

    def link(self, step: int, best_step: int | None) -> None:
        """Let ``last`` and ``best`` lead to the checkpoints of these steps."""
        for name, target in (("last", step), ("best", best_step)):
            link = self.checkpoints / name
            if target is None or not self.holds(target):
                if link.is_symlink():
                    link.unlink()
            elif not (link.is_symlink() and link.resolve() == self._step_folder(target).resolve()):
                replace_link(link, self._step_folder(target))

    def _step_folder(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    # -------------------------------------------------------------------------------- summary

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json at once."""
        write_atomic(self.summary, json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        """Return summary.json, or None where there is none that can be read."""
        try:
            summary = json.loads(self.summary.read_bytes())
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) and "finished" in summary else None

    def finished(self, config: RunConfig, *, has_checkpoint: bool) -> dict[str, Any] | None:
        """Return the summary of a run that has nothing left to do.

        Raises:
            DivergedError: it ended by divergence, as it would again with this config.
            ConfigError: it has finished with another config, and no checkpoint to go on from.
        """
        summary = self.read_summary()
        if summary is None or not summary["finished"]:
            return None
        same = summary.get("config_hash") == hash_config(config)
        if summary["val_loss"] is None and has_checkpoint and not same:
            return None
        if summary["val_loss"] is None:
            raise DivergedError(
                f"{self.path}: this run diverged after step {summary['steps']}, as it would again; "
                "change its config, such as optim.lr, and start it with --overwrite, or go on by "
                "train.on_nonfinite=skip"
            )
        if not has_checkpoint and not same:
            raise ConfigError(
                f"{self.path} holds the finished run of another config and no checkpoint to go on "
                "from; --overwrite replaces it, out_dir=FOLDER keeps it"
            )
        if summary["steps"] != config.train.steps:
            return None
        _log.info("%s: this run has already finished its %d steps", self.path, summary["steps"])
        return summary


# ------------------------------------------------------------------------------------------ resume


def check_resumable(saved: RunConfig, config: RunConfig, step: int, where: Path) -> None:
    """Compare the config of a resumed run with the one that its checkpoint, of ``step``, has.

    Raises:
        ConfigError: they differ in what decides the run's numbers; lists all such fields.
    """
    # What each of several processes can hold is another number than what one can.
    parallel = {saved.train.parallel, config.train.parallel} != {"none"}
    may_change = MAY_CHANGE | {"train.micro_batch_size"} if parallel else MAY_CHANGE
    faults = [
        FieldError(name, now, f"the run began with {before!r}")
        for name, (before, now) in differences(saved, config).items()
        if name not in may_change
    ]
    if step > config.train.steps:
        rule = f"the run has already made {step} steps"
        faults.append(FieldError("train.steps", config.train.steps, rule))
    if faults:
        where = Path(f"{where} cannot be resumed with another config")
        raise ConfigError.of(str(where), faults)


def differences(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the dotted names of all fields in which two configs differ, with both values."""
    a, b = flatten(one.model_dump(mode="json")), flatten(other.model_dump(mode="json"))
    return {n: (a.get(n), b.get(n)) for n in sorted(a | b) if a.get(n) != b.get(n)}
