"""What `minillama doctor` checks with torch: threads, memory, the kernels, and their numbers.

Run as a module it prints each check as a line of JSON at once.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor

from minillama.commands.doctor import Check
from minillama.config import ModelConfig
from minillama.formatting import format_bytes, join_words, pluralize
from minillama.launch import usable_cpus
from minillama.model.kernels import library, rms_norm, rms_norm_reference
from minillama.model.transformer import Transformer
from minillama.plan.limit import host_memory

NORM_TOLERANCE = 8
"""Allowed error of RMSNorm and its gradients: so many roundings of the largest value."""

GRADIENT_TOLERANCE = 1e-4
"""Allowed error of a float32 gradient, relative to the parameter's largest; 1e-6 is usual."""

_SIZES = (7, 64, 129, 1000)  # of rows; whole vectors and parts of one


def checks() -> Iterator[Check]:
    """Yield the result of each check."""
    yield _torch()
    yield _threads()
    memory = host_memory()
    yield Check("memory", "ok", f"{format_bytes(memory)} for a process" if memory else "unknown")
    yield _compiler()
    yield _kernels()
    yield _norms()
    yield _gradients()


def _torch() -> Check:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        gpus.append("mps")
    return Check("torch", "ok", f"{torch.__version__}, GPUs: {', '.join(gpus) or 'none'}")


def _threads() -> Check:
    usable, chosen = usable_cpus(), torch.get_num_threads()
    found = f"{chosen}; this process may use {usable} of {pluralize(os.cpu_count() or 1, 'CPU')}"
    if chosen > usable:
        return Check("threads", "note", f"{found}; training uses {usable}")
    if chosen < usable:
        return Check("threads", "note", f"{found}; OMP_NUM_THREADS sets how many it uses")
    return Check("threads", "ok", found)


def _compiler() -> Check:
    try:
        command = library.find_compiler()
    except library.BuildError as error:
        return Check("compiler", "note", f"{error}; without one, training is slower")
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("compiler", "broken", f"{command[0]}: {error}")
    lines = done.stdout.decode(errors="replace").splitlines() or ["no version"]
    return Check("compiler", "ok", f"{command[0]}: {lines[0]}")


def _kernels() -> Check:
    if os.environ.get("MINILLAMA_KERNELS") == "0":
        return Check("kernels", "note", "off (MINILLAMA_KERNELS=0); training is slower")
    try:
        library.find_compiler()
    except library.BuildError:
        return Check("kernels", "note", "none, for want of a compiler")
    try:
        loaded = {dtype: library.load_or_raise(dtype) for dtype in library.MACROS}
    except library.BuildError as error:
        return Check("kernels", "broken", str(error))
    bits = 8 * loaded[torch.float32].vector_bytes()
    names = join_words(str(dtype).removeprefix("torch.") for dtype in loaded)
    return Check("kernels", "ok", f"vectors of {bits} bits, for {names}")


def _norms() -> Check:
    """Compare RMSNorm and its gradients with the formula in float64, for each dtype."""
    errors = {str(d).removeprefix("torch."): _norm_error(d) for d in library.MACROS}
    found = ", ".join(f"{name} {error:.1f}" for name, error in errors.items())
    wrong = any(not error <= NORM_TOLERANCE for error in errors.values())  # NaN is wrong
    detail = f"errors against float64, in roundings: {found}"
    return Check("RMSNorm", "broken" if wrong else "ok", detail)


def _norm_error(dtype: torch.dtype) -> float:
    draw = torch.Generator().manual_seed(0)
    worst = torch.tensor(0.0, dtype=torch.float64)
    for dim in _SIZES:
        x, gain, dy = (
            torch.randn(*shape, generator=draw).to(dtype)
            for shape in ((33, dim), (dim,), (33, dim))
        )
        here, exact = (x, gain, dy), (x.double(), gain.double(), dy.double())
        found = _with_gradients(*here, norm=rms_norm)
        expected = _with_gradients(*exact, norm=rms_norm_reference)
        for a, b in zip(found, expected, strict=True):
            worst = torch.maximum(worst, (a.double() - b).abs().max() / b.abs().max())
    return float(worst) / torch.finfo(dtype).eps


def _with_gradients(
    x: Tensor, gain: Tensor, dy: Tensor, *, norm: Callable[..., Tensor]
) -> list[Tensor]:
    inputs = [x.requires_grad_(), gain.requires_grad_()]
    y = norm(*inputs, 1e-6)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def _gradients() -> Check:
    """Compare a training step's gradients with those of the plain formulas in float64."""
    config = ModelConfig(vocab_size=96, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=32)
    model = Transformer(config)
    tokens = torch.randint(96, (2, 33), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    names, weights = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(model.loss(inputs, targets), weights)
    exact = Transformer(config).double()
    doubled = {name: weight.detach().double() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(exact, weights, (inputs,))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    # Within torch.func no kernel is used.
    expected = torch.func.grad(loss)(doubled)
    errors = [
        float((gradient.double() - expected[name]).abs().max() / expected[name].abs().max())
        for name, gradient in zip(names, found, strict=True)
    ]
    wrong = any(not error <= GRADIENT_TOLERANCE for error in errors)
    detail = f"of a training step: within {max(errors):.1e} of float64's"
    return Check("gradients", "broken" if wrong else "ok", detail)


if __name__ == "__main__":
    for check in checks():
        print(json.dumps(asdict(check)), flush=True)
