import json
import os
import re

import pytest

from minillama.ablation.runner import run as run_ablation
from minillama.cli import main
from minillama.commands.compare import compare
from minillama.commands.runs import find_folders, list_runs, read_entry
from minillama.config.ablation import AblationConfig
from minillama.errors import ConfigError
from minillama.files import lock
from minillama.training.metrics import read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory, trained, configured):
    """A finished run, one that was killed, and an ablation two levels down."""
    root = tmp_path_factory.mktemp("root")
    trained(root / "done")
    killed = trained(root / "killed", **{"train.eval_every": 2})
    (killed / "summary.json").unlink()
    base = configured(root / "base").model_dump(mode="json", exclude={"out_dir", "name"})
    config = AblationConfig(
        name="grid",
        out_dir=str(root / "more" / "grid"),
        base=base,
        arms={"rms": {}, "none": {"model.norm.kind": "none"}},
        baseline="rms",
        lr=[1e-3],
        seeds=[0],
        runner={"workers": 1, "threads": 1},
    )
    run_ablation(config, progress=False)
    return root


def by_name(root):
    return {entry.name: entry for entry in map(read_entry, find_folders(root))}


def test_a_finished_run_is_listed_as_its_summary_says(folder):
    summary = json.loads((folder / "done" / "summary.json").read_bytes())
    entry = by_name(folder)["done"]
    assert (entry.kind, entry.fate, entry.val_loss) == ("run", summary["fate"], summary["val_loss"])
    assert (entry.done, entry.total) == (4, 4)


def test_a_killed_run_shows_its_last_step_and_validation(folder):
    entry = by_name(folder)["killed"]
    lines = read_metrics(folder / "killed" / "metrics.jsonl")
    assert entry.fate == "unfinished"
    assert entry.val_loss == [line["val_loss"] for line in lines if "val_loss" in line][-1]
    assert (entry.done, entry.total) == (4, 4)


def test_a_folder_that_is_locked_is_running(folder):
    assert by_name(folder)["done"].fate != "running"
    for name, path in (("killed", "killed"), ("grid", "more/grid")):
        with lock(folder / path / ".lock", busy="busy", timeout=0):
            assert by_name(folder)[name].fate == "running"
        assert by_name(folder)[name].fate != "running"


def test_an_ablation_is_one_line_with_its_cells(folder):
    entry = by_name(folder)["grid"]
    assert (entry.kind, entry.fate) == ("ablation", "finished")
    assert (entry.done, entry.total, entry.crashed) == (2, 2, 0)
    assert len(list(find_folders(folder))) == 3  # no line for a cell


def test_cells_outside_a_narrowed_grid_do_not_count(folder):
    table = folder / "more" / "grid" / "cells.csv"
    whole = table.read_text(encoding="utf-8")
    last = whole.splitlines()[-1]
    assert last.endswith(",True")
    try:
        table.write_text(whole + last.removesuffix("True") + "False\n", encoding="utf-8")
        entry = by_name(folder)["grid"]
    finally:
        table.write_text(whole, encoding="utf-8")
    assert (entry.done, entry.total, entry.fate) == (2, 2, "finished")


def test_crashed_and_missing_cells_are_counted(folder):
    table = folder / "more" / "grid" / "cells.csv"
    whole = table.read_text(encoding="utf-8")
    try:
        table.write_text(
            re.sub(r"^none,(.*?),(.*?),\w+,", r"none,\1,\2,crashed,", whole, flags=re.M)
        )
        entry = by_name(folder)["grid"]
        assert (entry.fate, entry.done, entry.crashed) == ("unfinished", 1, 1)
        assert "1/2 cells, 1 crashed" in list_runs(str(folder), as_json=False)
        table.unlink()
        assert (by_name(folder)["grid"].done, by_name(folder)["grid"].total) == (0, 2)
    finally:
        table.write_text(whole, encoding="utf-8")


def test_the_last_changed_comes_first_in_the_table_and_in_json(folder, capsys):
    for age, name in ((100, "killed"), (200, "done")):
        for path in (folder / name).iterdir():
            os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert main(["runs", str(folder)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["name", "grid", "killed", "done"]
    assert main(["runs", str(folder), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [entry["name"] for entry in entries] == ["grid", "killed", "done"]


def test_a_damaged_config_spoils_its_own_line_alone(tmp_path, trained):
    trained(tmp_path / "good")
    for name, content in (("a", "{"), ("b", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(content)
    fates = {name: entry.fate for name, entry in by_name(tmp_path).items()}
    assert fates["a"] == fates["b"] == "damaged"
    assert fates["good"] != "damaged"


def test_nothing_there_is_said_and_a_missing_folder_is_an_error(tmp_path):
    assert list_runs(str(tmp_path), as_json=False).startswith("no runs in")
    assert json.loads(list_runs(str(tmp_path), as_json=True)) == []
    with pytest.raises(ConfigError, match="there is no folder"):
        list_runs(str(tmp_path / "absent"), as_json=False)


@pytest.mark.parametrize("value", ["words", [], {}, True])
def test_a_summary_with_other_values_than_numbers_is_listed_without(tmp_path, make_run, value):
    folder = make_run(3.0)
    file = folder / "summary.json"
    kept = {"finished": True, "fate": "ok"}
    summary = dict.fromkeys(json.loads(file.read_text()), value) | kept
    file.write_text(json.dumps(summary))
    (entry,) = map(read_entry, find_folders(tmp_path))
    assert (entry.fate, entry.val_loss, entry.done) == ("ok", None, 200)
    table = compare([str(folder), str(folder)], as_json=False)
    assert "validation loss" not in table


def test_links_show_no_run_twice_and_lead_round_no_circle(tmp_path, make_run):
    run = make_run()
    (tmp_path / "again").symlink_to(run)
    (tmp_path / "circle").symlink_to(".")
    (tmp_path / "itself").symlink_to("itself")
    assert len(list(find_folders(tmp_path))) == 1
