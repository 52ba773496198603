"""The bar that shows a run in a terminal, or a line now and then in a log."""

from __future__ import annotations

import sys
from typing import NoReturn

from tqdm import tqdm

from minillama.config import RunConfig
from minillama.training.loggers import Line


def open_bar(config: RunConfig, step: int, show: bool) -> tqdm[NoReturn]:
    """Return a bar, on stderr, that stands at ``step``; one that shows nothing if not asked to."""
    return tqdm(
        total=config.train.steps,
        initial=step,
        desc=config.name,
        unit="step",
        dynamic_ncols=True,
        disable=not show,
        mininterval=0.2 if sys.stderr.isatty() else 15,
    )


def told(line: Line, val_loss: float | None) -> str:
    """Return what stands behind the bar: of a training line, and the last validation loss."""
    val = "" if val_loss is None else f" val {val_loss:.3f}"
    return f"loss {line['loss']:.3f}{val} lr {line['lr']:.1e} {line['tokens_per_s']:,.0f} tokens/s"
