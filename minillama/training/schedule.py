"""The learning rate of each step: a warm-up, then one of four shapes.

rate                      cosine, linear   fall from the peak over all the steps that are left
 peak ┤   ╭────────╮      constant         keeps the peak
      │  ╱          ╲     wsd              keeps the peak, then falls over the last fifth
  min ┤ ╱            ╲                     (warm-up, stable, decay: Hu 2024, 2404.06395)
      └─┬──┬─────────┬─
        1  warm-up   steps
"""

from __future__ import annotations

import math

from minillama.config.run import OptimConfig

WSD_DECAY = 5
"""``wsd`` falls over the last 1/WSD_DECAY of the run."""


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """Return the learning rate of update ``step``, which counts from 1 to ``steps``.

    The warm-up is linear, ``lr · step / warmup_steps``, and reaches the peak at its last step;
    without one the first step has the peak.  The last step has ``lr · min_lr_ratio`` exactly,
    except with ``constant`` or where the warm-up fills the run.

    Raises:
        ValueError: ``step`` is outside of the run.
    """
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is not in 1 … {steps}")
    peak, last = config.lr, config.lr * config.min_lr_ratio
    warmup = max(1, config.warmup_steps)
    if step <= warmup:
        return peak * (step / warmup)
    if config.schedule == "constant":
        return peak
    start = warmup
    if config.schedule == "wsd":
        start = max(warmup, steps - max(1, steps // WSD_DECAY))
        if step <= start:
            return peak
    t = (step - start) / (steps - start)
    share = 0.5 * (1 + math.cos(math.pi * t)) if config.schedule == "cosine" else 1 - t
    return last + (peak - last) * share
