"""`minillama --version`: torch, Python, the processor and the state of the kernels."""

from __future__ import annotations

import os
import platform

import torch

from minillama.formatting import pluralize
from minillama.launch import processor_name, usable_cpus
from minillama.model.kernels import library


def describe_machine() -> str:
    """Return three lines on what minillama runs on; compiles nothing."""
    return "\n".join(
        (
            f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}",
            f"{processor_name()}, {pluralize(usable_cpus(), 'usable CPU')}",
            f"kernels: {_kernels()}",
        )
    )


def _kernels() -> str:
    if os.environ.get("MINILLAMA_KERNELS") == "0":
        return "off (MINILLAMA_KERNELS=0)"
    if library.is_compiled(torch.float32):
        return f"compiled, vectors of {8 * library.load(torch.float32).vector_bytes()} bits"
    try:
        compiler = library.find_compiler()
    except library.BuildError as error:
        return f"none: {error}"
    return f"not compiled yet; the first run does it with {compiler[0]}"
