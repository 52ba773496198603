"""Real cells in real worker processes, as small as they come."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from minillama.ablation.analysis import analyse_arms, compare_arms
from minillama.ablation.grid import Cell, cells
from minillama.ablation.pool import Ended, Pool
from minillama.ablation.report.prose import headline
from minillama.ablation.results import ENDED, read_results, read_sessions
from minillama.ablation.runner import dry_run, run
from minillama.cli import main
from minillama.config.ablation import AblationConfig, load_ablation
from minillama.config.run import to_yaml
from minillama.errors import ConfigError, MinillamaError, RunFolderError

LN = {"model.norm.kind": "layernorm"}


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "cells.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def headline_of(folder: Path) -> str:
    results = read_results(folder)
    arms = analyse_arms(results)
    return headline(results, arms, compare_arms(arms, results.margin))


def test_every_cell_ends_in_a_row_of_the_table(
    ablation: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    arms = {
        "rms": {},
        "killer": {"model.norm.kind": "killer"},
        "faulty": {"model.norm.kind": "faulty"},
        "ln": {"model.norm.kind": "layernorm"},
    }
    folder = run(ablation(arms=arms, lr=[1e-3, 1e30]))
    table = rows(folder)
    assert [(row["arm"], float(row["lr"]), row["fate"]) for row in table] == [
        ("rms", 1e-3, "undertrained"),
        ("rms", 1e30, "diverged"),
        ("killer", 1e-3, "crashed"),
        ("killer", 1e30, "crashed"),
        ("faulty", 1e-3, "crashed"),
        ("faulty", 1e30, "crashed"),
        ("ln", 1e-3, "undertrained"),
        ("ln", 1e30, "diverged"),
    ]
    good, diverged, killed, faulty = (table[i] for i in (0, 1, 2, 4))
    summary = json.loads((folder / good["run_dir"] / "summary.json").read_text())
    assert float(good["val_loss"]) == summary["val_loss"]
    assert (good["steps"], good["threads"], summary["threads"]) == ("4", "1", 1)
    assert (diverged["val_loss"], killed["val_loss"]) == ("", "")
    assert killed["error"] == "the worker was killed by SIGKILL; out of memory?"
    assert faulty["error"] == "ArithmeticError: this norm cannot be built"
    parts = [float(good[f"{part}_seconds"]) for part in ("training", "validation", "starting")]
    assert min(parts) > 0
    assert sum(parts[:2]) < float(good["seconds"])
    (session,) = read_sessions(folder)
    assert (session.workers, session.threads) == (2, 1)
    assert max(float(row["seconds"] or 0) for row in table) < session.seconds
    assert parts[2] < session.seconds
    log = (folder / faulty["run_dir"] / "log.txt").read_text()
    assert "about to fail" in log
    assert "Traceback" in log

    shown = capfd.readouterr().err
    assert "[8/8]" in shown
    assert "rms, lr 0.001, seed 0: undertrained, validation loss" in shown
    assert "8/8 cells, 0 running" in shown
    assert "\r" not in shown  # a log gets plain lines, and few of them
    assert shown.count("\n") < 15

    files = [path for path in folder.rglob("*.json*") if path.is_file()]
    assert {"metrics.jsonl", "sessions.json", "summary.json"} <= {path.name for path in files}
    for path in files:
        text = path.read_text()
        for entry in text.splitlines() if path.suffix == ".jsonl" else [text]:
            json.loads(entry, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    numbers = [value.lower() for row in table for value in row.values()]
    assert not {"nan", "none"} & set(numbers)

    before = (folder / good["run_dir"] / "summary.json").stat().st_mtime_ns
    less = {name: arms[name] for name in ("rms", "ln")}
    assert run(ablation(arms=less, lr=[1e-3, 1e30])) == folder  # all is finished: starts nothing
    assert (folder / good["run_dir"] / "summary.json").stat().st_mtime_ns == before
    assert [row["fate"] for row in rows(folder)] == ["undertrained", "diverged"] * 2
    assert load_ablation(folder / "ablation.yaml").lr == [1e-3, 1e30]


def test_stopping_hopeless_cells_saves_steps_and_changes_no_measure(
    ablation: Any, tmp_path: Path
) -> None:
    tables = []
    for stops in (True, False):
        config = ablation(arms={"rms": {}}, lr=[1e-3, 1e30], out_dir=str(tmp_path / f"{stops}"))
        runner = config.runner.model_copy(update={"stop_hopeless": stops})
        tables.append(rows(run(config.model_copy(update={"runner": runner}))))
    cut, whole = tables
    assert int(cut[1]["steps"]) < int(whole[1]["steps"]) == int(whole[0]["steps"]) == 4
    same = ("arm", "lr", "seed", "fate", "val_loss", "best_val_loss", "spike_score")
    same += ("grad_norm_max", "grad_norm_p99", "clipped_share", "init_val_loss")
    for one, other in zip(cut, whole, strict=True):
        assert {key: one[key] for key in same} == {key: other[key] for key in same}


def test_if_every_cell_crashes_the_first_error_is_shown(ablation: Any) -> None:
    with pytest.raises(MinillamaError, match=r"every cell crashed.*this norm cannot.*log\.txt"):
        run(ablation(arms={"rms": {"model.norm.kind": "faulty"}}), progress=False)


def _start(config: AblationConfig, path: Path) -> "subprocess.Popen[str]":
    path.write_text(to_yaml(config))
    code = (
        "import sys; from minillama.ablation.runner import run; "
        "from minillama.config.ablation import load_ablation; run(load_ablation(sys.argv[1]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stderr=subprocess.PIPE, text=True
    )


def _wait_for_steps(folder: Path, more_than: int) -> None:
    """Wait until some cell has logged more lines than that."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        logged = [path.read_text().count("\n") for path in folder.glob("cells/*/*/*/metrics.jsonl")]
        if logged and max(logged) > more_than:
            return
        time.sleep(0.05)
    raise AssertionError("no cell logged that many steps")


def test_a_stopped_and_killed_ablation_ends_like_an_undisturbed_one(
    ablation: Any, tmp_path: Path
) -> None:
    train = {"train.steps": 600, "train.save_every": 600}
    whole = ablation(overrides=train, out_dir=str(tmp_path / "whole"))
    broken = ablation(overrides=train, out_dir=str(tmp_path / "broken"))
    folder = tmp_path / "broken"

    process = _start(broken, tmp_path / "broken.yaml")
    _wait_for_steps(folder, 50)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert "InterruptedRunError: stopped with 0 of 2 cells ended" in said
    saved = list(folder.glob("cells/*/*/*/checkpoints/step-*"))
    assert saved
    assert rows(folder) == []
    reached = max(int(path.name.removeprefix("step-")) for path in saved)

    process = _start(broken, tmp_path / "broken.yaml")
    _wait_for_steps(folder, reached + 50)
    process.kill()
    process.communicate(timeout=300)
    for cell in folder.glob("cells/*/*/*"):  # a worker that lost its parent saves and leaves
        with FileLock(cell / ".lock", timeout=30):
            assert json.loads((cell / "summary.json").read_text())["finished"] is False

    run(broken, progress=False)
    run(whole, progress=False)
    assert _untimed(folder) == _untimed(tmp_path / "whole")


def _untimed(folder: Path) -> list[dict[str, str]]:
    """Return cells.csv without the columns that depend on the clock."""
    return [
        {
            column: value
            for column, value in row.items()
            if "seconds" not in column and column != "tokens_per_s"
        }
        for row in rows(folder)
    ]


def _children(pid: int) -> list[int]:
    """Return the processes that ``pid`` started; none if it has ended."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):  # threads start the workers
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds workers in /proc")
def test_ten_kills_do_not_change_the_table(ablation: Any, tmp_path: Path) -> None:
    """In turn: the parent alone, a worker alone, all of them as when the power goes."""
    fields: dict[str, Any] = {
        "overrides": {"train.steps": 1500, "train.save_every": 20, "train.log_every": 5},
        "lr": [1e-3, 1e-2],
        "seeds": [0, 1],
    }
    draw = random.Random(0)
    broken = ablation(**fields, out_dir=str(tmp_path / "broken"))
    kills: list[str] = []
    while len(kills) < 10:
        process = _start(broken, tmp_path / "broken.yaml")
        deadline = time.monotonic() + 300
        while not _children(process.pid) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(draw.uniform(1.0, 6.0))
        workers = _children(process.pid)
        what = ("parent", "worker", "all")[len(kills) % 3]
        doomed = {"parent": [process.pid], "worker": workers[:1], "all": [process.pid, *workers]}
        if process.poll() is None and doomed[what]:
            for pid in doomed[what]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            kills.append(what)
        if what == "worker":
            time.sleep(0.5)
            process.kill()
        process.communicate(timeout=300)
        assert process.returncode, f"the grid ended after {kills}; lengthen it"
    run(broken, progress=False)
    run(ablation(**fields, out_dir=str(tmp_path / "whole")), progress=False)
    assert _untimed(tmp_path / "broken") == _untimed(tmp_path / "whole")
    assert {row["fate"] for row in rows(tmp_path / "broken")} <= set(ENDED)


def test_finished_cells_of_an_edited_plugin_are_refused(ablation: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("STRENGTH = 1\n")
    config = ablation(base=ablation().base | {"plugins": [str(own)]}, arms={"rms": {}})
    (tmp_path / "ablation.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-m", "minillama", "ablate", str(tmp_path / "ablation.yaml")]

    def ablate() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    for _ in range(2):  # unedited, the finished cell is kept
        done = ablate()
        assert done.returncode == 0, done.stderr
    own.write_text("STRENGTH = 2\n")
    refused = ablate()
    assert refused.returncode == 2
    assert "rms/lr-0.001/seed-0 was made before a file of plugins was edited" in refused.stderr


def test_cells_of_another_config_are_refused_before_any_work(ablation: Any, tmp_path: Path) -> None:
    cell = tmp_path / "out/cells/ln/lr-0.001/seed-0"
    cell.mkdir(parents=True)
    from_before = ablation().base | {"train": {"steps": 9}, "name": "x", "out_dir": "elsewhere"}
    (cell / "config.yaml").write_text(json.dumps(from_before))
    with pytest.raises(ConfigError) as caught:
        run(ablation())
    assert "set another out_dir" in str(caught.value)
    assert f"{cell} has model.norm.kind = 'rmsnorm', not 'layernorm'" in str(caught.value)
    assert not (tmp_path / "out/ablation.yaml").exists()


def test_a_narrowed_grid_keeps_the_rows_of_finished_cells(ablation: Any) -> None:
    folder = run(ablation(lr=[1e-3, 3e-3], seeds=[0, 1]))
    before = rows(folder)
    run(ablation(lr=[1e-3], seeds=[0]))
    after = rows(folder)
    key = ("arm", "lr", "seed")
    assert [(*(row[k] for k in key), row["in_grid"]) for row in after[:2]] == [
        ("rms", "0.001", "0", "True"),
        ("ln", "0.001", "0", "True"),
    ]
    assert {row["in_grid"] for row in after[2:]} == {"False"}
    without = [{k: v for k, v in row.items() if k != "in_grid"} for row in before + after]
    assert sorted(without[:8], key=str) == sorted(without[8:], key=str)
    assert "6 finished runs in this folder are left out" in headline_of(folder)


@pytest.mark.parametrize(
    ("more", "n_new"),
    [
        ({"seeds": [0, 1]}, 4),
        ({"lr": [1e-3, 2e-3, 3e-3]}, 2),
        ({"arms": {"rms": {}, "new": {"model.norm.kind": "l2norm"}, "ln": LN}}, 2),
    ],
)
def test_seeds_rates_and_arms_are_added_to_a_finished_grid(
    ablation: Any, pool_here: Any, more: dict[str, Any], n_new: int
) -> None:
    small = {"arms": {"rms": {}, "ln": LN}, "lr": [1e-3, 3e-3]}
    folder = run(ablation(**small), progress=False, make_pool=pool_here)
    before = {path: path.read_bytes() for path in folder.glob("cells/*/*/*/summary.json")}
    trained = []

    def spy(cells: Sequence[Cell], workers: int, threads: int) -> Any:
        trained.extend(cells)
        return pool_here(cells, workers, threads)

    run(ablation(**small | more), progress=False, make_pool=spy)
    assert len(trained) == n_new
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(rows(folder)) == 4 + n_new


def test_a_folder_serves_one_ablation_at_a_time(ablation: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (
        FileLock(tmp_path / "out/.lock"),
        pytest.raises(RunFolderError, match="another ablation is running"),
    ):
        run(ablation())


def test_a_dry_run_counts_tokens_and_times_real_steps(ablation: Any, tmp_path: Path) -> None:
    stages = [{"seeds": [0]}, {"seeds": 2, "rates": "best_and_neighbours"}]
    text = dry_run(ablation(overrides={"train.steps": 100}, stages=stages))
    assert "cells/rms/lr-0.001/seed-0: 3,200 tokens" in text
    assert "2 of 2 cells to run, 6,400 tokens" in text
    assert "then at most 4 cells with fresh seeds" in text
    assert "about " in text
    assert "workers: 2, threads per worker: 1" in text
    assert not (tmp_path / "out").exists()


def test_the_pool_leaves_no_process_when_its_body_fails(ablation: Any, tmp_path: Path) -> None:
    grid = cells(ablation(overrides={"train.steps": 100_000}))
    for cell in grid:  # as the runner does: a worker makes no folder that was removed
        cell.folder.parent.mkdir(parents=True)
    pool = Pool(grid, 2, 1)
    with suppress(ZeroDivisionError), pool:
        _wait_for_steps(tmp_path / "out", 2)
        raise ZeroDivisionError
    assert not pool.busy
    ends = []
    while not pool.events.empty():
        ends.append(pool.events.get())
    assert {e.outcome for e in ends if isinstance(e, Ended)} == {"interrupted"}


def test_running_needs_no_report_extra() -> None:
    code = (
        "import sys, minillama.ablation.runner; "
        "print(sorted({'scipy', 'plotly', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


ODD_PLUGIN = '''
import os, signal, sys

from minillama.model.norms import RMSNorm, register_norm


@register_norm("exits")
def exits(dim: int):
    """Exits with status 0, as os._exit in a plugin does."""
    os._exit(0)


@register_norm("leaves")
def leaves(dim: int):
    """Raises SystemExit."""
    sys.exit()


@register_norm("interrupted")
def interrupted(dim: int):
    """Gets the signal of Ctrl-C, which the parent did not."""
    os.kill(os.getpid(), signal.SIGINT)
    return RMSNorm(dim)


@register_norm("reads")
def reads(dim: int):
    """Reads stdin, which must be empty."""
    assert sys.stdin.read() == ""
    return RMSNorm(dim)
'''


def test_cells_that_exit_early_have_crashed(
    ablation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    plugin = tmp_path / "odd_plugin.py"
    plugin.write_text(ODD_PLUGIN)
    user = tmp_path / "user"
    user.mkdir()
    for name in ("queue", "statistics"):  # must not shadow the standard library
        (user / f"{name}.py").write_text("raise ImportError('shadowed')\n")
    monkeypatch.chdir(user)
    kinds = ("exits", "leaves", "interrupted", "reads")
    arms: dict[str, Any] = {"rms": {}} | {kind: {"model.norm.kind": kind} for kind in kinds}
    arms["x" * 300] = {"model.norm.eps": 1e-5}
    config = ablation(arms=arms, base=ablation().base | {"plugins": [str(plugin)]})
    path = tmp_path / "odd.yaml"
    path.write_text(to_yaml(config))
    assert main(["ablate", str(path), "-q"]) == 4
    said = capsys.readouterr().err
    assert "3 of 6 cells crashed; the first: the worker exited before its cell was" in said
    assert said.count("\n") == 1
    folder = tmp_path / "out"
    assert [(row["arm"][:9], row["fate"]) for row in rows(folder)] == [
        ("rms", "undertrained"),
        ("exits", "crashed"),
        ("leaves", "crashed"),
        ("interrupt", "crashed"),
        ("reads", "undertrained"),
        ("xxxxxxxxx", "undertrained"),
    ]
    assert rows(folder)[5]["arm"] == "x" * 300
    assert len(Path(rows(folder)[5]["run_dir"]).parts[1]) < 100
    assert "ended by sys.exit" in rows(folder)[2]["error"]
    assert (folder / "report.html").is_file()


def test_a_folder_moved_under_a_running_grid_is_not_made_again(ablation: Any) -> None:
    config = ablation(runner={"workers": 1, "threads": 1}, overrides={"train.steps": 100_000})
    folder = Path(config.out_dir)

    def remove() -> None:
        while not any(file.stat().st_size for file in folder.glob("cells/*/*/*/metrics.jsonl")):
            time.sleep(0.02)
        folder.rename(folder.with_name("moved"))

    thread = threading.Thread(target=remove)
    thread.start()
    with pytest.raises(RunFolderError, match=r"was removed, moved or replaced .* restore it"):
        run(config, progress=False)
    thread.join()
    assert not folder.exists()
