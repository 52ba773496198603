"""How far a run has come, how it ended, and its summary.json."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import minillama
from minillama import launch
from minillama.config import RunConfig
from minillama.config.run import deciding_fields
from minillama.formatting import MISSING, format_duration, format_number, html_table
from minillama.plugins import plugin_source_hash
from minillama.training.stability import (
    MIN_STEPS_FOR_PLATEAU,
    SPIKE_WINDOW,
    distance_to_collapse,
    is_spike,
    is_still_falling,
)

Fate = Literal["ok", "diverged", "collapsed", "undertrained"]

RECENT_LOSSES = 10
"""The summary's ``train_loss`` is the mean of this many logged training losses."""


def fate(
    final_loss: float, init_loss: float, unigram_entropy: float, *, still_falling: bool = False
) -> Fate:
    """Return how a run ended, by its final validation loss; all in nats per token.

    ``diverged``: not finite, or no better than at init.  ``collapsed`` or ``undertrained``:
    otherwise, and not better by ``COLLAPSE_MARGIN`` than the unigram entropy, which counting tokens
    gives; undertrained if the loss is still falling (see
    :func:`~minillama.training.stability.is_still_falling`), so that more steps would help.  A check
    for NaN alone misses a collapse, which is how post-norm models fail.
    """
    if not math.isfinite(final_loss) or final_loss >= init_loss:
        return "diverged"
    if distance_to_collapse(final_loss, unigram_entropy) < 0:
        return "ok"
    return "undertrained" if still_falling else "collapsed"


@dataclass
class Progress:
    """The counts and losses of a run so far: plain numbers, saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of the whole run, validation and saving included
    training_seconds: float = 0.0
    validation_seconds: float = 0.0
    starting_seconds: float = 0.0  # not in seconds: process, imports, data, model
    evaluated_step: int = -1
    init_val_loss: float | None = None
    val_loss: float | None = None
    val_perplexity: float | None = None
    val_bits_per_byte: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    recent_losses: list[float] = field(default_factory=list)
    skipped: int = 0
    skipped_in_a_row: int = 0
    spikes: int = 0
    losses_before: list[float] = field(default_factory=list)  # finite ones, to detect spikes
    quarter_sums: list[float] = field(default_factory=lambda: [0.0] * 4)  # of training losses
    quarter_steps: list[int] = field(default_factory=lambda: [0] * 4)

    def count_step(self, loss: float, n_tokens: int, steps: int, *, skipped: bool) -> bool:
        """Count a step of ``steps``, its update applied or skipped; return whether it is a spike.

        A spike is a loss far above those before it.
        """
        quarter = min(4 * self.step // steps, 3)
        if math.isfinite(loss):
            self.quarter_sums[quarter] += loss
            self.quarter_steps[quarter] += 1
        self.step += 1
        self.tokens += n_tokens
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not math.isfinite(loss):
            return False
        spike = is_spike(loss, self.losses_before)
        self.spikes += spike
        self.losses_before = [*self.losses_before, loss][-SPIKE_WINDOW:]
        return spike

    @property
    def still_falling(self) -> bool:
        """Whether the training loss fell all along the run, so that more steps would lower it.

        Fewer steps than ``MIN_STEPS_FOR_PLATEAU`` count as falling.
        """
        if self.step < MIN_STEPS_FOR_PLATEAU:
            return True
        quarters = [
            total / n if n else math.nan
            for total, n in zip(self.quarter_sums, self.quarter_steps, strict=True)
        ]
        known = self.init_val_loss if self.init_val_loss is not None else math.nan
        return is_still_falling(known, quarters)

    def add_loss(self, loss: float) -> None:
        """Remember a logged training loss for the mean of the last few."""
        self.recent_losses = [*self.recent_losses, loss][-RECENT_LOSSES:]

    def add_validation(self, result: Mapping[str, Any]) -> bool:
        """Store the result of validating this step; return whether it is the best so far.

        The loss at init does not count: the best is a model that was trained.
        """
        self.evaluated_step = self.step
        self.val_loss = result["loss"]
        self.val_perplexity = result["perplexity"]
        self.val_bits_per_byte = result["bits_per_byte"]
        assert self.val_loss is not None
        if self.step == 0:
            self.init_val_loss = self.val_loss
            return False
        if self.best_val_loss is not None and self.val_loss >= self.best_val_loss:
            return False
        self.best_val_loss, self.best_step = self.val_loss, self.step
        return True


class Summary(dict[str, Any]):
    """A run's summary, which a notebook shows as a small table."""

    def _repr_html_(self) -> str:
        shown = {
            "fate": self["fate"] or "unfinished",
            "validation loss": _shown(self["val_loss"], "nats per token"),
            "bits per byte": _shown(self["val_bits_per_byte"]),
            "parameters": f"{self['n_params']:,}",
            "steps": f"{self['steps']:,}",
            "time": format_duration(self["seconds"]),
        }
        return html_table(str(self["name"]), shown.items())


def _shown(value: float | None, unit: str = "") -> str:
    return MISSING if value is None else f"{format_number(value, 4)} {unit}".rstrip()


def summarise(
    config: RunConfig,
    progress: Progress,
    facts: Mapping[str, Any],
    *,
    fate: Fate | None,
    sample: str | None = None,
) -> Summary:
    """Return the summary of a run; what is unknown or not finite is None.

    Args:
        config: resolved.
        progress: how far the run came.
        facts: what stays the same through the run: counts, hashes, the device.
        fate: None while the run is not finished.
        sample: the text that the model generated.
    """
    ended = fate is not None
    reached = ended and progress.step == config.train.steps == progress.evaluated_step
    out_dir = str(config.out_dir)
    numbers = {
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "training_seconds": progress.training_seconds,
        "validation_seconds": progress.validation_seconds,
        "starting_seconds": progress.starting_seconds,
        "tokens_per_s": progress.tokens / progress.training_seconds if progress.tokens else None,
        "train_loss": _mean(progress.recent_losses),
        "val_loss": progress.val_loss if reached else None,
        "val_perplexity": progress.val_perplexity if reached else None,
        "val_bits_per_byte": progress.val_bits_per_byte if reached else None,
        "best_val_loss": progress.best_val_loss,
        "best_step": progress.best_step,
        "init_val_loss": progress.init_val_loss,
        "skipped": progress.skipped,
        "spikes": progress.spikes,
        "distance_to_collapse": (
            distance_to_collapse(progress.val_loss, facts["unigram_entropy"])
            if reached and progress.val_loss is not None
            else None
        ),
    }
    return Summary(
        {
            "name": config.name,
            "fate": fate,
            "finished": ended,
            "still_falling": progress.still_falling if ended else None,
            **{name: _finite(value) for name, value in numbers.items()},
            **facts,
            "seed": config.train.seed,
            "config_hash": hash_config(config),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "minillama": minillama.__version__,
            },
            "threads": torch.get_num_threads(),
            "machine": f"{platform.platform()}, {os.cpu_count()} cores",
            "sample": sample,
            "command": launch.command(
                "train", f"{out_dir}/config.yaml", f"out_dir={out_dir}-again"
            ),
        }
    )


def hash_config(config: RunConfig) -> str:
    """Return a SHA-256 of all that decides a run's numbers, the source of its plugins included."""
    fields = deciding_fields(config) | {"plugins": plugin_source_hash(config.plugins)}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
