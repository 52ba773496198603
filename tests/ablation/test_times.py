"""Where an ablation's time went; test_runner.py records it in real runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from minillama.ablation.progress import RunningSession
from minillama.ablation.report import write_report
from minillama.ablation.report.prose import where_time_went
from minillama.ablation.results import Session, read_results, read_sessions
from minillama.errors import RunFolderError

_LOSSES = {"rms": {1e-3: [2.0, 2.1]}, "ln": {1e-3: [2.2, None]}}
_TIMES = {"training_seconds": 9.0, "validation_seconds": 2.0, "starting_seconds": 1.5}


def _write_sessions(folder: Path, *sessions: tuple[float, float, int]) -> None:
    entries = [
        {"seconds": seconds, "preparing_seconds": before, "workers": workers, "threads": 1}
        for seconds, before, workers in sessions
    ]
    (folder / "sessions.json").write_text(json.dumps(entries))


def test_every_part_of_the_time_is_reported(make_ablation: Any) -> None:
    folder = make_ablation(_LOSSES, **_TIMES)
    longer = folder / "cells/ln/lr-0.001/seed-0/summary.json"
    longer.write_text(json.dumps(json.loads(longer.read_text()) | {"seconds": 18.5}))
    _write_sessions(folder, (20.0, 2.0, 2), (14.0, 0.5, 2))
    said = where_time_went(read_results(folder))
    assert said == (
        "The ablation took 36.5 s in 2 sessions, 2.5 s of it before the first cell, with 2 "
        "workers; "
        "the cells took 1 min 2 s together: 36.0 s in training steps, 8.0 s in validation, "
        "6.0 s in starting (process, imports, data, model) and 12.0 s in saving and "
        "logging; workers were idle for 6.0 s; the longest cell, ln, lr 0.001, seed 0, took 20.0 s."
    )
    assert said in write_report(folder).read_text()


def test_times_that_were_not_recorded_are_left_out(make_ablation: Any) -> None:
    folder = make_ablation(_LOSSES)
    said = where_time_went(read_results(folder))
    assert said == "The longest cell, rms, lr 0.001, seed 0, took 12.5 s."
    assert said in write_report(folder).read_text()
    newer = folder / "cells/ln/lr-0.001/seed-0/summary.json"
    newer.write_text(json.dumps(json.loads(newer.read_text()) | _TIMES))
    _write_sessions(folder, (13.0, 0.0, 1))
    said = where_time_went(read_results(folder))
    assert "with 1 worker; 1 cell took 14.0 s together" in said
    assert "idle" not in said


def test_an_ablation_without_runs_has_no_times(make_ablation: Any) -> None:
    folder = make_ablation({"rms": {1e-3: ["missing"]}})
    assert where_time_went(read_results(folder)) == ""


def test_sessions_are_appended(tmp_path: Path) -> None:
    assert read_sessions(tmp_path) == ()
    with RunningSession(tmp_path, 2, 1, 0.25):
        (begun,) = read_sessions(tmp_path)
    (ended,) = read_sessions(tmp_path)
    assert (ended.workers, ended.threads, ended.preparing_seconds) == (2, 1, 0.25)
    assert 0 <= begun.seconds <= ended.seconds
    with RunningSession(tmp_path, 1, 3, 0.0):
        pass
    assert [each.threads for each in read_sessions(tmp_path)] == [1, 3]
    assert read_sessions(tmp_path)[0] == ended
    assert isinstance(ended, Session)


@pytest.mark.parametrize("text", ["[{]", '[{"seconds": 1}]', "3"])
def test_a_damaged_sessions_file_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "sessions.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"sessions\.json is damaged.*delete it"):
        read_sessions(tmp_path)
