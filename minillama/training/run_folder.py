"""The folder of a run: who may write into it, what it contains, what a resume may change.

runs/NAME/ config.yaml  metrics.jsonl  summary.json  tensorboard/  report.html  report.png
           checkpoints/ step-000100/ …  last → step-000200  best → step-000100
"""

from __future__ import annotations

import errno
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
from minillama.data.prepare import Prepared
from minillama.errors import ConfigError, DivergedError, FieldError, RunFolderError
from minillama.files import (
    explain_write_errors,
    lock,
    remove_folder,
    remove_unfinished,
    replace_link,
    write_atomic,
)
from minillama.plugins import plugin_source_hash
from minillama.training.checkpoint_folders import resolve_checkpoint, step_folders, step_of
from minillama.training.summary import hash_config

OURS = (
    "config.yaml",
    "metrics.jsonl",
    "metrics.csv",
    "wandb_id",
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
"""What --overwrite removes, in this order; a folder only if nothing else is in it."""

MAY_CHANGE = with_mark(NO_EFFECT) | with_mark(RESUMABLE)
"""The fields that may change when a run is resumed.

What to do about a non-finite update is among them: a run that was stopped by one may continue from
its last checkpoint with another rule.
"""

_log = logging.getLogger("minillama")


class RunFolder:
    """The folder of one run; :meth:`claim` keeps all other processes out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self._job = path / ".torchrun"
        self._is_in_place: Callable[[], bool] = lambda: True  # until it is claimed

    @classmethod
    @contextmanager
    def claim(cls, path: Path, *, resume: bool, overwrite: bool) -> Iterator[RunFolder]:
        """Create the folder, make sure that it can be written, and lock it.

        Raises:
            ConfigError: it is a file, or it contains a run and neither flag is given.
            RunFolderError: it cannot be written, or another run is writing into it.
        """
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite exclude each other; give one of them")
        for place in (path, *path.parents):
            if place.exists() and not place.is_dir():
                raise ConfigError(f"out_dir = {path}: {place} is a file; name a folder")
        folder = cls(path)
        with explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            # An unnamed file: two runs that start at once must not remove each other's.
            with tempfile.TemporaryFile(dir=path) as trial:
                trial.write(b"this folder can be written")
                trial.flush()
                os.fsync(trial.fileno())
        busy = (
            f"{path}: another run is writing into this folder; wait for it, "
            "or choose another out_dir"
        )
        with lock(path / ".lock", busy=busy, timeout=0) as folder._is_in_place:
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
            f"{self.path} already contains {what}; --resume continues it, --overwrite replaces it, "
            "out_dir=FOLDER keeps it"
        )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Explain a write error: which checkpoint is safe, and how to continue.

        Raises:
            RunFolderError: the body raised an OSError, or the folder is no longer the one that was
                claimed.
        """
        if not self._is_in_place():
            raise RunFolderError(
                f"{self.path} was removed, moved or replaced while this run was writing into it; "
                "restore it, then run the same command again (`minillama train` with --resume)"
            )
        try:
            with explain_write_errors(self.path):
                yield
        except RunFolderError as error:
            newest = self.newest()
            safe = f"{newest} is complete" if newest else "no checkpoint was written before"
            raise RunFolderError(
                f"{error}; {safe}; {_remedy(error.__cause__)}, then run "
                "the same command again (`minillama train` with --resume)"
            ) from error

    def restarted(self) -> bool:
        """Return whether torchrun has restarted the run in this folder after a process died.

        An older run in this folder, started by another torchrun, does not count.
        """
        try:
            job = self._job.read_text(encoding="utf-8")
        except OSError:
            return False
        return launch.restarts() > 0 and job == launch.job_id()

    def begin(self, config: RunConfig) -> None:
        """Write the config, remove an outdated summary, and create the folder of checkpoints."""
        if launch.by_torchrun():
            write_atomic(self._job, launch.job_id())
        self.summary.unlink(missing_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        write_atomic(self.config, to_yaml(config))

    def clear(self) -> None:
        """Remove what a run writes, and nothing else."""
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
        """Return the newest checkpoint; it would not have its name if it were incomplete."""
        folders = step_folders(self.checkpoints)
        return folders[-1] if folders else None

    def own_checkpoint(self, path: str | Path) -> Path:
        """Return the checkpoint at ``path``, which must be one of this run.

        Raises:
            ConfigError: there is none, or it is in another folder.
        """
        checkpoint = resolve_checkpoint(path).resolve()
        if checkpoint.parent != self.checkpoints.resolve():
            raise ConfigError(
                f"{path} is not a checkpoint in {self.checkpoints}; init_from={path} begins a new "
                "run with its weights"
            )
        return checkpoint

    def remove_checkpoints_after(self, step: int) -> None:
        """Remove the checkpoints that a run resumed from ``step`` will write again."""
        for folder in step_folders(self.checkpoints):
            if step_of(folder) > step:
                remove_folder(folder)

    def has_checkpoint(self, step: int) -> bool:
        """Return whether the checkpoint of ``step`` exists."""
        return self._step_folder(step).exists()

    def save(
        self, step: int, best_step: int | None, keep_last: int, write: Callable[[Path], None]
    ) -> None:
        """Call ``write`` for the checkpoint of ``step``, unless it exists, and remove older ones.

        The ``keep_last`` newest are kept, and the best.
        """
        if not self.has_checkpoint(step):
            write(self._step_folder(step))
        self.link(step, best_step)
        folders = step_folders(self.checkpoints)
        kept = {best_step, *(step_of(folder) for folder in folders[-keep_last:])}
        for folder in folders:
            if step_of(folder) not in kept:
                remove_folder(folder)

    def link(self, step: int, best_step: int | None) -> None:
        """Point ``last`` and ``best`` at the checkpoints of these steps."""
        for name, target in (("last", step), ("best", best_step)):
            link = self.checkpoints / name
            if target is None or not self.has_checkpoint(target):
                if link.is_symlink():
                    link.unlink()
            elif not (link.is_symlink() and link.resolve() == self._step_folder(target).resolve()):
                replace_link(link, self._step_folder(target))

    def _step_folder(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    # -------------------------------------------------------------------------------- summary

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json atomically."""
        write_atomic(self.summary, json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        """Return summary.json, or None if it is missing or damaged."""
        try:
            summary = json.loads(self.summary.read_bytes())
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) and "finished" in summary else None

    def finished(self, config: RunConfig, *, has_checkpoint: bool) -> dict[str, Any] | None:
        """Return the summary of a run that is already finished, else None.

        Raises:
            DivergedError: it diverged, and would again with this config.
            ConfigError: it finished with another config, and has no checkpoint to continue from.
        """
        summary = self.read_summary()
        if summary is None or not summary["finished"]:
            return None
        same = summary.get("config_hash") == hash_config(config)
        if summary["val_loss"] is None and has_checkpoint and not same:
            return None
        if summary["val_loss"] is None:
            raise DivergedError(
                f"{self.path}: this run diverged after step {summary['steps']} and would again; "
                "change its config, such as optim.lr, and start it with --overwrite, or continue "
                "with train.on_nonfinite=skip"
            )
        if not has_checkpoint and not same:
            raise ConfigError(
                f"{self.path} contains the finished run of another config and no checkpoint to "
                "continue from; --overwrite replaces it, out_dir=FOLDER keeps it"
            )
        if summary["steps"] != config.train.steps:
            return None
        _log.info("%s: this run has already finished its %d steps", self.path, summary["steps"])
        return summary


def _remedy(error: BaseException | None) -> str:
    """Return what to do about a write error."""
    match getattr(error, "errno", None):
        case errno.EFBIG:
            return "raise the limit on a file's size (ulimit -f), or choose another out_dir"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "make the folder writable, or choose another out_dir"
        case errno.ENOENT | errno.ESTALE | errno.ENOTDIR:
            return "the folder was removed or replaced: restore it"
        case errno.EMFILE | errno.ENFILE:
            return "raise the limit on open files (ulimit -n)"
        case _:
            return "free some space or choose another out_dir"


# ------------------------------------------------------------------------------------------ resume

COMPARED_BY_CONTENT = ("data.source", "tokenizer.path", "plugins")
"""What these fields name may have moved: a resume compares hashes of the content instead."""


def content_hashes(config: RunConfig, prepared: Prepared) -> dict[str, Any]:
    """Return the hashes, saved with a checkpoint, of what :data:`COMPARED_BY_CONTENT` names."""
    return {
        "data_sha256": prepared.meta.data_sha256,
        "tokenizer_sha256": prepared.meta.tokenizer_sha256,
        "plugins_sha256": plugin_source_hash(config.plugins),
    }


def check_config(saved: RunConfig, config: RunConfig, step: int, where: Path) -> None:
    """Compare the config of a resumed run with that of its checkpoint, written at ``step``.

    Raises:
        ConfigError: they differ in fields that decide the run's numbers; lists all of them.
    """
    # How much fits into memory depends on how many processes share the model.
    parallel = {saved.train.parallel, config.train.parallel} != {"none"}
    may_change = MAY_CHANGE | {"train.micro_batch_size"} if parallel else MAY_CHANGE
    errors = [
        FieldError(name, now, f"the run began with {before!r}")
        for name, (before, now) in differences(saved, config).items()
        if name not in may_change and not name.startswith(COMPARED_BY_CONTENT)
    ]
    if step > config.train.steps:
        rule = f"the run has already made {step} steps"
        errors.append(FieldError("train.steps", config.train.steps, rule))
    if errors:
        where = Path(f"{where} cannot be resumed with another config")
        raise ConfigError.of(str(where), errors)


def check_content(state: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Compare the content hashes in the ``state`` of a resumed run's checkpoint with those of now.

    Raises:
        ConfigError: the text, the tokenizer or the source of a plugin has changed.
    """
    for name, what in (
        ("data_sha256", "data.source no longer gives the text"),
        ("tokenizer_sha256", "tokenizer.path no longer gives the tokenizer"),
        ("plugins_sha256", "plugins no longer have the source code"),
    ):
        if state[name] != now[name]:
            raise ConfigError(
                f"{where} cannot be resumed: {what} that the run began with; restore it "
                "(or the version of minillama that the run began with), or start again: "
                f"delete {where}, or use `minillama train` with --overwrite"
            )


def differences(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the dotted names of all fields in which two configs differ, with both values."""
    a, b = flatten(one.model_dump(mode="json")), flatten(other.model_dump(mode="json"))
    return {n: (a.get(n), b.get(n)) for n in sorted(a | b) if a.get(n) != b.get(n)}
