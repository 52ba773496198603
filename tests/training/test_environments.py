"""Odd environments: no stderr, a full stdout, moved or changed files, a damaged last checkpoint."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from minillama.config.run import to_yaml
from minillama.errors import ConfigError, DivergedError, MinillamaError
from minillama.model.transformer import Transformer
from minillama.training.metrics import read_metrics
from minillama.training.run_folder import RunFolder
from minillama.training.trainer import train


def run(config, **options):
    return train(config, progress=False, **options)


def shell(config, redirect, *, wait=True):
    file = Path(config.out_dir).parent / "config.yaml"
    file.write_text(to_yaml(config))
    command = f'exec "$0" -m minillama train "$1" {redirect}'
    process = subprocess.Popen(
        ["sh", "-c", command, sys.executable, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return (*process.communicate(timeout=300), process.returncode) if wait else process


@pytest.mark.parametrize("redirect", ["2>&-", "2>&- >&-", "2>/dev/full", "-q 2>&-"])
def test_output_that_cannot_be_written_does_not_end_training(tiny, redirect):
    config = tiny(**{"train.steps": 2})
    _, _, status = shell(config, redirect)
    assert status == 0
    assert RunFolder(Path(config.out_dir)).read_summary()["finished"]


def test_training_goes_on_when_the_reader_of_its_output_has_gone(tiny):
    config = tiny(**{"train.steps": 2})
    process = shell(config, "2>&1", wait=False)
    process.stdout.close()
    process.stderr.close()
    process.wait(300)
    assert RunFolder(Path(config.out_dir)).read_summary()["finished"]


@pytest.mark.parametrize("signals", [[signal.SIGHUP], 2 * [signal.SIGINT], 3 * [signal.SIGINT]])
def test_a_hangup_and_interrupts_in_quick_succession_save(tiny, signals):
    config = tiny(**{"train.steps": 1_000_000, "train.save_every": 0})
    process = shell(config, "", wait=False)
    metrics = Path(config.out_dir) / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > 2000):
        time.sleep(0.02)
    for number in signals:
        process.send_signal(number)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert RunFolder(Path(config.out_dir)).newest() is not None


@pytest.mark.parametrize("code", [0, "a reason"])
def test_code_that_exits_is_an_error_and_no_success(tiny, monkeypatch, code):
    def leave(*args):
        sys.exit(code)

    monkeypatch.setattr(Transformer, "loss_sums", leave)
    with pytest.raises(MinillamaError, match=r"sys\.exit\(.*test_environments\.py, line"):
        run(tiny())


def test_a_moved_text_is_resumed_and_another_text_is_not(tiny, text_file, tmp_path):
    moved, other = tmp_path / "moved.txt", tmp_path / "other.txt"
    shutil.copy(text_file, moved)
    other.write_text(text_file.read_text()[::-1])
    run(tiny(**{"train.steps": 4}))
    with pytest.raises(ConfigError, match="no longer gives the text"):
        run(tiny(**{"data.source.files": [str(other)]}), resume=True)
    assert run(tiny(**{"data.source.files": [str(moved)]}), resume=True)["steps"] == 8


def test_an_edited_plugin_is_refused_at_a_resume_in_one_line(tiny, tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text("x = 1\n")
    fields = {"plugins": [str(plugin)]}
    run(tiny(**fields))
    plugin.write_text("x = 2\n")
    more = tiny(**fields, **{"train.steps": 10})
    _, stderr, status = shell(more, "--resume")
    assert status == 2
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("minillama: ")]
    assert line == stderr.splitlines()[-1]
    assert "cannot be resumed: plugins no longer have the source code that the run began" in line
    plugin.write_text("x = 1\n")
    assert run(more, resume=True)["steps"] == 10


def test_a_run_is_resumed_from_an_older_checkpoint_by_name(tiny, tmp_path):
    fields = {"train.save_every": 2, "train.keep_last": 9}
    config = tiny(**fields)
    expected = run(config)
    checkpoints = Path(config.out_dir) / "checkpoints"
    (checkpoints / "step-000008" / "trainer_state.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="is not a checkpoint in"):
        run(tiny(out="other", **fields), resume=checkpoints / "step-000004")
    summary = run(config, resume=checkpoints / "step-000004")
    assert summary["val_loss"] == expected["val_loss"]
    names = {path.name for path in checkpoints.glob("step-*")}
    assert names == {f"step-{step:06d}" for step in (2, 4, 6, 8)}
    steps = [line["step"] for line in read_metrics(checkpoints.parent / "metrics.jsonl")]
    assert steps == sorted(steps)


def test_the_files_of_a_diverged_run_are_strict_json(tiny):
    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    config = tiny(**{"optim.lr": 1e38, "optim.warmup_steps": 0, "train.on_nonfinite": "run_on"})
    with suppress(DivergedError):
        run(config)
    folder = Path(config.out_dir)
    texts = [(folder / "summary.json").read_text()]
    texts += (folder / "metrics.jsonl").read_text().splitlines()
    read = [json.loads(text, parse_constant=refuse) for text in texts]
    assert any("NaN" in str(line) or "Infinity" in str(line) for line in read[1:])


def test_threads_are_no_more_than_the_cpus_that_may_be_used(tiny, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("minillama.launch.usable_cpus", lambda: 1)
    torch.set_num_threads(2)
    try:
        assert run(tiny(**{"train.steps": 2}))["threads"] == 1
    finally:
        torch.set_num_threads(before)


def test_a_clock_that_is_set_back_makes_no_time_negative(tiny, monkeypatch):
    hours = itertools.count()
    monkeypatch.setattr(time, "time", lambda: 1e9 - 3600 * next(hours))
    summary = run(tiny(**{"train.steps": 2}))
    times = {key: value for key, value in summary.items() if key.endswith("seconds")}
    assert len(times) == 4
    assert all(0 <= value < 300 for value in times.values())
