"""Which device a run uses, and how a summary names it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys

import torch

from minillama.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is cuda, else mps, else cpu.

    Raises:
        ConfigError: this machine, or this build of torch, has no such device.
    """
    n_gpus = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if n_gpus else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu, mps or cuda") from None
    available = {"cpu": True, "cuda": (device.index or 0) < n_gpus}
    available["mps"] = torch.backends.mps.is_available()
    if not available.get(device.type, False):
        raise ConfigError(
            f"device {name} does not exist here ({n_gpus} CUDA devices); use auto or cpu"
        )
    return device


def check_compile(device: torch.device) -> None:
    """Check that torch.compile has the C++ compiler that it needs on a CPU.

    Raises:
        ConfigError: it has none; torch itself would say so in forty lines, at the first step.
    """
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"train.compile = true needs a C++ compiler on a CPU and {compiler} was not found; "
            "install one (for example g++), name another in CXX, or set train.compile=false"
        )
    if device.type == "cpu":
        try:  # as torch does, whose own message for a broken one is a traceback
            subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"train.compile = true needs a C++ compiler on a CPU and {compiler} does not work: "
                f"{error}; name another in CXX, or set train.compile=false"
            ) from error


def describe_device(device: torch.device) -> str:
    """Return a GPU's name, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def return_freed_memory() -> None:
    """Make the C library return tensors of 1 MiB or more to the system when they are freed.

    For recomputation on a CPU, which would save little without it: glibc's heap keeps freed memory
    in gaps between the inputs of blocks.  At 8 layers of width 256 and 4096 tokens a process
    peaked at 1110 MB without recomputation, 958 with it alone and 533 with this too, for a CPU time
    per step of 2.4, 3.0 and 3.7 s: it costs page faults.  A threshold of 4 MiB gave 554 MB and
    3.5 s, of 8 MiB 793 MB and 2.6 s; which is best depends on the sizes of tensors, so the least is
    taken.  A threshold in the environment, MALLOC_MMAP_THRESHOLD_, takes precedence.
    """
    if sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            m_mmap_threshold = -3  # malloc.h
            mallopt(m_mmap_threshold, 1 << 20)
