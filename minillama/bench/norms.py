"""RMSNorm against torch's norms, float32: single calls, and whole training steps.

A single call is timed in two states of the caches, and never after an untimed call of its own:

cold    one call, after 64 MiB of other memory were written: about what a norm meets in a step
warm    up to 8 calls, timed together, straight after the contender that came before

Contenders take turns in random order, at least 40 rounds; a ratio is the median over rounds, with
quartiles.  ``limit`` is the time in which a copy that was timed in the same rounds, in the same
state, would move the bytes that the call must read and write: no kernel is much faster.

For whole steps see :mod:`minillama.bench.norm_steps`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.bench.norm_steps import bench_steps, show_steps
from minillama.bench.shapes import SHAPES, WIDE_SHAPES, Shape
from minillama.bench.timing import (
    alternate,
    load_average,
    machine,
    ratios,
    show_quartiles,
    table,
    torch_threads,
)
from minillama.model.kernels import rms_norm
from minillama.model.kernels.library import load

NORM_SHAPES = ((2048, 64), (2048, 128), (2048, 512), (2048, 2048))
_OURS, _COPY = "minillama", "copy"
_EPS = 1e-6
_CLEARING_NUMBERS = 1 << 24  # 64 MiB


def bench(
    threads: Sequence[int] = (1,),
    shapes: Sequence[tuple[int, int]] = NORM_SHAPES,
    rounds: int = 40,
    seconds: float = 1.0,
    steps: Sequence[Shape] = SHAPES + WIDE_SHAPES,
) -> dict[str, Any]:
    """Time our RMSNorm against torch's norms in float32, on each number of threads.

    Contenders: ``F.layer_norm`` with weight and bias and without bias, ``F.rms_norm``, and a copy,
    which moves one tensor in and one out.  Directions: ``forward`` records no gradient;
    ``forward+backward`` is one call and its backward pass, with gradients for all parameters.
    Each setting gets ``rounds`` rounds, and more until ``seconds`` have passed.

    Returns:
        ``rows``, one for each threads × shape × direction × cache: the contenders' median times in
        µs, our time over each one's with quartiles, the number of rounds, GB/s, counting what must
        be read and written, that of a copy, and our time ``over_limit``;
        ``means``: for each threads × direction × cache × contender the geometric mean of the ratios
        over shapes and the greatest; ``steps``: :func:`~minillama.bench.norm_steps.bench_steps`;
        ``machine``.
    """
    load_before = load_average()
    rows = []
    for n_threads in threads:
        with torch_threads(n_threads):
            for n_rows, dim in shapes:
                # A sample of less than some 0.3 ms would time the clock as well.
                calls = min(8, max(1, 2**19 // (n_rows * dim)))
                for direction, contenders in _norm_contenders(n_rows, dim).items():
                    for cache, untimed, n_calls in (
                        ("cold", _clear_caches, 1),
                        ("warm", lambda: None, calls),
                    ):
                        times = alternate(contenders, rounds, n_calls, seconds, untimed)
                        rows.append(_norm_row(n_threads, n_rows, dim, direction, cache, times))
    return {
        "benchmark": "norms",
        "dtype": "float32",
        "compiled_kernel": load(torch.float32) is not None,
        "rows": rows,
        "means": _means(rows),
        "steps": bench_steps(threads, steps, rounds),
        "machine": machine(load_before),
    }


def _clear_caches() -> None:
    torch.ones(_CLEARING_NUMBERS)


def _norm_contenders(n_rows: int, dim: int) -> dict[str, dict[str, Callable[[], object]]]:
    x, grad = torch.randn(n_rows, dim), torch.randn(n_rows, dim)
    x.requires_grad_()
    weight, bias = torch.ones(dim, requires_grad=True), torch.zeros(dim, requires_grad=True)
    target = torch.empty(n_rows, dim)
    norms: dict[str, Callable[[], Tensor]] = {
        _OURS: lambda: rms_norm(x, weight, _EPS),
        "layer_norm": lambda: F.layer_norm(x, (dim,), weight, bias, _EPS),
        "layer_norm without bias": lambda: F.layer_norm(x, (dim,), weight, None, _EPS),
        "torch rms_norm": lambda: F.rms_norm(x, (dim,), weight, _EPS),
    }

    def forward(norm: Callable[[], Tensor]) -> Callable[[], object]:
        return torch.no_grad()(norm)

    def both(norm: Callable[[], Tensor]) -> Callable[[], object]:
        def call() -> None:
            x.grad = weight.grad = bias.grad = None
            torch.autograd.backward(norm(), grad)

        return call

    copy = {_COPY: lambda: target.copy_(grad)}
    return {
        "forward": {name: forward(norm) for name, norm in norms.items()} | copy,
        "forward+backward": {name: both(norm) for name, norm in norms.items()} | copy,
    }


def _norm_row(
    n_threads: int,
    n_rows: int,
    dim: int,
    direction: str,
    cache: str,
    times: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    tensor_bytes = 4 * n_rows * dim
    # Forward: x in, y out.  Backward: x and the gradient in, a gradient out.
    moved = tensor_bytes * (2 if direction == "forward" else 5)
    limits = [t * moved / (2 * tensor_bytes) for t in times[_COPY]]
    return {
        "threads": n_threads,
        "rows": n_rows,
        "dim": dim,
        "direction": direction,
        "cache": cache,
        "rounds": len(times[_OURS]),
        "time_us": {name: 1e6 * statistics.median(t) for name, t in times.items()},
        "ratio": {
            name: ratios(times[_OURS], t) for name, t in times.items() if name not in (_OURS, _COPY)
        },
        "gb_per_s": moved / statistics.median(times[_OURS]) / 1e9,
        "copy_gb_per_s": 2 * tensor_bytes / statistics.median(times[_COPY]) / 1e9,
        "over_limit": ratios(times[_OURS], limits),
    }


def _means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[int, str, str, str], list[float]] = {}
    for row in rows:
        for name, ratio in row["ratio"].items():
            key = row["threads"], row["direction"], row["cache"], name
            groups.setdefault(key, []).append(ratio["median"])
    return [
        {
            "threads": n_threads,
            "direction": direction,
            "cache": cache,
            "contender": name,
            "geometric_mean": math.exp(statistics.fmean(map(math.log, medians))),
            "greatest": max(medians),
        }
        for (n_threads, direction, cache, name), medians in groups.items()
    ]


def show(result: Mapping[str, Any]) -> str:
    """Return the result of :func:`bench` as text tables."""
    names = list(result["rows"][0]["ratio"])
    head = ["threads", "rows×d", "direction", "cache", "rounds", "µs", "GB/s", "copy GB/s"]
    lines = [[*head, "over limit", *names]]
    for row in result["rows"]:
        lines.append(
            [
                str(row["threads"]),
                f"{row['rows']}×{row['dim']}",
                row["direction"],
                row["cache"],
                str(row["rounds"]),
                f"{row['time_us'][_OURS]:.0f}",
                f"{row['gb_per_s']:.1f}",
                f"{row['copy_gb_per_s']:.1f}",
                f"{row['over_limit']['median']:.2f}",
                *(show_quartiles(row["ratio"][name]) for name in names),
            ]
        )
    for mean in result["means"]:
        if mean["contender"] == names[0]:
            where = [str(mean["threads"]), "geometric mean", mean["direction"], mean["cache"]]
            lines.append([*where, *[""] * 5])
        lines[-1].append(f"{mean['geometric_mean']:.2f} (at most {mean['greatest']:.2f})")
    kernel = "compiled kernel" if result["compiled_kernel"] else "NO compiled kernel, plain PyTorch"
    note = "columns on the right: our time over theirs in the same round, median (quartiles)"
    calls = table(f"RMSNorm ({kernel}), float32", note, result, lines)
    return f"{calls}\n\nwhole training steps, medians (quartiles)\n{show_steps(result['steps'])}"
