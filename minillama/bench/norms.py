"""RMSNorm against torch's norms, float32, forward alone and with the backward pass."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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


def bench(
    threads: Sequence[int] = (1,),
    shapes: Sequence[tuple[int, int]] = NORM_SHAPES,
    rounds: int = 40,
    seconds: float = 3.0,
) -> dict[str, Any]:
    """Time our RMSNorm against torch's norms in float32, on each number of threads.

    Contenders: ``F.layer_norm`` with weight and bias and without bias, ``F.rms_norm``, and a copy,
    which moves one tensor in and one out.  Directions: ``forward`` records no gradient;
    ``forward+backward`` is one call and its backward pass, with gradients for all parameters.
    Each setting gets ``rounds`` rounds, and more until ``seconds`` have passed.

    Returns:
        ``rows``, one for each threads × shape × direction: the contenders' median times in µs, our
        time over each one's with quartiles, the number of rounds, and GB/s, counting what must be
        read and written;
        ``means``: for each threads × direction × contender the geometric mean of the ratios over
        shapes and the greatest; ``machine``.
    """
    load_before = load_average()
    rows = []
    for n_threads in threads:
        with torch_threads(n_threads):
            for n_rows, dim in shapes:
                for direction, contenders in _norm_contenders(n_rows, dim).items():
                    # A sample of less than some 0.3 ms would time the clock as well.
                    calls = min(8, max(1, 2**19 // (n_rows * dim)))
                    times = alternate(contenders, rounds, calls, seconds)
                    rows.append(_norm_row(n_threads, n_rows, dim, direction, times))
    return {
        "benchmark": "norms",
        "dtype": "float32",
        "compiled_kernel": load(torch.float32) is not None,
        "rows": rows,
        "means": _means(rows),
        "machine": machine(load_before),
    }


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
    n_threads: int, n_rows: int, dim: int, direction: str, times: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    tensor_bytes = 4 * n_rows * dim
    # Forward: x in, y out.  Backward: x and the gradient in, a gradient out.
    moved = tensor_bytes * (2 if direction == "forward" else 5)
    return {
        "threads": n_threads,
        "rows": n_rows,
        "dim": dim,
        "direction": direction,
        "rounds": len(times[_OURS]),
        "time_us": {name: 1e6 * statistics.median(t) for name, t in times.items()},
        "ratio": {
            name: ratios(times[_OURS], t) for name, t in times.items() if name not in (_OURS, _COPY)
        },
        "gb_per_s": moved / statistics.median(times[_OURS]) / 1e9,
        "copy_gb_per_s": 2 * tensor_bytes / statistics.median(times[_COPY]) / 1e9,
    }


def _means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[int, str, str], list[float]] = {}
    for row in rows:
        for name, ratio in row["ratio"].items():
            groups.setdefault((row["threads"], row["direction"], name), []).append(ratio["median"])
    return [
        {
            "threads": n_threads,
            "direction": direction,
            "contender": name,
            "geometric_mean": math.exp(statistics.fmean(map(math.log, medians))),
            "greatest": max(medians),
        }
        for (n_threads, direction, name), medians in groups.items()
    ]


def show(result: Mapping[str, Any]) -> str:
    """Return the result of :func:`bench` as a text table."""
    names = list(result["rows"][0]["ratio"])
    head = ["threads", "rows×d", "direction", "rounds", "µs", "GB/s", "copy GB/s", *names]
    lines = []
    for row in result["rows"]:
        lines.append(
            [
                str(row["threads"]),
                f"{row['rows']}×{row['dim']}",
                row["direction"],
                str(row["rounds"]),
                f"{row['time_us'][_OURS]:.0f}",
                f"{row['gb_per_s']:.1f}",
                f"{row['copy_gb_per_s']:.1f}",
                *(show_quartiles(row["ratio"][name]) for name in names),
            ]
        )
    for mean in result["means"]:
        if mean["contender"] == names[0]:
            lines.append([str(mean["threads"]), "geometric mean", mean["direction"], *[""] * 4])
        lines[-1].append(f"{mean['geometric_mean']:.2f} (at most {mean['greatest']:.2f})")
    kernel = "compiled kernel" if result["compiled_kernel"] else "NO compiled kernel, plain PyTorch"
    note = "columns on the right: our time over theirs in the same round, median (quartiles)"
    return table(f"RMSNorm ({kernel}), float32", note, result, [head, *lines])
