"""A disk that fills up, a folder that cannot be written or goes away: what was saved is whole."""

import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

from minillama.config.run import to_yaml
from minillama.errors import RunFolderError
from minillama.files import TEMPORARY_PREFIX
from minillama.training.checkpoint import read_checkpoint
from minillama.training.run_folder import RunFolder
from minillama.training.trainer import train

SAVING = {"train.save_every": 2, "train.eval_every": 0}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB of its own; only root can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def file_limit():
    """Return a function that bounds the size of any file that is written, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill(folder, leave):
    """Take what room there is, but for ``leave`` bytes."""
    free = shutil.disk_usage(folder).free
    with (folder / "filler").open("wb") as file, suppress(OSError):
        file.write(b"x" * max(0, free - leave))


def run(config, **flags):
    return train(config, progress=False, **flags)


def assert_only_whole(config, steps):
    """Only the checkpoints of these steps are left, each opens, and nothing looks like another."""
    checkpoints = Path(config.out_dir) / "checkpoints"
    names = {p.name for p in checkpoints.iterdir()}
    folders = {f"step-{step:06d}" for step in steps}
    assert names == folders | ({"last"} if steps else set())
    for name in names:
        read_checkpoint(checkpoints / name, for_resume=True)
    assert not list(Path(config.out_dir).rglob(f"{TEMPORARY_PREFIX}*"))


def assert_goes_on_to_the_bit(config, whole):
    run(config, resume=True)
    run(whole)
    ours, theirs = (
        read_checkpoint(Path(c.out_dir) / "checkpoints" / "last", for_resume=True)
        for c in (config, whole)
    )
    for name, weight in ours.weights.items():
        assert torch.equal(weight, theirs.weights[name])


@pytest.mark.parametrize("leave", [0, 30_000, 200_000])
@pytest.mark.parametrize(("step", "saved"), [(2, []), (6, [2, 4])])
def test_a_full_disk_at_the_first_save_or_a_later_one(
    tiny, small_disk, before_step, leave, step, saved
):
    config = tiny(**SAVING).model_copy(update={"out_dir": str(small_disk / "run")})
    before_step(step, lambda: fill(small_disk, leave))
    safe = r"step-000004 is complete" if saved else "no checkpoint was written before"
    with pytest.raises(RunFolderError, match=rf"No space left on device; .*{safe}; free"):
        run(config)
    before_step(None, None)
    assert_only_whole(config, saved)
    (small_disk / "filler").unlink()
    assert_goes_on_to_the_bit(config, tiny("whole", **SAVING))


@pytest.mark.parametrize("limit", [10_000, 60_000, 200_000])
@pytest.mark.parametrize(("step", "saved"), [(2, []), (6, [2, 4])])
def test_a_bound_on_files_at_the_first_save_or_a_later_one(
    tiny, file_limit, before_step, limit, step, saved
):
    config = tiny(**SAVING)
    before_step(step, lambda: file_limit(limit))
    with pytest.raises(RunFolderError, match=r"File too large; .*raise the limit .*ulimit -f"):
        run(config)
    file_limit(resource.RLIM_INFINITY)
    before_step(None, None)
    assert_only_whole(config, saved)
    assert_goes_on_to_the_bit(config, tiny("whole", **SAVING))


def test_a_file_system_that_is_read_only_is_refused_before_any_work(tiny, small_disk, monkeypatch):
    monkeypatch.setattr("minillama.training.trainer.prepare", lambda config: 1 / 0)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    config = tiny().model_copy(update={"out_dir": str(small_disk / "run")})
    with pytest.raises(RunFolderError, match="run cannot be written: Read-only file system"):
        run(config)


def without_privileges():
    """Return what starts a command that permissions bind, as they do not bind root."""
    if os.geteuid():
        return []
    if not shutil.which("setpriv"):
        pytest.skip("root writes anywhere")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]


def command(config, tmp_path, *flags):
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    program = [sys.executable, "-m", "minillama", "train", str(file), "--quiet", *flags]
    return subprocess.Popen([*without_privileges(), *program], stderr=subprocess.PIPE, text=True)


def test_a_folder_without_permission_is_one_line_and_exit_status_1(tiny, tmp_path):
    config = tiny()
    Path(config.out_dir).mkdir()
    Path(config.out_dir).chmod(0o555)
    process = command(config, tmp_path)
    _, said = process.communicate(timeout=300)
    Path(config.out_dir).chmod(0o755)
    assert process.returncode == 1
    assert "run cannot be written: Permission denied" in said
    assert said.count("\n") == 1


def test_a_folder_that_loses_its_permission_midway_keeps_what_was_saved(tiny, tmp_path):
    config = tiny(**SAVING | {"train.steps": 1_000_000, "train.save_every": 20})
    process = command(config, tmp_path)
    checkpoints = Path(config.out_dir) / "checkpoints"
    deadline = time.monotonic() + 300
    while not (checkpoints / "last").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.01)
    checkpoints.chmod(0o555)
    _, said = process.communicate(timeout=300)
    checkpoints.chmod(0o755)
    assert process.returncode == 1
    assert "Permission denied" in said
    assert "make the folder writable" in said
    assert f"{RunFolder(Path(config.out_dir)).newest()} is complete" in said
    assert said.count("\n") == 1
    read_checkpoint(checkpoints / "last", for_resume=True)


@pytest.mark.parametrize(
    ("what", "message"),
    [("", "was removed, .*; restore it"), ("checkpoints", "No such file .*; no checkpoint .*")],
)
def test_a_folder_removed_midway_is_an_error_and_not_recreated(tiny, before_step, what, message):
    config = tiny(**SAVING)
    gone = Path(config.out_dir) / what
    before_step(4, lambda: shutil.rmtree(gone))
    with pytest.raises(RunFolderError, match=message):
        run(config)
    assert not gone.exists()


def test_a_run_does_not_write_into_the_run_that_took_its_folder(tiny, before_step):
    config = tiny(**SAVING)
    folder = Path(config.out_dir)
    with ExitStack() as stack:

        def replace():
            shutil.rmtree(folder)
            stack.enter_context(RunFolder.claim(folder, resume=False, overwrite=False))

        before_step(4, replace)
        with pytest.raises(RunFolderError, match="was removed, moved or replaced while this run"):
            run(config)
        assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_folder_that_becomes_a_file_midway_is_an_error(tiny, before_step):
    config = tiny(**SAVING)
    checkpoints = Path(config.out_dir) / "checkpoints"

    def replace():
        shutil.rmtree(checkpoints)
        checkpoints.write_text("mine")

    before_step(4, replace)
    with pytest.raises(RunFolderError, match="Not a directory"):
        run(config)
    assert checkpoints.read_text() == "mine"
