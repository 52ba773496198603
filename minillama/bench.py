"""Benchmarks of this machine, as ratios between contenders that take turns in one process.

A round times every contender once, in an order drawn anew, so that whatever else the machine does
meets all of them alike; and each after an untimed call of its own, since else it would pay for the
memory that the one before gave back to the system.  A ratio is the median, over the rounds, of two
times of the same round; its quartiles are kept beside it.  Times alone do not compare between
machines.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.errors import ConfigError, RunFolderError
from minillama.model.kernels import rms_norm
from minillama.model.kernels.compiled import load

NORM_SHAPES = ((2048, 64), (2048, 128), (2048, 512), (2048, 2048))
_OURS, _COPY = "minillama", "copy"
_EPS = 1e-6


def run(what: str, out_json: str | None = None, threads: int | None = None) -> str:
    """Run the benchmark ``what`` and return its table; ``out_json`` gets all figures as JSON.

    Args:
        what: ``norms``.
        out_json: a file, or None.
        threads: torch's number of threads; None is 1, and then all cores.

    Raises:
        ConfigError: there is no such benchmark, or the number of threads is not positive.
        RunFolderError: ``out_json`` cannot be written.
    """
    if what != "norms":
        raise ConfigError(f"there is no benchmark {what!r}; valid: norms")
    if threads is not None and threads < 1:
        raise ConfigError(f"--threads {threads}: must be at least 1")
    result = bench_norms([threads] if threads else sorted({1, os.cpu_count() or 1}))
    if out_json is not None:
        try:
            Path(out_json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise RunFolderError(
                f"{out_json} cannot be written: {error.strerror}; choose another --json file"
            ) from None
    return norms_table(result)


# ----------------------------------------------------------------------------------------- norms


def bench_norms(
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
    machine = _machine()
    rows = []
    for n_threads in threads:
        with _torch_threads(n_threads):
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
        "machine": machine | {"load_after": _load()},
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
            name: _quartiles([a / b for a, b in zip(times[_OURS], t, strict=True)])
            for name, t in times.items()
            if name not in (_OURS, _COPY)
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
            "geometric_mean": math.exp(statistics.fmean(map(math.log, ratios))),
            "greatest": max(ratios),
        }
        for (n_threads, direction, name), ratios in groups.items()
    ]


def norms_table(result: Mapping[str, Any]) -> str:
    """Lay out what :func:`bench_norms` returns for the eye."""
    names = list(result["rows"][0]["ratio"])
    head = ["threads", "rows×d", "direction", "rounds", "µs", "GB/s", "copy GB/s", *names]
    lines = []
    for row in result["rows"]:
        ratios = [
            "{median:.2f} ({low:.2f}–{high:.2f})".format(**row["ratio"][name]) for name in names
        ]
        lines.append(
            [
                str(row["threads"]),
                f"{row['rows']}×{row['dim']}",
                row["direction"],
                str(row["rounds"]),
                f"{row['time_us'][_OURS]:.0f}",
                f"{row['gb_per_s']:.1f}",
                f"{row['copy_gb_per_s']:.1f}",
                *ratios,
            ]
        )
    for mean in result["means"]:
        if mean["contender"] == names[0]:
            lines.append([str(mean["threads"]), "geometric mean", mean["direction"], *[""] * 4])
        lines[-1].append(f"{mean['geometric_mean']:.2f} (at most {mean['greatest']:.2f})")
    machine = result["machine"]
    kernel = "compiled kernel" if result["compiled_kernel"] else "NO compiled kernel, plain PyTorch"
    return "\n".join(
        [
            f"RMSNorm ({kernel}), float32, {machine['processor']}, {machine['cores']} cores, "
            f"torch {machine['torch']}; load {machine['load']} before, {machine['load_after']} "
            "after",
            "columns on the right: our time over theirs in the same round, median (quartiles)",
            *_aligned([head, *lines]),
        ]
    )


# ---------------------------------------------------------------------------------------- timing


def alternate(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    seconds: float = 0.0,
) -> dict[str, list[float]]:
    """Time the contenders in turns.

    Args:
        contenders: what to call, by name.
        rounds: samples of each, at least.
        calls: calls in a sample.
        seconds: more rounds follow until this time has passed.

    Returns:
        Seconds per call, as many for each contender as there were rounds, in their order.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order, draw = list(contenders), random.Random(0)
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        if turn >= rounds and time.perf_counter() >= end:
            break
        draw.shuffle(order)
        for name in order:
            call = contenders[name]
            call()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - start) / calls)
    return times


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


@contextmanager
def _torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": _load(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _load() -> float | None:
    """Return how many processes want a core just now, on systems that tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
