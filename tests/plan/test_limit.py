import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minillama.config import RunConfig
from minillama.config.loading import override
from minillama.config.run import parse_run
from minillama.errors import ConfigError
from minillama.formatting import format_bytes
from minillama.plan import memory as plan_memory
from minillama.plan.limit import (
    GIB,
    VARIABLE,
    host_memory,
    memory_limit,
    refuse_what_cannot_fit,
)
from minillama.plan.memory import PROCESS, estimate_memory

CPU = torch.device("cpu")
BASE: dict[str, Any] = {"tokenizer": {"kind": "byte"}, "train": {"device": "cpu"}}


def run_config(**overrides: Any) -> RunConfig:
    return parse_run(override(BASE, overrides, {}), "test")


def give(monkeypatch: pytest.MonkeyPatch, n_bytes: float) -> None:
    monkeypatch.setenv(VARIABLE, repr(n_bytes / GIB))


def test_a_run_that_does_not_fit_is_refused_with_the_estimate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(**{"model.dim": 512, "model.n_layers": 8, "train.batch_size": 64})
    memory = estimate_memory(config, on_cpu=True)
    give(monkeypatch, 0.7 * memory.peak)
    with pytest.raises(ConfigError) as caught:
        refuse_what_cannot_fit(config, CPU)
    said = str(caught.value)
    for part in ("weights", "gradients", "optimizer", "activations", "loss"):
        assert f"{part} {format_bytes(getattr(memory, part))}" in said
    assert f"about {format_bytes(memory.peak_on_cpu + PROCESS)}" in said
    assert f"cpu has {format_bytes(0.7 * memory.peak)}" in said
    assert "lower train.micro_batch_size (now 64), which changes no result" in said
    assert "\n" not in said

    give(monkeypatch, 0.8 * memory.peak)  # within the estimate's error
    with caplog.at_level(logging.WARNING, "minillama"):
        refuse_what_cannot_fit(config, CPU)
    assert "it may not fit" in caplog.text

    caplog.clear()
    give(monkeypatch, 1.01 * (memory.peak_on_cpu + PROCESS))
    refuse_what_cannot_fit(config, CPU)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        ({"model.dim": 8192, "train.batch_size": 1, "data.seq_len": 4}, "lower model.dim"),
        ({"model.vocab_size": 10**9}, "model.vocab_size"),
        ({"model.dim": 1 << 40, "model.n_heads": 8}, "too large for any machine"),
        ({"train.batch_size": 10**9, "train.micro_batch_size": 1}, "lower train.batch_size"),
        ({"model.max_seq_len": 10**12}, "model.max_seq_len"),
        (
            {"model.n_layers": 10**12},
            "model.n_layers = 1,000,000,000,000: their Python objects alone",
        ),
        (
            {"train.batch_size": 1, "model.max_seq_len": 1 << 20, "data.seq_len": 1 << 20},
            "lower data.seq_len (now 1048576)",
        ),
    ],
    ids=str,
)
def test_the_advice_names_the_fields_that_are_too_large(
    overrides: dict[str, Any], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, 2 * GIB)
    with pytest.raises(ConfigError) as caught:
        refuse_what_cannot_fit(run_config(**overrides), CPU)
    assert advice in str(caught.value)


def test_a_model_is_measured_once() -> None:
    config = run_config(**{"model.n_layers": 32})
    refuse_what_cannot_fit(config, CPU)
    measured = plan_memory._measure.cache_info().misses
    refuse_what_cannot_fit(config, CPU)
    assert plan_memory._measure.cache_info().misses == measured


def test_train_refuses_at_once_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text("tokenizer: {kind: byte}\ntrain: {device: cpu}\n")
    give(monkeypatch, 2 * GIB)
    command = [sys.executable, "-m", "minillama", "train", "run.yaml", "model.dim=16384"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("minillama: training needs about ")
    assert "cpu has 2.00 GiB; lower model.dim" in done.stderr
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------------- this machine's memory


MEMINFO = "MemTotal:  8388608 kB\nMemFree: 1 kB\nSwapTotal: 1048576 kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    """Write a small /proc and /sys."""
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 9 * GIB),
        ({"proc/self/cgroup": "0::/\n"}, 9 * GIB),
        (
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"},
            9 * GIB,
        ),
        (
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n"},
            2 * GIB,
        ),
        (  # a group above has the smaller limit
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/a/memory.max": f"{GIB}\n",
            },
            GIB,
        ),
        (  # in a container the path is the host's, and the mount shows the container's own group
            {"proc/self/cgroup": "0::/docker/x\n", "sys/fs/cgroup/memory.max": f"{3 * GIB}\n"},
            3 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/x\n3:cpuset:/y\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{GIB}\n",
            },
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
            },
            9 * GIB,
        ),
        ({"proc/self/cgroup": "0::/../..\n"}, 9 * GIB),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    assert host_memory(machine(tmp_path, files)) == limit


def test_this_machine_has_memory() -> None:
    found = host_memory()
    assert found is not None
    assert GIB / 4 < found < 1 << 50


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1.5")
    assert memory_limit(torch.device("cpu")) == 3 * GIB // 2
    assert memory_limit(torch.device("cuda")) == 3 * GIB // 2
    for wrong in ("", "much", "-1", "0", "nan", "inf"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ConfigError, match="must be a number of GiB"):
            memory_limit(torch.device("cpu"))
