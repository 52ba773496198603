"""Unstable training: skipped updates, loss spikes, lost weights, and what to advise.

    loss, gradient norm     on_nonfinite = stop      skip                       run_on
    both finite             apply                    apply                      apply
    one is not              stop                     skip, max_skips in a row   apply
    float16, loss finite    skip, max_skips in a row skip, max_skips in a row   skip

A skipped update changes no weight and no moment of the optimizer.  Its step still counts: the
schedule and the batches advance, so a run that skips updates is resumed to the bit like any other.
In float16 a non-finite gradient usually means that the loss scale was too high, and the scaler
lowers it; so it never stops a run at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from minillama.config import RunConfig
from minillama.config.placement import PLACEMENTS
from minillama.config.run import TrainConfig
from minillama.errors import DataError
from minillama.formatting import join_words

if TYPE_CHECKING:  # a report, which knows spikes too, does without torch
    from torch import Tensor

Decision = Literal["apply", "skip", "stop"]

COLLAPSE_MARGIN = 0.1
"""Nats per token by which a model must beat the unigram entropy, or it has only learned counts."""

STILL_FALLING_SHARE = 0.05
"""Share of its whole fall by which a loss must fall in mid-run to count as still falling.

Measured with 300 steps of ``configs/ablations/base.yaml`` and its variants: at rates too low the
share is 0.1 and more, at rates too high and after a collapse at most 0.03."""

MIN_STEPS_FOR_PLATEAU = 16
"""Fewer steps than this, four a quarter, cannot show that a loss has stopped falling."""

SPIKE_SIGMAS = 6.0
SPIKE_WINDOW = 128
"""A loss above mean + SPIKE_SIGMAS · σ of the last SPIKE_WINDOW finite losses is a spike."""

MIN_SPIKE_HISTORY = 16
"""Fewer losses than this are too few to judge by.  (The report's ``spike_score`` waits for a full
window, which a running count cannot.)"""


def decide_update(
    train: TrainConfig, loss: float, grad_norm: float, skipped_in_a_row: int
) -> Decision:
    """Return whether to apply an update; ``skipped_in_a_row`` counts the skips just before it."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return "apply"
    scaled = train.dtype == "float16"
    if train.on_nonfinite == "run_on":
        return "skip" if scaled else "apply"
    if train.on_nonfinite == "skip" or (scaled and math.isfinite(loss)):
        return "skip" if skipped_in_a_row < train.max_skips else "stop"
    return "stop"


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Return whether a finite ``loss`` is far above the finite losses just ``before`` it."""
    if len(before) < MIN_SPIKE_HISTORY or not math.isfinite(loss):
        return False
    values = np.asarray(before, dtype=np.float64)
    return loss > float(values.mean() + SPIKE_SIGMAS * values.std())


def distance_to_collapse(loss: float, unigram_entropy: float) -> float:
    """Return how far a loss lies above the line for "collapsed", in nats per token."""
    return loss - (unigram_entropy - COLLAPSE_MARGIN)


def is_still_falling(init_loss: float, quarters: Sequence[float]) -> bool:
    """Return whether a training loss falls all along a run, so that more steps would lower it.

    The mean loss of each quarter must be below the one before it, the first below the loss at
    init, and the fall from the second quarter to the third at least ``STILL_FALLING_SHARE`` of the
    whole fall.  So a loss that falls only because the learning rate decays, as after a rate too
    high, does not count, nor does one that first rises or whose quarters are not all known (NaN).
    """
    means = [init_loss, *quarters]
    if not all(map(math.isfinite, means)):
        return False
    falls = [before - after for before, after in itertools.pairwise(means)]
    return min(falls) > 0 and falls[2] >= STILL_FALLING_SHARE * sum(falls)


def check_ids(folder: Path, vocab_size: int, *batch_BT: Tensor) -> None:
    """Refuse ids beyond the vocabulary, before the embedding is indexed with them.

    Raises:
        DataError: the token file in ``folder`` is damaged.
    """
    highest = max(int(ids.max()) for ids in batch_BT)
    if highest >= vocab_size:
        raise DataError(
            f"{folder} contains token {highest}, but the model has {vocab_size} ids: the file is "
            "damaged; delete that folder, and the text is tokenized again"
        )


def remedies(config: RunConfig) -> str:
    """Return, in one line, which stabilizing settings a diverged run could still try."""
    optim, norm = config.optim, config.model.norm
    settings = [f"a lower optim.lr (now {optim.lr:g})"]
    if optim.warmup_steps:
        settings.append(f"a longer optim.warmup_steps (now {optim.warmup_steps})")
    else:
        settings.append(f"a warm-up (optim.warmup_steps={max(1, config.train.steps // 20)})")
    if not optim.grad_clip:
        settings.append("clipping (optim.grad_clip=1)")
    if not optim.z_loss:
        settings.append("optim.z_loss=1e-4")
    if norm.qk_norm == "none" and not PLACEMENTS.get(norm.placement).norms_qkv:
        settings.append("model.norm.qk_norm=head")
    if config.train.dtype == "float16":
        settings.append("train.dtype=bfloat16")
    return f"try {join_words(settings, 'or')}"
