import subprocess
import sys
from pathlib import Path

import pytest

from minillama.data.building import build_once
from minillama.errors import DataError


def fill(text: str):
    return lambda folder: (folder / "file").write_text(text)


def is_whole(folder: Path) -> bool:
    return (folder / "file").is_file() and (folder / "file").read_text() != "damaged"


def test_a_folder_is_built_once_and_again_when_damaged(tmp_path):
    folder = tmp_path / "deep" / "folder"
    build_once(folder, is_whole, fill("first"))
    build_once(folder, is_whole, fill("second"))
    assert (folder / "file").read_text() == "first"
    (folder / "file").write_text("damaged")
    (folder / "more").touch()
    build_once(folder, is_whole, fill("third"))
    assert (folder / "file").read_text() == "third"
    assert not (folder / "more").exists()


def test_a_failed_build_leaves_nothing_and_a_killed_one_is_cleared_away(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "file").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "folder", is_whole, fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    (tmp_path / "folder.tmp-1").mkdir()
    build_once(tmp_path / "folder", is_whole, fill("whole"))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["folder"]


def test_a_cache_that_cannot_be_written_is_named_with_the_fix(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write .*: .*; set .* MINILLAMA_CACHE"):
        build_once(tmp_path / "file" / "folder", is_whole, fill("text"))


def test_of_several_processes_one_builds_and_the_others_wait(tmp_path):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from minillama.data.building import build_once\n"
        "def build(folder):\n"
        "    print('built')\n"
        "    (folder / 'half').touch()\n"
        "    time.sleep(1)\n"
        "    (folder / 'file').touch()\n"
        "folder = Path(sys.argv[1])\n"
        "build_once(folder, Path.is_dir, build)\n"
        "assert (folder / 'file').exists()\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "folder")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    printed = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(printed) == ["", "", "built\n"]
