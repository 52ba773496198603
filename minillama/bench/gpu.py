"""What only a GPU can show: the norms' numbers and speed there, training, several GPUs, resuming.

A person with a GPU runs it after cloning (``scripts/gpu_check.sh``); without one it does the same
on the CPU with small shapes, as a test of itself.  Each part is run even if another failed.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from minillama.bench import ablation
from minillama.bench.peers import hf_llama, hf_step
from minillama.bench.shapes import Shape, training_step
from minillama.bench.timing import load_average, machine, table
from minillama.config import NormConfig, RunConfig
from minillama.config.norms import NORM_KINDS
from minillama.config.run import DataConfig, TokenizerConfig, to_yaml
from minillama.launch import module_command
from minillama.model.norms import RMSNorm, build_norm
from minillama.model.transformer import Transformer
from minillama.plan.compute import GPUS, Device, count_flops, measure_cpu
from minillama.training.assemble import assemble
from minillama.training.checkpoint import load_checkpoint
from minillama.training.trainer import train

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LARGEST_ERROR = 4.0
"""Of an output or a gradient, in units of its dtype's epsilon times the largest value."""

LOSS_TOLERANCE = 1e-3
"""Between trainings that add up in another order, over the few steps made here."""


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        norm: rows and features of the input of a norm.
        step: the model and batch of a training step.
        dtype: of that step, a ``train.dtype``.
        seconds: for which a call is timed.
        compiled: time compiled contenders too.
        workers: the most cells of an ablation that train at once.
    """

    norm: tuple[int, int]
    step: Shape
    dtype: str
    seconds: float
    compiled: bool
    workers: int


GPU_SIZES = Sizes((8192, 4096), Shape(1024, 12, 32000, 8, 1024, 16), "bfloat16", 2.0, True, 4)
CPU_SIZES = Sizes((256, 64), Shape(32, 2, 259, 2, 32, 2), "float32", 0.02, False, 1)


@dataclass(frozen=True)
class Figure:
    """One line of the table; ``passed`` is None where nothing is required."""

    part: str
    what: str
    value: float | None
    unit: str
    passed: bool | None = None
    error: str = ""


PARTS = ("accuracy", "norm speed", "training step", "processes", "resume", "ablation")


def bench(
    threads: Sequence[int] = (1,), sizes: Sizes | None = None, parts: Sequence[str] = PARTS
) -> dict[str, Any]:
    """Run the parts on the GPU, or on the CPU if there is none.

    Args:
        threads: not used: nothing here depends on torch's threads.
        sizes: how large everything is; None: :data:`GPU_SIZES` or :data:`CPU_SIZES`.
        parts: which of :data:`PARTS`.

    Returns:
        ``device``; ``figures``, one for each :class:`Figure`; ``seconds`` of each part; ``passed``,
        whether nothing failed; ``machine``.
    """
    load_before = load_average()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = sizes or (GPU_SIZES if device.type == "cuda" else CPU_SIZES)
    runs: dict[str, Callable[[], Iterator[Figure]]] = {
        "accuracy": partial(_accuracy, device, sizes),
        "norm speed": partial(_norm_speed, device, sizes),
        "training step": partial(_training_step, device, sizes),
        "processes": partial(_processes, device),
        "resume": partial(_resume, device),
        "ablation": partial(_ablation, sizes),
    }
    figures: list[Figure] = []
    seconds = {}
    for name in parts:
        start = time.perf_counter()
        try:
            figures += runs[name]()
        except Exception as error:  # the other parts are run all the same
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            figures.append(Figure(name, "the whole part", None, "", False, line))
        seconds[name] = round(time.perf_counter() - start, 1)
    return {
        "benchmark": "gpu",
        "device": _device_name(device),
        "cuda": torch.version.cuda,
        "figures": [asdict(figure) for figure in figures],
        "seconds": seconds,
        "passed": all(figure.passed is not False for figure in figures),
        "machine": machine(load_before),
    }


def show(result: Mapping[str, Any]) -> str:
    """Return the result of :func:`bench` as a text table."""
    verdicts = {None: "", True: "ok", False: "FAILED"}
    rows = [["part", "what", "value", "unit", ""]]
    for figure in result["figures"]:
        value = "" if figure["value"] is None else f"{figure['value']:.4g}"
        verdict = f"{verdicts[figure['passed']]} {figure['error']}".strip()
        rows.append([figure["part"], figure["what"], value, figure["unit"], verdict])
    times = ", ".join(f"{part} {seconds} s" for part, seconds in result["seconds"].items())
    end = "everything passed" if result["passed"] else "something FAILED"
    return table(f"{result['device']}: {end}", times, result, rows)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


# ---------------------------------------------------------------------------------------- norms


def _accuracy(device: torch.device, sizes: Sizes) -> Iterator[Figure]:
    """Compare each norm's output and gradients with float64 on the CPU."""
    draw = torch.Generator().manual_seed(0)
    rows, dim = sizes.norm
    x = torch.randn(min(rows, 512), dim, generator=draw, dtype=torch.float64)
    grad = torch.randn(x.shape, generator=draw, dtype=torch.float64)
    for kind in NORM_KINDS:
        for dtype in DTYPES:
            # All compute from the same rounded numbers.
            rounded, rounded_grad = x.to(dtype), grad.to(dtype)
            ours = _outputs(kind, rounded.to(device), rounded_grad.to(device))
            wanted = _outputs(kind, rounded.double(), rounded_grad.double())
            unit = torch.finfo(dtype).eps
            error = max(
                ((a.cpu().double() - b).abs().max() / b.abs().max()).item() / unit
                for a, b in zip(ours, wanted, strict=True)
            )
            name = str(dtype).removeprefix("torch.")
            yield Figure("accuracy", f"{kind}, {name}", error, "eps", bool(error <= LARGEST_ERROR))


def _outputs(kind: str, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the norm's output and the gradient of its input."""
    norm = build_norm(NormConfig(kind=kind), x.shape[-1], "mlp").to(x.device, x.dtype)
    x = x.detach().requires_grad_()
    y = norm(x)
    torch.autograd.backward(y, grad)
    assert x.grad is not None
    return [y.detach(), x.grad]


def _norm_speed(device: torch.device, sizes: Sizes) -> Iterator[Figure]:
    """Time norms beside a copy; GB/s count what must be read and written."""
    rows, dim = sizes.norm
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    x, residual = torch.randn(2, rows, dim, device=device, dtype=dtype)
    target = torch.empty_like(x)
    weight = torch.ones(dim, device=device, dtype=dtype)
    norm = RMSNorm(dim).to(device, dtype)
    tensors: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: target.copy_(x)),
        "F.rms_norm": (2, lambda: F.rms_norm(x, (dim,), weight, 1e-6)),
        "F.layer_norm": (2, lambda: F.layer_norm(x, (dim,), weight, None, 1e-6)),
        "minillama RMSNorm": (2, lambda: norm(x)),
    }

    def add_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        summed = x + residual
        return summed, F.rms_norm(summed, (dim,), weight, 1e-6)

    tensors["residual + RMSNorm"] = (4, lambda: add_norm(x, residual))
    if sizes.compiled:
        fused = torch.compile(add_norm)
        tensors["residual + RMSNorm, compiled"] = (4, lambda: fused(x, residual))
    with torch.no_grad():
        for name, (moved, call) in tensors.items():
            rate = moved * x.nbytes / _seconds(call, sizes.seconds) / 1e9
            yield Figure("norm speed", f"{name}, {rows}×{dim} {sizes.dtype}", rate, "GB/s")


def _seconds(call: Callable[[], object], seconds: float) -> float:
    """Return the median time of a call; torch's timer waits for the GPU."""
    call()
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=seconds).median)


# ------------------------------------------------------------------------------------- training


def _training_step(device: torch.device, sizes: Sizes) -> Iterator[Figure]:
    """Time our training step and that of transformers' Llama, eager and compiled."""
    shape = sizes.step
    model = shape.config()
    config = RunConfig(
        model=model,
        tokenizer=TokenizerConfig(kind="none", vocab_size=shape.vocab_size),
        data=DataConfig(seq_len=shape.length),
    )
    flops = count_flops(config)
    per_token = flops.forward + flops.backward
    peak = _peak(device, sizes.dtype)
    tokens = shape.tokens().to(device)

    def our(compiled: bool) -> Callable[[], object]:
        ours = Transformer(model).to(device)
        if compiled:
            ours.loss_sums = torch.compile(ours.loss_sums)  # type: ignore[method-assign]
        return training_step(ours, tokens)

    def their(compiled: bool) -> Callable[[], object]:
        theirs = hf_llama(model)
        nn.Module.to(theirs, device)  # which transformers types otherwise
        return hf_step(theirs, torch.compile(theirs) if compiled else theirs, tokens)

    for compiled in (False, True)[: 1 + sizes.compiled]:
        for name, build in (("minillama", our), ("transformers", their)):
            step = build(compiled)
            with torch.autocast(device.type, getattr(torch, sizes.dtype), sizes.dtype != "float32"):
                rate = shape.batch * shape.length / _seconds(step, sizes.seconds)
            what = f"{name}{', compiled' * compiled}, {shape}, {sizes.dtype}"
            yield Figure("training step", what, rate, "tokens/s")
            if peak:
                mfu = rate * per_token / peak
                yield Figure("training step", f"{what}: of the peak (MFU)", 100 * mfu, "%")


def _peak(device: torch.device, dtype: str) -> float | None:
    """Return the device's FLOPs per second; None of a GPU that the table does not have."""
    if device.type == "cpu":
        return measure_cpu(dtype, memory=0).peak(dtype)
    words = _device_name(device).lower().replace("-", " ").split()
    found: list[Device] = [gpu for name, gpu in GPUS.items() if name in words]
    return found[0].peak(dtype) if found else None


def _run_config(folder: Path, device: torch.device, steps: int, **changes: Any) -> RunConfig:
    """Return a small run; its rate is constant, so that its first steps do not depend on more."""
    return assemble(
        RunConfig.model_validate(
            {
                "out_dir": str(folder),
                "model": {"dim": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
                "tokenizer": {"kind": "byte"},
                "data": {"seq_len": 64, "val_fraction": 0.01},
                "optim": {"lr": 3e-3, "warmup_steps": 5, "schedule": "constant"},
                "train": {
                    "steps": steps,
                    "batch_size": 16,
                    "eval_every": 0,
                    "log_every": 1,
                    "device": device.type,
                    **changes,
                },
            }
        )
    )


def _processes(device: torch.device) -> Iterator[Figure]:
    """Train on every GPU (two processes on the CPU) with DDP and with FSDP, and on one alone."""
    n = torch.cuda.device_count() if device.type == "cuda" else 2
    backend = "NCCL" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory(prefix="minillama-") as name:
        folder = Path(name)
        alone = train(_run_config(folder / "alone", device, 20), progress=False)["val_loss"]
        for parallel in ("ddp", "fsdp"):
            config = _run_config(folder / parallel, device, 20, parallel=parallel)
            file = folder / f"{parallel}.yaml"
            file.write_text(to_yaml(config), encoding="utf-8")
            torchrun = [*module_command("torch.distributed.run"), "--standalone"]
            command = [*torchrun, f"--nproc-per-node={n}", "-m", "minillama", "train", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "minillama:" in line]
                error = lines[0] if lines else f"exit status {done.returncode}"
                yield Figure("processes", f"{parallel}, {n} over {backend}", None, "", False, error)
                continue
            summary = json.loads((folder / parallel / "summary.json").read_text(encoding="utf-8"))
            what = f"{parallel}, {n} over {backend}: its loss less that of one process"
            difference = summary["val_loss"] - alone
            passed = abs(difference) <= LOSS_TOLERANCE
            yield Figure("processes", what, difference, "nats per token", passed)


def _resume(device: torch.device) -> Iterator[Figure]:
    """Train 20 steps at once, and 10 and then 10 more; the weights must be equal to the bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with tempfile.TemporaryDirectory(prefix="minillama-") as name:
            folder = Path(name)
            train(_run_config(folder / "whole", device, 20), progress=False)
            train(_run_config(folder / "parts", device, 10), progress=False)
            train(_run_config(folder / "parts", device, 20), resume=True, progress=False)
            whole, parts = (
                load_checkpoint(folder / run / "checkpoints" / "last")[0].state_dict()
                for run in ("whole", "parts")
            )
    finally:
        torch.use_deterministic_algorithms(False)
    error = max((whole[key] - parts[key]).abs().max().item() for key in whole)
    yield Figure("resume", "largest difference of a weight", error, "", error == 0)


def _ablation(sizes: Sizes) -> Iterator[Figure]:
    """Train the cells of a small ablation one at a time and several at once."""
    base = {**ablation.BASE, "train": {**ablation.BASE["train"], "steps": 30, "device": "auto"}}
    result = ablation.bench((sizes.workers,), rounds=1, base=base)
    for row in result["rows"]:
        what = f"{result['cells']} cells, {row['workers']} at once"
        yield Figure("ablation", what, row["wall_s"]["median"], "s")
