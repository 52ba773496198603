"""Cells as tasks of a real Ray cluster: nodes on this machine, one of which is killed."""

import csv
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from minillama.ablation import ray_runner, runner
from minillama.cli import main
from minillama.config import load_config
from minillama.config.ablation import AblationConfig
from minillama.config.run import to_yaml
from minillama.errors import ConfigError

OF_THE_MACHINE = (
    *("seconds", "training_seconds", "validation_seconds", "starting_seconds"),
    "tokens_per_s",
)
"""Columns of cells.csv that no two runs share."""


@pytest.fixture(scope="module")
def on_nodes() -> Iterator[Path]:
    """Where the nodes have their folders; pytest's own names are too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def cluster(on_nodes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose head trains nothing, without nodes as yet; this process is its driver."""
    quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("MINILLAMA_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TMPDIR", str(on_nodes))
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": 80_000_000,
                "_system_config": quick,
            },
        )
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def ablation(tmp_path: Path) -> Any:
    """Return a function that makes the config of a tiny ablation."""
    (tmp_path / "text.txt").write_text("A node may be lost, and the table is the same. " * 60)

    def make(out: str, steps: int, **kind: Any) -> AblationConfig:
        base = {
            "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 16, "ffn_dim": 16},
            "tokenizer": {"kind": "byte"},
            "data": {
                "source": {"kind": "files", "files": [str(tmp_path / "text.txt")]},
                "seq_len": 16,
                "val_fraction": 0.1,
            },
            "train": {"steps": steps, "batch_size": 2, "device": "cpu", "eval_every": 0},
        }
        return AblationConfig(
            name="test",
            out_dir=str(tmp_path / out),
            base=base,
            arms={"rms": {}, "ln": {"model.norm.kind": "layernorm"}},
            baseline="rms",
            lr=[1e-3, 1e30],
            runner=kind,
        )

    return make


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "cells.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k not in OF_THE_MACHINE} for row in table]


def cells_that_train(on_nodes: Path) -> int:
    """Return how many cells have logged some steps on a node."""
    files = on_nodes.glob("minillama-*/run/metrics.jsonl")
    return sum(path.read_text().count("\n") > 20 for path in files)


@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_nodes_give_the_table_of_the_local_runner(
    kills: bool,
    cluster: Cluster,
    on_nodes: Path,
    ablation: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    steps = 1500 if kills else 300
    nodes = [cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)]
    config = ablation("ray", steps, kind="ray")
    folders: list[Path] = []
    thread = threading.Thread(target=lambda: folders.append(ray_runner.run(config)))
    thread.start()
    try:
        deadline = time.monotonic() + 300
        while kills and cells_that_train(on_nodes) < 2:  # one on each
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if kills:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        thread.join(600)  # a loaded machine needs more than a minute
    finally:
        for node in nodes:
            cluster.remove_node(node)
    assert not thread.is_alive(), "the grid did not end in time"
    (folder,) = folders
    local = runner.run(ablation("local", steps, workers=1, threads=1), progress=False)
    assert rows(folder) == rows(local)
    assert [row["fate"] == "diverged" for row in rows(folder)] == [False, True] * 2
    assert "4/4 cells, 0 running" in capfd.readouterr().err

    cell = folder / rows(folder)[0]["run_dir"]
    brought = ["config.yaml", "log.txt", "metrics.jsonl", "summary.json"]
    assert sorted(path.name for path in cell.iterdir()) == brought
    assert load_config(cell).out_dir == str(cell)

    # All is finished, so the command asks for no node, of which there is none.
    (tmp_path / "test.yaml").write_text(to_yaml(ablation("ray", steps)))
    assert main(["ablate", str(tmp_path / "test.yaml"), "runner.kind=ray", "-q"]) == 0
    assert (folder / "report.html").is_file()


def test_a_cell_too_large_for_every_node_is_refused(cluster: Cluster, ablation: Any) -> None:
    with pytest.raises(ConfigError, match="no node of the Ray cluster has 9999 cores"):
        ray_runner.run(ablation("wide", 4, kind="ray", threads=9999), progress=False)


def test_a_missing_cluster_is_an_error_of_one_line(ablation: Any, tmp_path: Path) -> None:
    (tmp_path / "test.yaml").write_text(to_yaml(ablation("none", 4)))
    command = [sys.executable, "-m", "minillama", "ablate", "test.yaml", "runner.kind=ray"]
    command.append("runner.address=nowhere")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("minillama: runner.address = 'nowhere': no Ray cluster answers (")
    assert "start one with `ray start --head`" in done.stderr
    assert done.stderr.count("\n") == 1
