"""The bar that a run shows on stderr."""

from __future__ import annotations

import sys
from typing import NoReturn

from tqdm import tqdm

from minillama.config import RunConfig
from minillama.training.loggers import Line


def progress_bar(config: RunConfig, step: int, show: bool) -> tqdm[NoReturn]:
    """Return a bar over the steps of a run that stands at ``step``."""
    return tqdm(
        total=config.train.steps,
        initial=step,
        desc=config.name,
        unit="step",
        dynamic_ncols=True,
        disable=not show,
        mininterval=0.2 if sys.stderr.isatty() else 15,
    )


def shown(line: Line, val_loss: float | None) -> str:
    """Return what the bar says beside its own numbers."""
    val = "" if val_loss is None else f" val {val_loss:.3f}"
    return f"loss {line['loss']:.3f}{val} lr {line['lr']:.1e} {line['tokens_per_s']:,.0f} tokens/s"
