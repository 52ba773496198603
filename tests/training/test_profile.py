"""The step's clock and its trace."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from minillama.training.profile import PARTS, TRACE, WARMUP, StepClock
from minillama.training.trainer import train


def test_a_clock_reports_the_mean_of_each_part_without_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("minillama.training.profile.time.perf_counter", lambda: now)
    clock = StepClock(0, torch.device("cpu"))
    assert clock.report() is None
    for step in range(WARMUP + 4):
        with clock.step(tmp_path / TRACE):
            with clock.part("forward"):
                now += 0.05 if step < WARMUP else 0.002
            now += 0.001
    total, _, parts = str(clock.report()).partition("ms: ")
    times = {name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+)", parts)}
    assert total == "a step took 3.0 "
    assert times == dict.fromkeys(PARTS, 0.0) | {"forward": 2.0, "other": 1.0}
    assert not (tmp_path / TRACE).exists()


@pytest.mark.parametrize(("steps", "traced"), [(8, 2), (5, 50)])
def test_a_run_leaves_a_trace_that_viewers_open_and_the_same_weights(
    tiny: Any, caplog: pytest.LogCaptureFixture, steps: int, traced: int
) -> None:
    plain = tiny(out="plain", **{"train.steps": steps})
    config = tiny(out="traced", **{"train.steps": steps, "train.profile": traced})
    expected = train(plain, progress=False)
    with caplog.at_level(logging.INFO, logger="minillama"):
        summary = train(config, progress=False)
    assert summary["val_loss"] == expected["val_loss"]
    assert re.search(r"a step took [\d.]+ ms: data [\d.]+, forward", caplog.text)
    trace = json.loads((Path(config.out_dir) / TRACE).read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    n = min(traced, steps - WARMUP)
    for part in PARTS:
        assert names.count(part) >= n, part
    assert any(str(name).startswith("aten::") for name in names)
    assert not (Path(plain.out_dir) / TRACE).exists()


def test_recomputed_activations_change_no_bit(tiny: Any) -> None:
    def weights(out: str, recompute: bool) -> Any:
        config = tiny(out=out, **{"train.steps": 3, "train.recompute": recompute})
        return train(config, progress=False)["val_loss"]

    assert weights("kept", False) == weights("recomputed", True)
