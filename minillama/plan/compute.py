"""The FLOPs of a run, and how long they take on a GPU or this CPU.

A forward pass multiplies and adds once per token for each parameter of a matrix it goes through,
and once for each of queries · keys and weights · values:

    forward = 2·M + 4·L·H·K·T  FLOPs per token,   backward = 2 · forward

with M the parameters of all matrices, the head's among them (tied or not), the embedding's not,
since it is looked up; L layers, H query heads of K features, T tokens in a window.  Attention is
counted whole, though causality halves what is needed: that is the convention of model FLOPs
utilisation (Chowdhery 2022, PaLM, arXiv 2204.02311, appendix B: 6N + 12·L·H·Q·T for both passes).
Norms, activations, the softmax and the optimizer are left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from minillama.config import RunConfig
from minillama.errors import ConfigError
from minillama.plan.parameters import block_matrices
from minillama.registry import unknown_name

FORMULA = "forward 2·M + 4·L·H·K·T per token, backward twice that (PaLM, arXiv 2204.02311, app. B)"

DEFAULT_MFU = 0.4
"""Share of the peak that training reaches: 0.46 in PaLM, 0.38 to 0.43 in Llama 3 (2407.21783)."""


@dataclass(frozen=True)
class Device:
    """Speed and memory of a device; FLOPs per second, dense, accumulated in float32."""

    name: str
    bfloat16: float
    float32: float
    memory: int
    source: str

    def peak(self, dtype: str) -> float:
        """Return the FLOPs per second of matrix products in ``dtype``, a train.dtype."""
        return self.float32 if dtype == "float32" else self.bfloat16


def _gpu(name: str, bfloat16: float, float32: float, gigabytes: int, source: str) -> Device:
    return Device(name, bfloat16 * 1e12, float32 * 1e12, gigabytes * 10**9, source)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("3090", 71.0, 35.6, 24, "NVIDIA GA102 whitepaper"),
        _gpu("4090", 165.2, 82.6, 24, "NVIDIA Ada whitepaper"),
        _gpu("l4", 121.0, 30.3, 24, "NVIDIA L4 data sheet, sparse halved"),
        _gpu("l40s", 362.0, 91.6, 48, "NVIDIA L40S data sheet"),
        _gpu("a100-40", 312.0, 19.5, 40, "NVIDIA A100 data sheet"),
        _gpu("a100", 312.0, 19.5, 80, "NVIDIA A100 data sheet"),
        _gpu("h100", 989.4, 67.0, 80, "NVIDIA H100 SXM data sheet, sparse halved"),
        _gpu("h200", 989.4, 67.0, 141, "NVIDIA H200 SXM data sheet, sparse halved"),
        _gpu("b200", 2250.0, 75.0, 180, "NVIDIA HGX B200 data sheet, an eighth, sparse halved"),
        _gpu("mi300x", 1307.4, 163.4, 192, "AMD MI300X data sheet"),
    )
}
"""float32 peaks are without TF32, which a run does not use; memory in GB as sold."""


def gpu_named(name: str) -> Device:
    """Return a row of the table.

    Raises:
        ConfigError: there is none.
    """
    if name not in GPUS:
        raise ConfigError(unknown_name("GPU", name, [*GPUS, "cpu"]))
    return GPUS[name]


def measure_cpu(dtype: str, memory: int, seconds: float = 0.3) -> Device:
    """Time products of large matrices on this CPU, with torch's current number of threads."""
    kind: torch.dtype = getattr(torch, dtype)
    size = 1024
    a, b = torch.ones(size, size, dtype=kind), torch.ones(size, size, dtype=kind)
    a @ b  # the first one starts threads
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        a @ b
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    threads = torch.get_num_threads()
    return Device("cpu", best, best, memory, f"{size}×{size} products timed, threads: {threads}")


@dataclass(frozen=True)
class Compute:
    """FLOPs per token and tokens of the run; validation is not counted."""

    forward: int
    backward: int
    tokens: int
    recomputed: int = 0
    """Of the blocks that the backward pass runs again (train.recompute)."""

    @property
    def total(self) -> int:
        """FLOPs of the whole training."""
        return (self.forward + self.backward + self.recomputed) * self.tokens

    def seconds(self, device: Device, n_devices: int, dtype: str, mfu: float) -> float:
        """Return how long training takes at ``mfu`` of the devices' peak."""
        return self.total / (device.peak(dtype) * n_devices * mfu)


def count_flops(config: RunConfig) -> Compute:
    """Count the FLOPs of training ``config``."""
    model, seq_len = config.model, config.data.seq_len
    attention = 4 * model.n_heads * model.head_dim * seq_len
    blocks = model.n_layers * (2 * sum(block_matrices(model)) + attention)
    forward = blocks + 2 * model.known_vocab_size * model.dim
    return Compute(
        forward=forward,
        backward=2 * forward,
        tokens=config.train.steps * config.train.batch_size * seq_len,
        recomputed=blocks if config.train.recompute else 0,
    )
