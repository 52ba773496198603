import hashlib
import threading
import time
from pathlib import Path

import pytest

from minillama import files
from minillama.errors import ConfigError, RunFolderError
from minillama.files import cache_folder, lock


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_and_no_temporary_file_is_left(tmp_path):
    path = tmp_path / "a.txt"
    files.write_atomic(path, "one\n")
    files.write_atomic(path, "zwei ä\n")
    assert path.read_text(encoding="utf-8") == "zwei ä\n"
    assert names_in(tmp_path) == ["a.txt"]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    files.write_atomic(path, "old")
    monkeypatch.setattr(files, "fsync", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["a.txt"]


def test_a_new_folder_appears_only_when_its_body_is_done(tmp_path):
    with files.new_folder(tmp_path / "whole") as new:
        (new / "file").write_text("x")
        assert not (tmp_path / "whole").exists()
    assert names_in(tmp_path) == ["whole"]
    assert (tmp_path / "whole" / "file").read_text() == "x"


def test_a_new_folder_whose_body_fails_never_appears(tmp_path):
    def fill_half():
        with files.new_folder(tmp_path / "whole") as new:
            (new / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_half()
    assert names_in(tmp_path) == []


def test_an_existing_folder_is_not_replaced_unless_asked(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "old").write_text("x")
    with pytest.raises(FileExistsError), files.new_folder(tmp_path / "whole"):
        pass
    with files.new_folder(tmp_path / "whole", replace=True) as new:
        (new / "new").write_text("x")
    assert names_in(tmp_path / "whole") == ["new"]
    assert names_in(tmp_path) == ["whole"]


def folder_with(path, text):
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize("links", [True, False])
def test_a_link_or_a_copy_leads_to_the_newest_target(tmp_path, monkeypatch, links):
    if not links:

        def refuse(*args, **kwargs):
            raise PermissionError("no links here")

        monkeypatch.setattr(Path, "symlink_to", refuse)
    link = tmp_path / "last"
    for name in ("one", "two"):
        files.replace_link(link, folder_with(tmp_path / name, name))
        assert (link / "file").read_text() == name
    assert link.is_symlink() is links
    assert names_in(tmp_path) == ["last", "one", "two"]


def test_removed_and_unfinished_folders_are_gone(tmp_path):
    files.remove_folder(folder_with(tmp_path / "old", "x"))
    assert names_in(tmp_path) == []
    folder_with(tmp_path / f"{files.TEMPORARY_PREFIX}folder", "x")
    (tmp_path / f"{files.TEMPORARY_PREFIX}file").write_text("x")
    (tmp_path / f"{files.TEMPORARY_PREFIX}link").symlink_to("nowhere")
    folder_with(tmp_path / "mine", "x")
    files.remove_unfinished(tmp_path)
    assert names_in(tmp_path) == ["mine"]


def test_unfinished_folders_of_one_name_alone_can_be_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: None)  # as if killed
    monkeypatch.setattr(files, "fsync", lambda path: 1 / 0)
    for name in ("a", "b"):
        with pytest.raises(ZeroDivisionError):
            files.write_atomic(tmp_path / name, "x")
    monkeypatch.undo()
    assert len(names_in(tmp_path)) == 2
    files.remove_unfinished(tmp_path, "a")
    (rest,) = names_in(tmp_path)
    assert rest.startswith(f"{files.TEMPORARY_PREFIX}b-")


def test_a_long_name_is_written_too(tmp_path):
    files.write_atomic(tmp_path / ("x" * 250), "x")
    assert names_in(tmp_path) == ["x" * 250]


def test_a_lock_that_is_held_is_an_error_or_is_waited_for(tmp_path, caplog):
    path = tmp_path / "lock"
    with lock(path, busy="in use"):
        with pytest.raises(RunFolderError, match=r"^in use$"), lock(path, busy="in use", timeout=0):
            pass
        entered = threading.Event()

        def wait():
            with lock(path, busy="waiting for it"):
                entered.set()

        thread = threading.Thread(target=wait)
        with caplog.at_level("INFO", "minillama"):
            thread.start()
            while not caplog.messages:
                time.sleep(0.01)
        assert caplog.messages == ["waiting for it"]
        assert not entered.is_set()
    thread.join(60)
    assert entered.is_set()


def test_sha256_of_files_is_that_of_their_content_in_order(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"x" * (1 << 21))
    two.write_bytes(b"y")
    expected = hashlib.sha256(b"x" * (1 << 21) + b"y").hexdigest()
    assert files.sha256_of_file(one, two) == expected


def test_a_write_error_is_one_line(tmp_path):
    path = tmp_path / "no/such/file"
    said = "no/such/file cannot be written: No such file"
    with pytest.raises(RunFolderError, match=said), files.explain_write_errors(path):
        files.write_atomic(path, "x")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MINILLAMA_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("MINILLAMA_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "minillama"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "minillama"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "minillama"


def test_without_a_home_folder_the_error_names_the_variable(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for name in ("MINILLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="set the environment variable MINILLAMA_CACHE"):
        cache_folder()
