"""`minillama plan`: the parameters, memory, FLOPs and time that a run would need."""

from __future__ import annotations

import json
from typing import Any

import torch

from minillama.config import RunConfig
from minillama.errors import ConfigError
from minillama.formatting import format_duration, format_si, text_table
from minillama.plan.compute import (
    DEFAULT_MFU,
    FORMULA,
    GPUS,
    Device,
    count_flops,
    gpu_named,
    measure_cpu,
)
from minillama.plan.limit import GIB, host_memory, memory_parts
from minillama.plan.memory import PROCESS, Parallel, estimate_memory, micro_batch
from minillama.plan.parameters import count_parameters

CUDA_CONTEXT = 10**9
"""Bytes that CUDA, cuBLAS and the gaps of its allocator take on a GPU, roughly."""


def plan(
    config: RunConfig,
    *,
    gpu: str | None = None,
    n_gpus: int = 1,
    mfu: float = DEFAULT_MFU,
) -> dict[str, Any]:
    """Return what training ``config`` takes; nothing of the model's size is allocated.

    Args:
        gpu: a name of :data:`minillama.plan.compute.GPUS`, or ``cpu``: this machine's, whose speed
            is measured for a third of a second; None: this machine's GPU if the table has it, else
            its CPU.
        n_gpus: how many train together.
        mfu: share of the device's peak that training reaches.

    Returns:
        what ``--json`` prints; sizes in bytes, times in seconds.

    Raises:
        ConfigError: the GPU is unknown, or a number is out of range.
    """
    if n_gpus < 1:
        raise ConfigError(f"--gpus = {n_gpus}: must be at least 1")
    if not 0 < mfu <= 1:
        raise ConfigError(f"--mfu = {mfu:g}: must be above 0 and at most 1")
    train = config.train
    if n_gpus > train.batch_size:
        raise ConfigError(
            f"--gpus = {n_gpus}: train.batch_size = {train.batch_size} is less than one window for "
            "each; raise it, or use fewer GPUs"
        )
    device = device_of(config, gpu)
    count, compute = count_parameters(config.model), count_flops(config)
    modes: list[Parallel] = ["none"] if n_gpus == 1 else ["none", "ddp", "fsdp"]
    return {
        "name": config.name,
        "parameters": {**vars(count), "total": count.total},
        "tokens": compute.tokens,
        "tokens_per_parameter": compute.tokens / count.total,
        "flops": {
            "forward_per_token": compute.forward,
            "backward_per_token": compute.backward,
            "recomputed_per_token": compute.recomputed,
            "total": compute.total,
            "formula": FORMULA,
        },
        "device": {
            "name": device.name,
            "count": n_gpus,
            "peak_flops": device.peak(train.dtype),
            "memory": device.memory,
            "source": device.source,
        },
        "dtype": train.dtype,
        "seq_len": config.data.seq_len,
        "mfu": mfu,
        "memory": [_mode(config, mode, n_gpus, device) for mode in modes],
        "seconds": compute.seconds(device, n_gpus, train.dtype, mfu),
    }


def device_of(config: RunConfig, name: str | None) -> Device:
    """Return the device called ``name``; None: this machine's GPU if it is known, else its CPU."""
    if name is None:
        here = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
        # The longest name first: an L40S is no L4.
        fitting = [row for row in sorted(GPUS, key=len, reverse=True) if row in here]
        name = fitting[0] if fitting else "cpu"
    if name != "cpu":
        return gpu_named(name)
    return measure_cpu(config.train.dtype, host_memory() or 0)


def _mode(config: RunConfig, mode: Parallel, n_gpus: int, device: Device) -> dict[str, Any]:
    n_ranks = 1 if mode == "none" else n_gpus
    on_cpu = device.name == "cpu"
    memory = estimate_memory(config, mode, n_ranks, on_cpu=on_cpu)
    peak = memory.peak_on_cpu + PROCESS if on_cpu else memory.peak + CUDA_CONTEXT
    on_device = n_ranks * peak if on_cpu else peak  # the ranks of a CPU share its memory
    return {
        "parallel": mode,
        "ranks": n_ranks,
        "micro_batch_size": micro_batch(config, n_ranks),
        **dict(memory_parts(memory)),
        "peak": peak,
        "fits": on_device <= device.memory if device.memory else None,
    }


# ------------------------------------------------------------------------------------------- text


def as_json(figures: dict[str, Any]) -> str:
    """Return the result of :func:`plan` as one JSON object."""
    return json.dumps(figures, indent=2)


def as_text(figures: dict[str, Any]) -> str:
    """Return the result of :func:`plan` as text for people."""
    flops, device, parts = figures["flops"], figures["device"], dict(figures["parameters"])
    total = parts.pop("total")
    recomputed = flops["recomputed_per_token"]
    again = f", recomputed {format_si(recomputed)}" if recomputed else ""
    many = f"{device['count']} × {device['name']}"
    shares = ", ".join(f"{name} {size:,}" for name, size in parts.items() if size)
    return "\n".join(
        (
            f"{figures['name']}: {total:,} parameters ({shares})",
            f"tokens       {figures['tokens']:,}, {figures['tokens_per_parameter']:.1f} per "
            "parameter",
            f"FLOPs        forward {format_si(flops['forward_per_token'])}, backward "
            f"{format_si(flops['backward_per_token'])}{again} per token; "
            f"{flops['total']:.3g} in total",
            f"             {flops['formula']}",
            "",
            *_memory_table(figures),
            "",
            f"time         {format_duration(figures['seconds'])} of training on {many} at "
            f"{figures['mfu']:.0%} of {format_si(device['peak_flops'], 'FLOP/s')} "
            f"({figures['dtype']}; {device['source']})",
        )
    )


def _memory_table(figures: dict[str, Any]) -> list[str]:
    rows, device = figures["memory"], figures["device"]
    left_out = ("parallel", "ranks", "micro_batch_size", "peak", "fits")
    names = [n for n in rows[0] if n not in left_out and any(row[n] for row in rows)]
    names.append("peak")
    table = [["memory, GiB", "windows", *names, ""]]
    for row in rows:
        sizes = [f"{row[name] / GIB:.2f}" for name in names]
        fits = {True: "fits", False: "does not fit", None: ""}[row["fits"]]
        table.append([f"  {row['parallel']}", str(row["micro_batch_size"]), *sizes, fits])
    each = "" if device["name"] == "cpu" else " each"
    return [
        text_table(table),
        f"             per rank; {device['name']}: {device['memory'] / GIB:.1f} GiB{each}; "
        "gradients replace activations during the backward pass",
    ]
