"""What a norm costs in a whole training step: its time, its share and its memory.

Contenders are models that differ in ``model.norm`` alone.  Whole steps alternate in one process in
random order, without untimed calls in between; figures are medians, with quartiles, over rounds in
which each contender took one step.  Peaks are counted by torch's allocator, not sampled: they are
exact for everything that PyTorch allocates between the start of a step and its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile

from minillama.bench.shapes import SHAPES, WIDE_SHAPES, Shape, training_step
from minillama.bench.timing import alternate, quartiles, ratios, show_quartiles, torch_threads
from minillama.formatting import text_table
from minillama.model.transformer import Transformer

OURS, NONE = "rmsnorm", "none"
NORMS: dict[str, dict[str, Any]] = {
    OURS: {"kind": "rmsnorm"},
    "layernorm": {"kind": "layernorm"},
    "layernorm without bias": {"kind": "layernorm", "options": {"bias": False}},
    NONE: {"kind": "none"},
}


def bench_steps(
    threads: Sequence[int] = (1,),
    shapes: Sequence[Shape] = SHAPES + WIDE_SHAPES,
    rounds: int = 40,
    seconds: float = 0.0,
) -> list[dict[str, Any]]:
    """Time a step with each norm on each number of threads, ``rounds`` times or more.

    Returns:
        One row for each threads × shape: ``time_ms``, medians by norm; ``ratio``, the time with
        RMSNorm over that with each other norm; ``share``, the part of a step's time that goes when
        its norms do, 1 − (time with none / time), by norm; all with quartiles; and ``peak_mib``.
    """
    rows = []
    for n_threads in threads:
        with torch_threads(n_threads):
            for shape in shapes:
                models = {name: Transformer(shape.config(**norm)) for name, norm in NORMS.items()}
                steps = {
                    name: training_step(model, shape.tokens()) for name, model in models.items()
                }
                peaks = {name: peak_bytes(models[name], step) for name, step in steps.items()}
                times = alternate(steps, rounds, seconds=seconds, untimed=lambda: None)
                rows.append(_row(n_threads, shape, times, peaks))
    return rows


def peak_bytes(model: nn.Module, step: Callable[[], object]) -> int:
    """Return the greatest memory that the tensors made in one step take at a time, in bytes.

    Not counted are parameters, and what the optimizer made in an earlier step.
    """
    step()  # makes the optimizer's state
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    assert recorded.profiler is not None
    changes = (
        event.nbytes()
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    return max(itertools.accumulate(changes), default=0)


def _row(
    n_threads: int,
    shape: Shape,
    times: Mapping[str, Sequence[float]],
    peaks: Mapping[str, int],
) -> dict[str, Any]:
    without = times[NONE]
    return {
        "threads": n_threads,
        "shape": shape._asdict(),
        "model": str(shape),
        "rounds": len(without),
        "time_ms": {name: 1e3 * quartiles(t)["median"] for name, t in times.items()},
        "ratio": {name: ratios(times[OURS], t) for name, t in times.items() if name != OURS},
        "share": {
            name: quartiles([1 - b / a for a, b in zip(t, without, strict=True)])
            for name, t in times.items()
            if name != NONE
        },
        "peak_mib": {name: peak / 2**20 for name, peak in peaks.items()},
    }


def show_steps(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of :func:`bench_steps` as a text table."""
    others = [name for name in NORMS if name not in (OURS, NONE)]
    lines = [
        ["threads", "model (V, B×T)", "rounds", "ms"]
        + [f"step over {name}" for name in others]
        + ["share of rmsnorm", "share of layernorm", *(f"peak MiB {name}" for name in NORMS)]
    ]
    for row in rows:
        lines.append(
            [
                str(row["threads"]),
                row["model"],
                str(row["rounds"]),
                f"{row['time_ms'][OURS]:.1f}",
                *(show_quartiles(row["ratio"][name], 3) for name in others),
                *(show_quartiles(row["share"][name], 3) for name in (OURS, "layernorm")),
                *(f"{row['peak_mib'][name]:.1f}" for name in NORMS),
            ]
        )
    return text_table(lines)
