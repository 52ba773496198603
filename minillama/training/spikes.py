"""When a loss is a spike: far above those just before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

SPIKE_SIGMAS = 6.0
SPIKE_WINDOW = 128
"""A loss above mean + SPIKE_SIGMAS · σ of the SPIKE_WINDOW finite losses before it is a spike."""

COLLAPSE_MARGIN = 0.1
"""Nats per token by which a model must beat the unigram entropy so as not to have collapsed."""

FEWEST_BEFORE_A_SPIKE = 16
"""A running count cannot wait for a full window as the report's ``spike_score`` does."""


def is_spike(loss: float, before: Sequence[float]) -> bool:
    """Tell whether a finite ``loss`` stands out from the finite losses just ``before`` it."""
    if len(before) < FEWEST_BEFORE_A_SPIKE or not math.isfinite(loss):
        return False
    values = np.asarray(before, dtype=np.float64)
    return loss > float(values.mean() + SPIKE_SIGMAS * values.std())
