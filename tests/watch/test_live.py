"""What the page is told about run folders, and that growing files are read on, not again."""

import json
from pathlib import Path
from typing import Any

import pytest

from minillama.files import lock
from minillama.watch.live import LiveFolder, MetricsTail


def _line(step: int, loss: float = 2.0) -> bytes:
    return json.dumps({"step": step, "loss": loss, "grad_norm": 1.0}).encode() + b"\n"


def test_a_growing_file_is_read_on_from_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    tail.read()  # a missing file has no lines
    path.write_bytes(_line(1) + _line(2) + _line(3)[:-5])
    tail.read()
    assert tail.reader.curves().steps.tolist() == [1, 2]  # an incomplete line waits
    path.write_bytes(_line(1) + _line(2) + _line(3) + _line(4))
    tail.read()
    assert tail.reader.curves().steps.tolist() == [1, 2, 3, 4]
    replaced = tmp_path / "new"  # as a resume does, which cuts the lines after its checkpoint
    replaced.write_bytes(_line(1, 5.0))
    replaced.replace(path)
    tail.read()
    assert tail.reader.curves().loss.tolist() == [5.0]


@pytest.fixture
def live(make_ablation: Any) -> LiveFolder:
    losses = {"rms": {1e-3: [2.0, 2.1], 3e-3: [1.9, "missing"]}, "ln": {1e-3: [2.4, 2.4]}}
    losses["ln"][3e-3] = [None, "missing"]
    return LiveFolder(make_ablation(losses))


def test_the_state_counts_cells_by_how_they_ended(live: LiveFolder) -> None:
    state = live.state()
    assert state["counts"] == {"total": 8, "ended": 6, "failed": 1, "running": 0, "waiting": 2}
    assert [cell["state"] for cell in state["cells"]].count("diverged") == 1
    assert [cell["fate"] for cell in state["failed"]] == ["diverged"]
    json.dumps(state, allow_nan=False)  # strict JSON


def test_figures_are_sent_again_only_after_a_change(live: LiveFolder, make_ablation: Any) -> None:
    key = live.state()["figures_key"]
    assert "figures" not in live.state(key)
    cell = live.folder / "cells" / "rms" / "lr-0.001" / "seed-0" / "metrics.jsonl"
    cell.write_bytes(cell.read_bytes() + _line(10_000))
    assert "figures" in live.state(key)


def test_a_cell_whose_folder_is_locked_is_running(live: LiveFolder) -> None:
    folder = live.folder / "cells" / "rms" / "lr-0.003" / "seed-0"
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"finished": False}))
    with lock(folder / ".lock", busy="busy", timeout=0):
        state = live.state()
        assert [run["seed"] for run in state["running"]] == [0]
        assert state["running"][0]["y"]
    state = live.state()
    assert (state["counts"]["running"], state["counts"]["waiting"]) == (0, 3)


def test_what_a_crashed_cell_said_is_shown(live: LiveFolder) -> None:
    place = live.folder / "cells" / "ln" / "lr-0.003" / "seed-1"
    place.mkdir(parents=True)
    (place / "log.txt").write_text("Traceback: <b>no</b>")
    (live.folder / "cells.csv").write_text(
        "arm,lr,seed,fate,error\nln,0.003,1,crashed,OSError: disk\n"
    )
    failed = next(cell for cell in live.state()["failed"] if cell["fate"] == "crashed")
    assert failed["error"] == "OSError: disk"
    assert failed["log"] == "Traceback: <b>no</b>"
