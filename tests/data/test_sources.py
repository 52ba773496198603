import logging
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from minillama.config.run import FilesSource, PydocsSource
from minillama.data.sources import Documents, open_documents, source_hash
from minillama.errors import DataError

PYDOCS = PydocsSource(kind="pydocs")


def files(*paths: Path, **options) -> FilesSource:
    return FilesSource(kind="files", files=[str(path) for path in paths], **options)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def standard_library(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_documents_are_a_sequence_read_on_demand():
    read = []
    documents = Documents("hash", np.array([1, 1, 1]), lambda i: read.append(i) or "abc"[i])
    assert (len(documents), documents[1], documents[-1], read) == (3, "b", "c", [1, 2])
    assert list(documents) == ["a", "b", "c"]
    with pytest.raises(IndexError):
        documents[3]


# --------------------------------------------------------------------------------------- pydocs


def test_pydocs_is_two_megabytes_of_prose_and_imports_nothing():
    documents = open_documents(PYDOCS)
    texts = list(documents)
    assert 1.5e6 < documents.sizes.sum() < 4e6
    assert [len(text.encode()) for text in texts] == documents.sizes.tolist()
    assert len(texts) > 300
    assert all(texts)
    assert any(text.startswith("Heap queue algorithm") for text in texts)  # a docstring
    assert any("for_stmt" in text for text in texts)  # a page of the manual
    assert "antigravity" not in sys.modules
    assert "this" not in sys.modules
    assert source_hash(PYDOCS) == documents.source_hash


def test_pydocs_takes_the_docstrings_of_the_library_and_of_nothing_else(tmp_path, monkeypatch):
    lib = standard_library(tmp_path, monkeypatch)
    for folder in ("pkg", "pydoc_data", "test", "pkg/tests", "site-packages/x", "pkg/idle_test"):
        (lib / folder).mkdir(parents=True)
        write(lib / folder / "no.py", '"Not this."' if folder not in ("pkg", "pydoc_data") else "")
    write(
        lib / "a.py",
        '"First."\nclass C:\n  "A class."\n  def f(self): "Deep."\nx = "no"\n'
        'try: pass\nexcept ImportError:\n  def g(): "In except."\nelse:\n  class D: "In else."\n',
    )
    write(lib / "b.py", "def broken(:\n")
    write(lib / "c.py", b"# coding: latin-1\n'Caf\xe9.'\n")
    write(lib / "pkg" / "d.py", 'async def f():\n    """Half a pair: \\ud800.\n\n    More."""\n')
    write(lib / "_sysconfigdata_x.py", '"How this machine was built."')
    write(lib / "pydoc_data" / "topics.py", "topics = {'if': 'The if\\n', 'empty': ' '}\n")
    assert list(open_documents(PYDOCS)) == [
        "The if\n",
        "First.\n\nA class.\n\nDeep.\n\nIn except.\n\nIn else.",
        "Café.",
        "Half a pair: ?.\n\nMore.",
    ]
    before = source_hash(PYDOCS)
    write(lib / "test" / "no.py", '"Changed."')
    assert source_hash(PYDOCS) == before
    write(lib / "c.py", '"Coffee."')
    assert source_hash(PYDOCS) != before


def test_a_python_without_source_files_is_told_what_to_do(tmp_path, monkeypatch):
    standard_library(tmp_path, monkeypatch)
    with pytest.raises(DataError, match=r"keeps no source .* use data\.source\.kind=files"):
        open_documents(PYDOCS)


# ----------------------------------------------------------------------------------- text files


def test_each_text_file_is_a_document_cleaned_of_bom_and_crlf(tmp_path):
    one = write(tmp_path / "one.txt", b"\xef\xbb\xbfWindows\r\nlines\r\n")
    two = write(tmp_path / "two.txt", "Ünïcödé, 你好 🙂\ttab\n\n  indent\r")
    documents = open_documents(files(one, two))
    assert list(documents) == ["Windows\nlines\n", "Ünïcödé, 你好 🙂\ttab\n\n  indent\r"]
    assert documents.sizes.tolist() == [len(text.encode()) for text in documents]


def test_a_very_long_line_is_one_document(tmp_path):
    text = "no line end, " * 200_000
    assert list(open_documents(files(write(tmp_path / "long.txt", text)))) == [text]


def test_empty_files_are_skipped_with_a_line_in_the_log(tmp_path, caplog):
    paths = [write(tmp_path / f"{i}.txt", c) for i, c in enumerate(["a", "", "\ufeff", " \r\n"])]
    with caplog.at_level(logging.WARNING, "minillama"):
        assert list(open_documents(files(*paths))) == ["a"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} holds no text and is skipped" for path in paths[1:]
    ]
    with pytest.raises(DataError, match=r"no text in .*1\.txt, .*2\.txt"):
        open_documents(files(*paths[1:]))


def test_patterns_match_sorted_and_a_file_counts_once(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "c.md"):
        write(tmp_path / name, name)
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "d.txt", "d")
    write(tmp_path / "e[1].txt", "literal")
    assert list(open_documents(files(tmp_path / "[ab].txt"))) == ["a.txt", "b.txt"]
    both = files(tmp_path / "b.txt", tmp_path / "**" / "*.txt")
    assert list(open_documents(both)) == ["b.txt", "a.txt", "literal", "d"]
    assert list(open_documents(files(tmp_path / "e[1].txt"))) == ["literal"]
    monkeypatch.chdir(tmp_path)
    assert list(open_documents(files(Path("sub/*.txt")))) == ["d"]


def test_a_missing_file_a_folder_and_a_pattern_without_match_are_refused_by_name(tmp_path):
    write(tmp_path / "there.txt", "text")
    for wrong in (tmp_path / "gone.txt", tmp_path / "*.csv"):
        with pytest.raises(DataError, match=f"no such file: {tmp_path}") as error:
            open_documents(files(tmp_path / "there.txt", wrong))
        assert wrong.name in str(error.value)
    with pytest.raises(DataError, match="is a folder; name its files"):
        source_hash(files(tmp_path))


def test_the_hash_follows_the_content_not_the_name(tmp_path):
    one = write(tmp_path / "one.txt", "text")
    before = source_hash(files(one))
    assert open_documents(files(one)).source_hash == before
    assert source_hash(files(one.rename(tmp_path / "two.txt"))) == before
    assert source_hash(files(write(one, "Text"))) != before
    assert source_hash(files(tmp_path / "two.txt", format="json")) != before
    split = [write(tmp_path / name, text) for name, text in (("3", "te"), ("4", "xt"))]
    assert source_hash(files(*split)) not in (before, source_hash(files(*reversed(split))))
