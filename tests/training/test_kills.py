"""Killed at any moment, a run goes on to the bit; terminated, it saves and says so.

A nursery process imports everything once and forks a run per kill, so that a kill costs a fraction
of a second.  Half of the kills come after a random time, anywhere in the run; the others at some
operation on a file, which Python reports to its audit hooks beforehand: these fall into saves.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from minillama.config.run import to_yaml
from minillama.files import TEMPORARY_PREFIX
from minillama.training.checkpoint import read_checkpoint
from minillama.training.metrics import read_metrics
from minillama.training.trainer import train

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

OFTEN = {
    "train.steps": 30,
    "train.save_every": 1,
    "train.eval_every": 3,
    "train.probe_every": 4,
    "train.keep_last": 2,
    "data.val_fraction": 0.02,
    "train.sample_prompt": "the",
}

NURSERY = """
import json, os, signal, sys, time, traceback
from minillama.config import load_config
from minillama.training.trainer import train

FILES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}

def dies_at(operation, folder):
    left = [operation]
    def hook(event, arguments):
        if event in FILES and any(folder in str(argument) for argument in arguments):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    return hook

for line in sys.stdin:
    file, seconds, operation = json.loads(line)
    child = os.fork()
    if child == 0:
        try:
            config = load_config(file)
            if operation is not None:
                sys.addaudithook(dies_at(operation, config.out_dir))
            train(config, resume=True, progress=False)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)  # one that has ended stays a zombie
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture
def nursery():
    """Return a function that starts a run and kills it; it returns whether the run had ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # as here; sums differ in the last bit
    )

    def ended(file, seconds=None, operation=None):
        process.stdin.write(json.dumps([str(file), seconds, operation]) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        assert status in (0, signal.SIGKILL), "the run failed: see its traceback"
        return status == 0

    with process:
        yield ended
        process.stdin.close()


def outcome(config):
    """All that a run leaves, but for what the clock decides."""
    folder = Path(config.out_dir)
    resumed = read_checkpoint(folder / "checkpoints" / "last", for_resume=True)
    lines = read_metrics(folder / "metrics.jsonl")
    for line in lines:
        line.pop("tokens_per_s", None)
    summary = json.loads((folder / "summary.json").read_text())
    seconds = [key for key in summary if "seconds" in key]
    for timed in (*seconds, "tokens_per_s", "name", "command"):
        del summary[timed]
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    return resumed, lines, summary, names


def assert_equal(one, other):
    """To the bit: weights, moments, what is drawn next, metrics, summary, what is kept."""
    (ours, *our_rest), (theirs, *their_rest) = one, other
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in ours.weights.items():
        assert torch.equal(weight, theirs.weights[name]), name
    for name, moment in ours.state["optimizer"].items():
        assert torch.equal(moment, theirs.state["optimizer"][name]), name
    assert torch.equal(ours.state["rng"], theirs.state["rng"])
    assert our_rest == their_rest


def kill_and_go_on(tiny, tmp_path, nursery, n_kills, seed):
    """Kill runs ``n_kills`` times, each going on where it was; return how many kills met a save."""
    whole = tiny("whole", **OFTEN)
    train(whole, progress=False)
    expected = outcome(whole)
    file = tmp_path / "parts.yaml"
    draw, kills, in_saves, n_runs = random.Random(seed), 0, 0, 0
    while kills < n_kills:
        n_runs += 1
        config = tiny(f"parts-{n_runs}", **OFTEN)
        file.write_text(to_yaml(config))
        checkpoints = Path(config.out_dir) / "checkpoints"
        reached = 0
        while True:
            if kills == n_kills:
                ended = nursery(file)  # the last of them may finish
            elif kills % 2:
                ended = nursery(file, operation=draw.randrange(200))
            else:
                ended = nursery(file, seconds=draw.uniform(0.01, 0.4))
            if ended:
                break
            kills += 1
            in_saves += any(checkpoints.glob(f"{TEMPORARY_PREFIX}*"))
            whole_ones = sorted(checkpoints.glob("step-*"))
            for folder in whole_ones:  # not the last alone: what has the name is whole
                read_checkpoint(folder, for_resume=True)
            newest = int(whole_ones[-1].name.removeprefix("step-")) if whole_ones else 0
            assert newest >= reached
            reached = newest
        assert_equal(outcome(config), expected)
    assert kills == n_kills
    return in_saves


def test_a_run_that_is_killed_three_times_ends_as_if_nothing_had_happened(tiny, tmp_path, nursery):
    kill_and_go_on(tiny, tmp_path, nursery, 3, seed=0)


@pytest.mark.slow
def test_a_run_that_is_killed_fifty_times_ends_as_if_nothing_had_happened(tiny, tmp_path, nursery):
    in_saves = kill_and_go_on(tiny, tmp_path, nursery, 50, seed=1)
    print(f"{in_saves} of 50 kills fell into the middle of a save")
    assert in_saves >= 10


def test_each_moment_of_a_save_may_be_the_last(tiny, tmp_path, nursery):
    """One after the other, the first file operations of a resume, of a save and of its tidying."""
    config = tiny("parts", **OFTEN | {"train.steps": 4})
    file = tmp_path / "parts.yaml"
    file.write_text(to_yaml(config))
    whole = tiny("whole", **OFTEN | {"train.steps": 4})
    train(whole, progress=False)
    for operation in range(0, 90, 9):
        nursery(file, operation=operation)
    assert nursery(file)
    assert_equal(outcome(config), outcome(whole))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_saves_and_ends_with_130(tiny, tmp_path, number):
    config = tiny("run", **OFTEN | {"train.steps": 100_000, "train.save_every": 0})
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "minillama", "train", str(file), "--quiet"],
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = Path(config.out_dir) / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") > 20:
            break
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "saved; continue with: minillama train" in said
    assert "Traceback" not in said
    step = read_metrics(metrics)[-1]["step"]
    assert step < 100_000 / 2  # it ended after the step it was in, and not when it was done
    assert (Path(config.out_dir) / "checkpoints" / f"step-{step:06d}").is_dir()
