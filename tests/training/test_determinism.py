"""Same config, same bits: in any process, whatever watches; and two runs never share a folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minillama.config.run import to_yaml
from minillama.training.checkpoint import hash_tensors, read_checkpoint
from minillama.training.metrics import read_metrics
from minillama.training.trainer import train

PLAIN = {"train.eval_every": 0, "data.val_fraction": 0.02, "train.steps": 12}
WATCHED = PLAIN | {
    "train.eval_every": 1,
    "train.probe_every": 1,
    "train.save_every": 1,
    "train.sample_prompt": "the",
}


def start(config, file, **environment):
    file.write_text(to_yaml(config))
    return subprocess.Popen(
        [sys.executable, "-m", "minillama", "train", str(file), "--quiet"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def bits(config):
    resumed = read_checkpoint(Path(config.out_dir) / "checkpoints" / "last", for_resume=True)
    lines = read_metrics(Path(config.out_dir) / "metrics.jsonl")
    losses = [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
    return hash_tensors(resumed.weights), hash_tensors(resumed.state["optimizer"]), losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_watches_a_run_changes_no_bit_of_it(tiny, dtype):
    pytest.importorskip("tensorboard")
    plain = tiny("plain", **PLAIN | {"train.dtype": dtype})
    train(plain, progress=False)
    watched = tiny("watched", loggers=["tensorboard"], **WATCHED | {"train.dtype": dtype})
    train(watched, progress=True)
    assert bits(plain) == bits(watched)


def test_another_process_computes_the_same_bits(tiny, tmp_path):
    here = tiny("here", **PLAIN)
    train(here, progress=False)
    there = tiny("there", **WATCHED)
    process = start(there, tmp_path / "there.yaml", PYTHONHASHSEED="77")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert bits(here) == bits(there)


def test_of_two_runs_that_begin_in_one_folder_at_once_one_is_refused(tiny, tmp_path):
    config = tiny("both", **PLAIN | {"train.steps": 250})
    file = tmp_path / "both.yaml"
    processes = [start(config, file) for _ in range(2)]
    ends = []
    for process in processes:
        _, said = process.communicate(timeout=300)
        ends.append((process.returncode, said))
    (good, _), (refused, said) = sorted(ends)
    assert good == 0
    assert refused in (1, 2)  # 2 if the other one had written its config by then
    assert "another run is writing into this folder" in said or "already holds" in said
    alone = tiny("alone", **PLAIN | {"train.steps": 250})
    train(alone, progress=False)
    assert bits(config) == bits(alone)
