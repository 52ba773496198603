"""Benchmarks of this machine, as ratios between contenders that take turns.

Each module holds one; peers come with the ``bench`` extra.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minillama.errors import ConfigError, MinillamaError, RunFolderError, missing_extra
from minillama.files import write_atomic
from minillama.launch import usable_cpus

BENCHMARKS = ("norms", "step", "memory", "decode", "ablation", "gpu")


def run(what: str, out_json: str | None = None, threads: int | None = None) -> str:
    """Run the benchmark ``what`` and return its table; ``out_json`` gets all figures as JSON.

    Args:
        what: one of :data:`BENCHMARKS`.
        out_json: a file, or None.
        threads: torch's number of threads; None is 1, and then all cores.

    Raises:
        ConfigError: there is no such benchmark, there are not so many CPUs, or a peer is not
            installed.
        RunFolderError: ``out_json`` cannot be written.
        MinillamaError: what the benchmark checks is wrong; the message is the table.
    """
    if what not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {what!r}; valid: {', '.join(BENCHMARKS)}")
    cpus = usable_cpus()
    if threads is not None and not 1 <= threads <= cpus:
        raise ConfigError(f"--threads {threads}: must be 1 to {cpus}, the CPUs that may be used")
    try:
        module = _module(what)
    except ModuleNotFoundError as error:
        raise missing_extra(str(error.name), f"the benchmark {what!r}", "bench") from None
    result = module.bench([threads] if threads else sorted({1, cpus}))
    if out_json is not None:
        try:
            write_atomic(Path(out_json), json.dumps(result, indent=2) + "\n")
        except OSError as error:
            raise RunFolderError(
                f"{out_json} cannot be written: {error.strerror}; choose another --json file"
            ) from None
    table: str = module.show(result)
    if result.get("passed") is False:
        raise MinillamaError(f"a check failed\n{table}")
    return table


def _module(what: str) -> Any:
    """Import one benchmark alone: some need peers that are not installed everywhere."""
    if what == "norms":
        from minillama.bench import norms as module
    elif what == "step":
        from minillama.bench import step as module  # type: ignore[no-redef]
    elif what == "memory":
        from minillama.bench import memory as module  # type: ignore[no-redef]
    elif what == "decode":
        from minillama.bench import decode as module  # type: ignore[no-redef]
    elif what == "gpu":
        from minillama.bench import gpu as module  # type: ignore[no-redef]
    else:
        from minillama.bench import ablation as module  # type: ignore[no-redef]
    return module
