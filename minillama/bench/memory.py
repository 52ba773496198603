"""The peak memory of a training step at a large vocabulary, each contender in its own process.

    python -m minillama.bench.memory CONTENDER THREADS      two steps; prints its peaks as JSON

Peak is the process's largest resident set, as the kernel counts it; ``before`` is that with all
imported and nothing built.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from minillama import launch
from minillama.bench.peers import hf_llama, hf_step
from minillama.bench.shapes import Shape, training_step
from minillama.bench.timing import load_average, machine, table, take_turns
from minillama.model.transformer import Transformer

SHAPE = Shape(dim=256, n_layers=6, vocab_size=32000, batch=8, length=512)
OURS, RECOMPUTED, HF = "minillama", "minillama, recompute", "HF eager"
_STEPS = 2


def bench(threads: Sequence[int] = (1,), rounds: int = 3, shape: Shape = SHAPE) -> dict[str, Any]:
    """Measure each contender ``rounds`` times in turns, on each number of threads.

    Returns:
        ``rows``, one for each number of threads: by contender ``peak_mib``, the median peak of the
        whole process, ``before_mib`` and ``step_s``; ``of_hf``, each peak over that of HF;
        ``machine``.
    """
    load_before, rows = load_average(), []
    for n_threads in threads:
        contenders = {
            name: partial(_in_its_own_process, name, n_threads, shape)
            for name in (OURS, RECOMPUTED, HF)
        }
        runs = take_turns(contenders, rounds)
        middle = {
            name: {key: statistics.median(run[key] for run in found) for key in found[0]}
            for name, found in runs.items()
        }
        of_hf = {name: run["peak_mib"] / middle[HF]["peak_mib"] for name, run in middle.items()}
        rows.append({"threads": n_threads, "rounds": rounds, "of_hf": of_hf, **_turned(middle)})
    return {
        "benchmark": "memory",
        "dtype": "float32",
        "shape": shape._asdict(),
        "model": str(shape),
        "rows": rows,
        "machine": machine(load_before),
    }


def _turned(middle: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    keys = next(iter(middle.values()))
    return {key: {name: run[key] for name, run in middle.items()} for key in keys}


def show(result: Mapping[str, Any]) -> str:
    """Return the result of :func:`bench` as a text table."""
    lines = [["threads", "contender", "peak MiB", "before MiB", "peak over HF's", "step over HF's"]]
    for row in result["rows"]:
        for name, peak in row["peak_mib"].items():
            step = row["step_s"][name] / row["step_s"][HF]
            lines.append([str(row["threads"]), name, f"{peak:.0f}"])
            lines[-1] += [f"{row['before_mib'][name]:.0f}", f"{row['of_hf'][name]:.2f}"]
            lines[-1] += [f"{step:.2f}"]
    title = f"peak memory of a step, {result['model']}, float32"
    return table(title, "medians of fresh processes", result, lines)


def _in_its_own_process(contender: str, n_threads: int, shape: Shape) -> dict[str, float]:
    arguments = (contender, str(n_threads), json.dumps(shape))
    command = launch.module_command("minillama.bench.memory", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(contender: str, n_threads: int, shape: Shape) -> dict[str, float]:
    torch.set_num_threads(n_threads)
    before = _peak_mib()
    config, tokens = shape.config(), shape.tokens()
    if contender == HF:
        theirs = hf_llama(config)
        step = hf_step(theirs, theirs, tokens)
    else:
        ours = Transformer(config)
        ours.recompute = contender == RECOMPUTED
        step = training_step(ours, tokens)
    step()
    start = time.perf_counter()
    for _ in range(_STEPS - 1):
        step()
    seconds = (time.perf_counter() - start) / (_STEPS - 1)
    return {"peak_mib": _peak_mib(), "before_mib": before, "step_s": seconds}


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]), Shape(*json.loads(sys.argv[3])))))
