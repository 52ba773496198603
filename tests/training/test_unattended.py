"""A long run leaks nothing: neither memory nor open files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minillama.config.run import to_yaml

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")

WATCHED = """
import gc, json, os, sys
from minillama.config import load_config
from minillama.data.batches import Batches
from minillama.training.trainer import train

file, every, leaks = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
page, seen, kept = os.sysconf("SC_PAGE_SIZE"), [], []
original = Batches.batch_at

def batch_at(self, step, rows):
    if step % every == 0:
        gc.collect()  # what a cycle keeps for a while is no leak
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * page
        seen.append((step, resident, len(os.listdir("/proc/self/fd")), len(gc.get_objects())))
    if "memory" in leaks:
        kept.append(bytearray(4096))
    if "files" in leaks and step % 100 == 0:
        kept.append(open(file))
    if "objects" in leaks:
        kept.append([step])
    return original(self, step, rows)

Batches.batch_at = batch_at
train(load_config(file), progress=False)
print(json.dumps(seen))
"""

TINY = {
    "model.dim": 8,
    "model.n_layers": 1,
    "model.n_heads": 1,
    "model.ffn_dim": 8,
    "train.batch_size": 2,
    "data.val_fraction": 0.02,
    "optim.warmup_steps": 0,
}


def watch(tiny, tmp_path, steps, every, *leaks):
    """Run that long and return (step, resident bytes, open files, Python objects), now and then."""
    often = steps // 20
    does = {"train.eval_every": often, "train.save_every": often, "train.probe_every": often // 5}
    config = tiny("_".join(("run", *leaks)), **TINY, **does, **{"train.steps": steps})
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(file), str(every), *leaks],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout)


def growth(seen, warm_up):
    """Return by how much memory, files and objects grew after the first ``warm_up`` steps."""
    settled = [numbers for step, *numbers in seen if step >= warm_up]
    first, rest = settled[0], settled[1:]
    memory = max(numbers[0] for numbers in rest) / first[0] - 1
    files = max(numbers[1] for numbers in rest) - first[1]
    objects = rest[-1][2] - first[2]
    return memory, files, objects


def test_fifteen_hundred_steps_leak_nothing(tiny, tmp_path):
    memory, files, objects = growth(watch(tiny, tmp_path, 1500, 250), 500)
    assert memory < 0.005
    assert files <= 0
    assert objects < 500


def test_a_leak_would_be_seen(tiny, tmp_path):
    """Planted: 4 KiB and an object a step, a file each hundred."""
    seen = watch(tiny, tmp_path, 1500, 250, "memory", "files", "objects")
    memory, files, objects = growth(seen, 500)
    assert memory > 0.005
    assert files > 5
    assert objects > 500


@pytest.mark.slow
def test_twenty_thousand_steps_leak_nothing(tiny, tmp_path):
    seen = watch(tiny, tmp_path, 20_000, 500)
    memory, files, objects = growth(seen, 2000)
    print(f"memory {memory:+.3%}, files {files:+d}, objects {objects:+d}; {seen[4]} {seen[-1]}")
    assert memory < 0.02
    assert files <= 0
    assert objects < 500
