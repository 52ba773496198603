import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from minillama.ablation.results import COLUMNS, read_curves, read_results, table_row
from minillama.errors import ConfigError, RunFolderError


def test_an_ablation_is_read_in_the_order_of_its_grid(make_ablation: Any) -> None:
    folder = make_ablation(
        {"rms": {1e-3: [2.0, 2.1], 3e-3: [1.9, None]}, "ln": {1e-3: [2.2, 4.95], 3e-3: [1.8, 1.9]}}
    )
    results = read_results(folder)
    assert results.arms == ("rms", "ln")
    assert results.baseline_of == {"rms": "rms", "ln": "rms"}
    assert [(r.arm, r.lr, r.seed, r.fate) for r in results.runs] == [
        ("rms", 1e-3, 0, "ok"),
        ("rms", 1e-3, 1, "ok"),
        ("rms", 3e-3, 0, "ok"),
        ("rms", 3e-3, 1, "diverged"),
        ("ln", 1e-3, 0, "ok"),
        ("ln", 1e-3, 1, "collapsed"),
        ("ln", 3e-3, 0, "ok"),
        ("ln", 3e-3, 1, "ok"),
    ]
    assert not results.missing


def test_cells_that_are_missing_unfinished_or_crashed_are_told_apart(make_ablation: Any) -> None:
    folder = make_ablation({"rms": {1e-3: [2.0, "missing", 2.1, "missing"]}})
    (folder / "cells/rms/lr-0.001/seed-2/summary.json").unlink()
    (folder / "cells.csv").write_text(
        "arm,lr,seed,fate,error\nrms,0.001,3,crashed,out of memory\nrms,0.001,0,ok,\n"
    )
    results = read_results(folder)
    assert [(r.seed, r.fate, r.error) for r in results.runs] == [
        (0, "ok", ""),
        (2, "unfinished", ""),
        (3, "crashed", "out of memory"),
    ]
    assert results.missing == (("rms", 1e-3, 1),)
    assert [r.ended for r in results.runs] == [True, False, False]


def test_cells_outside_a_narrowed_grid_stay_marked(make_ablation: Any) -> None:
    losses = {arm: {1e-3: [2.0, 2.1], 1e-1: [3.0, None]} for arm in ("rms", "ln", "a b")}
    folder = make_ablation(losses)
    shutil.move(folder / "cells/a b", folder / "cells/a-b-hash")  # as the grid names such an arm
    (folder / "cells/ln/lr-0.1/seed-1/summary.json").unlink()  # unfinished, so there is no result
    (folder / "cells.csv").write_text(
        "arm,lr,seed,fate,run_dir\na b,0.001,0,ok,cells/a-b-hash/lr-0.001/seed-0\n"
    )
    config = yaml.safe_load((folder / "ablation.yaml").read_text())
    narrow = {"arms": {"rms": {}, "ln": {}}, "lr": [1e-3], "seeds": [0]}
    (folder / "ablation.yaml").write_text(yaml.safe_dump(config | narrow, sort_keys=False))
    results = read_results(folder)
    assert [(r.arm, r.lr, r.seed) for r in results.runs] == [("rms", 1e-3, 0), ("ln", 1e-3, 0)]
    assert [(r.arm, r.lr, r.seed) for r in results.left_out if r.lr == 1e-3] == [
        ("a b", 1e-3, 0),
        ("a-b-hash", 1e-3, 1),
        ("ln", 1e-3, 1),
        ("rms", 1e-3, 1),
    ]
    assert results.left_out_reasons() == {
        "arm a b": 1,
        "arm a-b-hash": 3,
        "seed 1": 2,
        "learning rate 0.1": 3,
    }
    assert [table_row(r, folder)["in_grid"] for r in results.runs] == [True, True]
    assert {table_row(r, folder)["in_grid"] for r in results.left_out} == {False}


def test_a_finished_cell_is_not_called_crashed_by_an_older_table(make_ablation: Any) -> None:
    folder = make_ablation({"rms": {1e-3: [2.0]}})
    (folder / "cells.csv").write_text("arm,lr,seed,fate,error\nrms,0.001,0,crashed,killed\n")
    assert read_results(folder).runs[0].fate == "ok"


def test_a_single_run_is_read_too(make_run: Any) -> None:
    results = read_results(make_run(2.0, name="tiny", seed=3))
    assert not results.is_ablation
    assert (results.name, results.arms, results.seeds, results.lrs) == (
        "tiny",
        ("tiny",),
        (3,),
        (1e-3,),
    )


def test_a_folder_that_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds neither an ablation"):
        read_results(tmp_path)


def test_a_damaged_summary_is_named(make_run: Any) -> None:
    folder = make_run()
    (folder / "summary.json").write_text('{"fate": "o')
    with pytest.raises(RunFolderError, match=r"summary\.json is damaged"):
        read_results(folder)


def test_curves_take_the_last_line_of_a_step_and_finite_values_only(
    tmp_path: Path,
) -> None:
    lines = [
        {"step": 0, "val_loss": 6.0},
        {"step": 2, "loss": 9.0, "grad_norm": 1.0, "clipped": False},
        {"step": 1, "loss": 5.0, "grad_norm": 3.0, "clipped": True},
        {"step": 2, "loss": 4.0, "grad_norm": "Infinity", "clipped": True},
        {"step": 3, "loss": "NaN", "grad_norm": 2.0, "clipped": True},
        {"step": 2, "probe": {"layer_0": {"kurtosis": 1.0}}},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    curves = read_curves(path)
    np.testing.assert_array_equal(curves.steps, [1, 2, 3])
    np.testing.assert_array_equal(curves.loss, [5, 4, np.nan])
    np.testing.assert_array_equal(curves.grad_norm, [3, np.nan, 2])
    assert curves.val_loss.tolist() == [6.0]
    assert curves.probes == ((2, {"layer_0": {"kurtosis": 1.0}}),)
    assert len(read_curves(tmp_path / "none.jsonl").steps) == 0


def test_a_row_has_every_column_and_none_for_what_is_unknown(make_ablation: Any) -> None:
    folder = make_ablation({"rms": {1e-3: [2.0, None]}})
    good, bad = (table_row(run, folder) for run in read_results(folder).runs)
    assert tuple(good) == COLUMNS
    assert COLUMNS[:10] == (
        *("arm", "lr", "seed", "fate", "val_loss", "train_loss", "steps", "tokens"),
        *("seconds", "run_dir"),
    )
    assert good["run_dir"] == "cells/rms/lr-0.001/seed-0"
    assert good["val_loss"] == 2.0
    assert 0 < good["clipped_share"] < 1
    assert good["error"] is None
    assert (bad["fate"], bad["val_loss"], bad["grad_norm_max"]) == ("diverged", None, np.inf)


def test_a_reader_of_csv_takes_the_columns_for_numbers(make_ablation: Any) -> None:
    folder = make_ablation({"rms": {1e-3: [2.0, None]}})
    runs = read_results(folder).runs
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table_row(run, folder) for run in runs)
    text.seek(0)
    table = pd.read_csv(text)
    assert table["grad_norm_max"].dtype == table["val_loss"].dtype == np.float64
    assert np.isposinf(table["grad_norm_max"][1])
    assert np.isnan(table["val_loss"][1])


def test_what_follows_a_skipped_step_still_counts(make_run: Any) -> None:
    folder = make_run(2.0)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = []
    for skipped in ({"skipped": 1}, {}):
        for line in lines:
            if line["step"] == 50 and "loss" in line:
                line.pop("skipped", None)
                line.update({"loss": "NaN", "grad_norm": "NaN"} | skipped)
            if line["step"] == 150 and "loss" in line:
                line["grad_norm"] = 77.0
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        rows.append(table_row(read_results(folder).runs[0], folder))
    skips, lost = rows
    assert skips["grad_norm_max"] == 77.0
    assert lost["grad_norm_max"] == np.inf
    assert 0 < skips["spike_score"] < 0.05  # of all 200 steps, and the skipped one is among them


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("summary.json", "[]", "it holds no object"),
        ("summary.json", '{"finished": true, "val_loss": "a"}', "val_loss is 'a', not a number"),
        ("config.yaml", "optim: 3", "optim has no fields"),
        ("cells.csv", "arm,lr,seed,fate\nrms,x,0,crashed\n", "could not convert string .*delete"),
        ("cells.csv", "fate,arm\ncrashed,rms\n", "delete it, then `minillama ablate` writes"),
        ("cells.csv", b"\xff\xfe", "delete it, then `minillama ablate` writes it again"),
        ("sessions.json", '[{"seconds": "x"}]', "delete it, then the report leaves out the times"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    make_ablation: Any, name: str, content: str | bytes, said: str
) -> None:
    folder = make_ablation({"rms": {1e-3: [2.0]}})
    inside = name in ("summary.json", "config.yaml")
    path = folder / "cells/rms/lr-0.001/seed-0" / name if inside else folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(RunFolderError, match=rf"{name} is damaged: .*{said}") as error:
        read_results(folder)
    assert "\n" not in str(error.value)


def test_the_config_of_a_single_run_may_be_damaged_too(make_run: Any) -> None:
    folder = make_run(2.0)
    for content in ("optim: 3", "train: {seed: x}", "optim: {lr: x}"):
        (folder / "config.yaml").write_text(content, encoding="utf-8")
        with pytest.raises(RunFolderError, match=r"config.yaml is damaged"):
            read_results(folder)


def test_lines_of_metrics_that_no_run_writes_are_left_out(make_run: Any, caplog: Any) -> None:
    folder = make_run(2.0)
    before = read_results(folder).runs[0].curves
    odd = ('{"step": "a", "loss": 1}', '{"step": null}', '{"step": 9, "probe": 3}', "[" * 100_000)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n".join(odd) + "\n")
    after = read_results(folder).runs[0].curves
    assert np.array_equal(after.loss, before.loss)
    assert len(after.probes) == len(before.probes)
    assert caplog.text.count("is incomplete and left out") == len(odd)
