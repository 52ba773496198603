"""Failures are counted with their distance to the line, and with the line elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from minillama.ablation.analysis import analyse_arms
from minillama.ablation.report.fates import FateRow, failed_in_all, fate_rows
from minillama.ablation.results import read_results

LINE = 5.0 - 0.1  # the unigram entropy of the runs made by conftest.py, minus the margin


def rows(folder: Path) -> list[FateRow]:
    return fate_rows(analyse_arms(read_results(folder)))


def test_counts_follow_the_line(make_ablation: Any) -> None:
    losses = [LINE - 0.2, LINE - 0.07, LINE + 0.02, LINE + 0.08, None]
    (row,) = rows(make_ablation({"a": {1e-3: losses}}))
    assert row.failed_at == (4, 3, 3, 2, 1)
    assert row.distances == pytest.approx((-0.2, 0.08))
    assert row.fates == {"ok": 2, "collapsed": 2, "diverged": 1}
    wilson = stats.binomtest(3, 5).proportion_ci(method="wilson")
    assert (row.low, row.high) == pytest.approx((wilson.low, wilson.high))
    assert row.is_notable


def test_a_run_still_falling_never_counts_as_failed(make_ablation: Any) -> None:
    folder = make_ablation({"a": {1e-4: [LINE + 0.3], 1e-3: [LINE - 0.3]}})
    path = folder / "cells/a/lr-0.0001/seed-0/summary.json"
    entries = {"fate": "undertrained", "still_falling": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    low, high = rows(folder)
    assert low.failed_at == (0,) * 5
    assert low.is_notable
    assert not high.is_notable
    assert failed_in_all([low, high]) == (0,) * 5


def test_runs_of_earlier_versions_have_distances(make_ablation: Any) -> None:
    folder = make_ablation({"a": {1e-3: [LINE + 0.01]}})
    summary = json.loads((folder / "cells/a/lr-0.001/seed-0/summary.json").read_text())
    assert not {"still_falling", "distance_to_collapse"} & set(summary)
    assert rows(folder)[0].failed_at == (1, 1, 1, 0, 0)
