from pathlib import Path

import pytest

from minillama import files
from minillama.errors import RunFolderError
from minillama.files import cache_folder


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.txt"
    files.write_whole(path, "one\n")
    files.write_whole(path, "zwei ä\n")
    assert path.read_text(encoding="utf-8") == "zwei ä\n"
    assert names_in(tmp_path) == ["a.txt"]


def test_a_failed_write_leaves_the_file_before_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    files.write_whole(path, "old")
    monkeypatch.setattr(files, "sync", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        files.write_whole(path, "new")
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["a.txt"]


def test_a_folder_appears_only_when_its_body_is_done(tmp_path):
    with files.new_folder(tmp_path / "whole") as new:
        (new / "file").write_text("x")
        assert not (tmp_path / "whole").exists()
    assert names_in(tmp_path) == ["whole"]
    assert (tmp_path / "whole" / "file").read_text() == "x"


def test_a_folder_whose_body_fails_never_appears(tmp_path):
    def fill_half():
        with files.new_folder(tmp_path / "whole") as new:
            (new / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_half()
    assert names_in(tmp_path) == []


def test_a_folder_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "whole").mkdir()
    with pytest.raises(FileExistsError), files.new_folder(tmp_path / "whole"):
        pass


def folder_with(path, text):
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize("links", [True, False])
def test_a_link_or_else_a_copy_leads_to_the_newest_target(tmp_path, monkeypatch, links):
    if not links:

        def refuse(*args, **kwargs):
            raise PermissionError("no links here")

        monkeypatch.setattr(Path, "symlink_to", refuse)
    link = tmp_path / "last"
    for name in ("one", "two"):
        files.point_link(link, folder_with(tmp_path / name, name))
        assert (link / "file").read_text() == name
    assert link.is_symlink() is links
    assert names_in(tmp_path) == ["last", "one", "two"]


def test_a_dropped_folder_is_gone_and_what_a_kill_left_is_swept_up(tmp_path):
    files.drop_folder(folder_with(tmp_path / "old", "x"))
    assert names_in(tmp_path) == []
    folder_with(tmp_path / f"{files.TEMPORARY}folder", "x")
    (tmp_path / f"{files.TEMPORARY}file").write_text("x")
    (tmp_path / f"{files.TEMPORARY}link").symlink_to("nowhere")
    folder_with(tmp_path / "mine", "x")
    files.drop_unfinished(tmp_path)
    assert names_in(tmp_path) == ["mine"]


def test_a_fault_of_the_system_is_told_in_one_line(tmp_path):
    path = tmp_path / "no/such/file"
    said = "no/such/file cannot be written: No such file"
    with pytest.raises(RunFolderError, match=said), files.writing(path):
        files.write_whole(path, "x")


def test_the_cache_folder_is_the_one_set_else_the_users(monkeypatch, tmp_path):
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
