import json
import shutil
import threading
from pathlib import Path

import pytest

from minillama.config import load_config
from minillama.errors import ConfigError, DivergedError, RunFolderError
from minillama.training.run_folder import RunFolder, check_config
from minillama.training.summary import hash_config
from minillama.training.trainer import train


def claim(path, resume=False, overwrite=False):
    return RunFolder.claim(path, resume=resume, overwrite=overwrite)


def fill(path):
    path.mkdir()
    (path / "file").write_text("x")


def save_all(folder, steps, best_step, keep_last=2):
    folder.checkpoints.mkdir(exist_ok=True)
    for step in steps:
        folder.save(step, best_step if step >= best_step else None, keep_last, fill)


def listing(folder):
    return {
        p.name: p.readlink().name if p.is_symlink() else "" for p in folder.checkpoints.iterdir()
    }


# ------------------------------------------------------------------------------------------ claim


def test_a_new_folder_is_made_with_its_parents_and_a_foreign_one_is_fine(tmp_path):
    with claim(tmp_path / "a" / "b") as folder:
        assert folder.path.is_dir()
    (tmp_path / "a" / "b" / "notes.txt").write_text("mine")
    with claim(tmp_path / "a" / "b"):
        pass


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json"])
def test_a_folder_that_holds_a_run_is_refused_with_both_flags_named(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=r"--resume continues it, --overwrite replaces it"):
        claim(tmp_path).__enter__()
    with claim(tmp_path, resume=True):
        pass
    with claim(tmp_path, overwrite=True) as folder:
        assert (folder.path / name).exists()  # until there is something to replace it with


def test_the_refusal_names_a_finished_run(tmp_path):
    (tmp_path / "summary.json").write_text('{"finished": true}')
    with pytest.raises(ConfigError, match="already contains a finished run"):
        claim(tmp_path).__enter__()


def test_both_flags_at_once_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="exclude each other"):
        claim(tmp_path, resume=True, overwrite=True).__enter__()


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_file_in_the_way_is_a_config_error(tmp_path, path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        claim(tmp_path / path).__enter__()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that cannot be written")
def test_a_folder_that_cannot_be_written_is_refused_before_any_work():
    for path in (Path("/proc"), Path("/proc/run")):
        with pytest.raises(RunFolderError, match=f"{path} cannot be written"):
            claim(path).__enter__()


def test_two_runs_cannot_be_in_one_folder(tmp_path):
    with claim(tmp_path):
        with pytest.raises(RunFolderError, match="another run is writing"):
            claim(tmp_path).__enter__()
        errors = []

        def intrude():
            try:
                claim(tmp_path).__enter__()
            except RunFolderError as error:
                errors.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        assert len(errors) == 1
    with claim(tmp_path):
        pass


def test_what_a_kill_left_half_written_is_swept_up(tmp_path):
    for place in (tmp_path, tmp_path / "checkpoints"):
        place.mkdir(exist_ok=True)
        fill(place / ".unfinished-0123")
    with claim(tmp_path):
        assert not any((tmp_path / "checkpoints").iterdir())
        assert {p.name for p in tmp_path.iterdir()} == {".lock", "checkpoints"}


def test_clearing_removes_what_is_ours_and_nothing_else(tmp_path, tiny):
    ours = ["metrics.jsonl", "summary.json", "report.html", "report.png"]
    ours += ["tensorboard/events.out.tfevents.1"]
    foreign = ["notes.txt", "report.txt", "checkpoints/mine.txt"]
    with claim(tmp_path / "run") as folder:
        folder.begin(tiny())
        save_all(folder, [1, 2], best_step=1)
        (folder.path / "tensorboard").mkdir()
        for name in ours + foreign:
            (folder.path / name).write_text("x")
        folder.clear()
        left = [p for p in folder.path.rglob("*") if p.is_file() and p.name != ".lock"]
        assert sorted(str(p.relative_to(folder.path)) for p in left) == sorted(foreign)
        assert not (folder.path / "tensorboard").exists()


def test_the_config_is_written_so_that_it_loads_again(tmp_path, tiny):
    with claim(tmp_path / "run") as folder:
        folder.summary.write_text('{"finished": true}')
        folder.begin(tiny())
        assert folder.read_summary() is None
    assert load_config(tmp_path / "run") == tiny()


# ------------------------------------------------------------------------------------ checkpoints


def test_the_newest_and_the_best_stay_and_both_links_lead_there(tmp_path):
    with claim(tmp_path) as folder:
        save_all(folder, [1, 2, 3, 4, 5], best_step=2)
        assert listing(folder) == {
            "step-000002": "",
            "step-000004": "",
            "step-000005": "",
            "best": "step-000002",
            "last": "step-000005",
        }
        assert folder.newest().name == "step-000005"


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path):
    with claim(tmp_path) as folder:
        save_all(folder, [1], best_step=9)
        folder.save(1, 1, 2, lambda path: 1 / 0)
        assert listing(folder) == {"step-000001": "", "last": "step-000001", "best": "step-000001"}


def test_a_kill_between_a_checkpoint_and_its_links_is_made_good(tmp_path):
    with claim(tmp_path) as folder:
        save_all(folder, [1], best_step=1)
        fill(folder.checkpoints / "step-000002")  # renamed, but not linked yet
        assert folder.newest().name == "step-000002"
        folder.link(2, 2)
        assert listing(folder)["last"] == listing(folder)["best"] == "step-000002"


def test_a_best_link_that_would_lead_nowhere_goes(tmp_path):
    with claim(tmp_path) as folder:
        save_all(folder, [1, 2], best_step=1)
        folder.link(2, None)
        assert "best" not in listing(folder)


def test_without_links_copies_do(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with claim(tmp_path) as folder:
        save_all(folder, [1, 2, 3, 4], best_step=2)
        names = ["best", "last", "step-000002", "step-000003", "step-000004"]
        assert sorted(listing(folder)) == names
        assert (folder.checkpoints / "best" / "file").read_text() == "x"


def test_a_fault_in_writing_names_the_checkpoint_that_is_whole(tmp_path):
    def full(path):
        raise OSError(28, "No space left on device")

    with claim(tmp_path) as folder:
        folder.checkpoints.mkdir()
        with (
            pytest.raises(RunFolderError, match="No space left on device; no checkpoint"),
            folder.writing(),
        ):
            folder.save(1, None, 2, full)
        save_all(folder, [1], best_step=9)
        with pytest.raises(RunFolderError, match=r"step-000001 is complete"), folder.writing():
            folder.save(2, None, 2, full)


# -------------------------------------------------------------------------------- summary, resume


def write_summary(folder, config, **fields):
    summary = {"finished": True, "steps": 8, "val_loss": 1.0, "config_hash": hash_config(config)}
    folder.write_summary(summary | fields)


def test_a_finished_run_has_nothing_left_to_do(tmp_path, tiny):
    config = tiny()
    with claim(tmp_path / "run") as folder:
        assert folder.finished(config, has_checkpoint=True) is None
        write_summary(folder, config)
        assert folder.finished(config, has_checkpoint=True)["val_loss"] == 1.0
        assert folder.finished(config, has_checkpoint=False)["val_loss"] == 1.0
        longer = tiny(**{"train.steps": 9})
        assert folder.finished(longer, has_checkpoint=True) is None
        with pytest.raises(ConfigError, match="of another config and no checkpoint"):
            folder.finished(longer, has_checkpoint=False)
        write_summary(folder, config, finished=False)
        assert folder.finished(config, has_checkpoint=True) is None
        write_summary(folder, config, val_loss=None)
        with pytest.raises(DivergedError, match="diverged after step 8"):
            folder.finished(config, has_checkpoint=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_torn_summary_counts_for_none(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    assert RunFolder(tmp_path).read_summary() is None


def test_a_summary_is_json(tmp_path):
    RunFolder(tmp_path).write_summary({"finished": False, "fate": None})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"finished": False, "fate": None}
    with pytest.raises(ValueError, match="not JSON compliant"):
        RunFolder(tmp_path).write_summary({"val_loss": float("nan")})


def test_a_resumed_run_may_change_what_decides_no_number(tiny):
    other = tiny(
        out="elsewhere",
        name="other",
        loggers=["tensorboard"],
        **{
            "train.steps": 99,
            "train.eval_every": 7,
            "train.save_every": 7,
            "train.keep_last": 7,
            "train.log_every": 7,
            "train.probe_every": 7,
            "train.sample_prompt": "x",
            "train.device": "auto",
            "train.compile": True,
        },
    )
    check_config(tiny(), other, 8, Path("run"))


def test_all_that_a_resumed_run_may_not_change_is_listed_with_both_values(tiny):
    changes = {
        "optim.lr": 0.5,
        "train.seed": 3,
        "model.norm.kind": "layernorm",
        "data.source": {"kind": "pydocs"},
    }
    with pytest.raises(ConfigError) as caught:
        check_config(tiny(), tiny(**changes), 8, Path("run"))
    assert "optim.lr = 0.5: the run began with 0.003" in str(caught.value)
    paths = {error.path for error in caught.value.field_errors}
    assert {"optim.lr", "train.seed", "model.norm.kind"} <= paths
    assert "model.norm.options.bias" in paths


def test_a_run_cannot_be_made_shorter_than_it_is(tiny):
    with pytest.raises(ConfigError, match="already made 8 steps"):
        check_config(tiny(), tiny(**{"train.steps": 7}), 8, Path("run"))


def test_a_copied_run_is_resumed_in_the_copy(tiny, tmp_path, monkeypatch):
    train(tiny(**{"train.steps": 4}), progress=False)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    monkeypatch.chdir(tmp_path)
    summary = train(load_config("copy", ["train.steps=6"]), resume=True, progress=False)
    assert summary["steps"] == 6
    assert (tmp_path / "copy" / "checkpoints" / "last").resolve().name == "step-000006"
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "run" / "checkpoints" / "last").resolve().name == "step-000004"


def test_a_run_folder_as_config_keeps_its_out_dir_unless_renamed(tiny, tmp_path):
    train(tiny(**{"train.steps": 2}), progress=False)
    run = tmp_path / "run"
    assert load_config(run).out_dir == str(run)
    assert load_config(run, ["out_dir=elsewhere"]).out_dir == "elsewhere"
    run.rename(tmp_path / "moved")
    assert load_config(tmp_path / "moved").out_dir == str(tmp_path / "moved")
