import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minillama.config import RunConfig
from minillama.config.loading import override
from minillama.config.run import parse_run
from minillama.errors import ConfigError
from minillama.plan.limit import refuse_what_cannot_fit
from minillama.plan.machine import GIB, VARIABLE
from minillama.plan.memory import PROCESS, estimate_memory

CPU = torch.device("cpu")
BASE: dict[str, Any] = {"tokenizer": {"kind": "byte"}, "train": {"device": "cpu"}}


def run_config(**overrides: Any) -> RunConfig:
    return parse_run(override(BASE, overrides, {}), "test")


def give(monkeypatch: pytest.MonkeyPatch, n_bytes: float) -> None:
    monkeypatch.setenv(VARIABLE, repr(n_bytes / GIB))


def test_what_does_not_fit_is_refused_with_the_estimate_and_what_fits_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(**{"model.dim": 512, "model.n_layers": 8, "train.batch_size": 64})
    memory = estimate_memory(config, on_cpu=True)
    give(monkeypatch, 0.7 * memory.peak)
    with pytest.raises(ConfigError) as caught:
        refuse_what_cannot_fit(config, CPU)
    said = str(caught.value)
    for part in ("weights 0.09 GiB", "gradients 0.09", "optimizer 0.19", "activations ", "loss "):
        assert part in said
    assert f"about {(memory.peak_on_cpu + PROCESS) / GIB:.2f} GiB" in said
    assert f"cpu has {0.7 * memory.peak / GIB:.2f} GiB" in said
    assert "lower train.micro_batch_size (now 64), which changes no result" in said
    assert "\n" not in said

    give(monkeypatch, 0.8 * memory.peak)  # within what the estimate may be off
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
        ({"train.batch_size": 10**9, "train.micro_batch_size": 1}, "lower train.batch_size"),
        ({"model.max_seq_len": 10**12}, "model.max_seq_len"),
        ({"model.n_layers": 10**12}, "model.n_layers = 1,000,000,000,000: as objects alone"),
        (
            {"train.batch_size": 1, "model.max_seq_len": 1 << 20, "data.seq_len": 1 << 20},
            "lower data.seq_len (now 1048576)",
        ),
    ],
    ids=str,
)
def test_the_advice_names_what_is_too_large(
    overrides: dict[str, Any], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, 2 * GIB)
    with pytest.raises(ConfigError) as caught:
        refuse_what_cannot_fit(run_config(**overrides), CPU)
    assert advice in str(caught.value)


def test_asking_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(**{"model.n_layers": 32})
    refuse_what_cannot_fit(config, CPU)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        refuse_what_cannot_fit(config, CPU)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.01


def test_train_refuses_it_at_once_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text("tokenizer: {kind: byte}\ntrain: {device: cpu}\n")
    give(monkeypatch, 2 * GIB)
    command = [sys.executable, "-m", "minillama", "train", "run.yaml", "model.dim=16384"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("minillama: training needs about ")
    assert "cpu has 2.00 GiB; lower model.dim" in done.stderr
    assert not (tmp_path / "runs").exists()
