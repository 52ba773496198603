"""Numbers that run away: which update is made, and what to advise.

    loss, gradient norm     on_nonfinite = stop    skip                     run_on
    both finite             make                   make                     make
    one is not              stop                   skip, max_skips a row    make
    float16, loss finite    skip, max_skips a row  skip, max_skips a row    skip

A skipped update changes no weight and no moment of the optimizer.  Its step counts all the same:
the schedule and the batches move on, so that a run that skips is resumed to the bit like any other.
In float16 a gradient that is not finite means at first that the loss was scaled too high, which the
scaler then mends; so it never stops a run at once.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from minillama.config import RunConfig
from minillama.config.norms import PLACEMENTS
from minillama.config.run import TrainConfig
from minillama.errors import DataError

Verdict = Literal["make", "skip", "stop"]


def verdict(train: TrainConfig, loss: float, grad_norm: float, skipped_in_a_row: int) -> Verdict:
    """Say what becomes of an update; ``skipped_in_a_row`` are those just before it."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return "make"
    scaled = train.dtype == "float16"
    if train.on_nonfinite == "run_on":
        return "skip" if scaled else "make"
    if train.on_nonfinite == "skip" or (scaled and math.isfinite(loss)):
        return "skip" if skipped_in_a_row < train.max_skips else "stop"
    return "stop"


def lost_weight(model: nn.Module) -> str | None:
    """Name the first parameter that holds a value that is not finite."""
    named = model.named_parameters()
    return next((name for name, p in named if not bool(torch.isfinite(p).all())), None)


def check_ids(folder: Path, vocab_size: int, *batch_BT: Tensor) -> None:
    """Refuse a damaged token file of ``folder`` before an id is looked up that is not there.

    Raises:
        DataError: an id is beyond the model's vocabulary.
    """
    highest = max(int(ids.max()) for ids in batch_BT)
    if highest >= vocab_size:
        raise DataError(
            f"{folder} holds token {highest}, and the model knows {vocab_size} ids: the file is "
            "damaged; delete that folder, and the text is tokenized anew"
        )


def remedies(config: RunConfig) -> str:
    """Return, in one line, what tames a run and is not in ``config`` (resolved) yet."""
    optim, norm = config.optim, config.model.norm
    wishes = [f"a lower optim.lr (now {optim.lr:g})"]
    if optim.warmup_steps:
        wishes.append(f"a longer optim.warmup_steps (now {optim.warmup_steps})")
    else:
        wishes.append(f"a warm-up (optim.warmup_steps={max(1, config.train.steps // 20)})")
    if not optim.grad_clip:
        wishes.append("clipping (optim.grad_clip=1)")
    if not optim.z_loss:
        wishes.append("optim.z_loss=1e-4")
    if norm.qk_norm == "none" and not PLACEMENTS.get(norm.placement).norms_qkv:
        wishes.append("model.norm.qk_norm=head")
    if config.train.dtype == "float16":
        wishes.append("train.dtype=bfloat16")
    return f"try {', '.join(wishes[:-1])} or {wishes[-1]}"
