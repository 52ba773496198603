import json
import logging
import os
import pickle
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import minillama.data.files
import minillama.data.tables
from minillama.config.run import FilesSource, HubSource, PydocsSource, Source
from minillama.data.files import data_files
from minillama.data.sources import DocumentStream, open_source, read_documents, source_hash
from minillama.errors import DataError
from minillama.files import sha256_of_file

MIB = 1 << 20

PYDOCS = PydocsSource(kind="pydocs")


def files(*paths: Path, **options) -> FilesSource:
    return FilesSource(kind="files", files=[str(path) for path in paths], **options)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def standard_library(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "cache"))


# --------------------------------------------------------------------------------------- pydocs


def test_pydocs_is_two_megabytes_of_prose_and_imports_nothing():
    texts = list(read_documents(PYDOCS))
    assert 1.5e6 < sum(len(text.encode()) for text in texts) < 4e6
    assert len(texts) > 300
    assert all(texts)
    assert any(text.startswith("Heap queue algorithm") for text in texts)  # a docstring
    assert any("for_stmt" in text for text in texts)  # a page of the manual
    assert "antigravity" not in sys.modules
    assert "this" not in sys.modules


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
    assert list(read_documents(PYDOCS)) == [
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


def test_a_python_without_source_files_is_an_error_with_the_fix(tmp_path, monkeypatch):
    standard_library(tmp_path, monkeypatch)
    with pytest.raises(DataError, match=r"keeps no source .* use data\.source\.kind=files"):
        list(read_documents(PYDOCS))


# ----------------------------------------------------------------------------------- text files


def test_each_text_file_is_a_document_cleaned_of_bom_and_crlf(tmp_path):
    one = write(tmp_path / "one.txt", b"\xef\xbb\xbfWindows\r\nlines\r\n")
    two = write(tmp_path / "two.txt", "Ünïcödé, 你好 🙂\ttab\n\n  indent\r")
    assert list(read_documents(files(one, two))) == [
        "Windows\nlines\n",
        "Ünïcödé, 你好 🙂\ttab\n\n  indent\r",
    ]


def test_a_very_long_line_is_one_document(tmp_path):
    text = "no line end, " * 200_000
    assert list(read_documents(files(write(tmp_path / "long.txt", text)))) == [text]


def test_empty_files_are_skipped_with_a_line_in_the_log(tmp_path, caplog):
    paths = [write(tmp_path / f"{i}.txt", c) for i, c in enumerate(["a", "", "\ufeff", " \r\n"])]
    with caplog.at_level(logging.WARNING, "minillama"):
        assert list(read_documents(files(*paths))) == ["a"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} holds no text and is skipped" for path in paths[1:]
    ]
    with pytest.raises(DataError, match=r"no text in .*1\.txt, .*2\.txt"):
        list(read_documents(files(*paths[1:])))


def test_patterns_match_sorted_and_a_file_counts_once(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "c.md"):
        write(tmp_path / name, name)
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "d.txt", "d")
    write(tmp_path / "e[1].txt", "literal")
    assert list(read_documents(files(tmp_path / "[ab].txt"))) == ["a.txt", "b.txt"]
    both = files(tmp_path / "b.txt", tmp_path / "**" / "*.txt")
    assert list(read_documents(both)) == ["b.txt", "a.txt", "literal", "d"]
    assert list(read_documents(files(tmp_path / "e[1].txt"))) == ["literal"]
    monkeypatch.chdir(tmp_path)
    assert list(read_documents(files(Path("sub/*.txt")))) == ["d"]


def test_the_hash_follows_the_content_not_the_name(tmp_path):
    one = write(tmp_path / "one.txt", "text")
    before = source_hash(files(one))
    assert source_hash(files(one.rename(tmp_path / "two.txt"))) == before
    assert source_hash(files(write(one, "Text"))) != before
    assert source_hash(files(tmp_path / "two.txt", format="json")) != before
    split = [write(tmp_path / name, text) for name, text in (("3", "te"), ("4", "xt"))]
    assert source_hash(files(*split)) not in (before, source_hash(files(*reversed(split))))


# ---------------------------------------------------------------------------------------- streams


def texts_of(stream: DocumentStream) -> list[list[str]]:
    return [[piece.text for piece, _ in stream.read(part)] for part in range(stream.n_parts)]


def rows(first: int, n: int) -> list[dict]:
    blanks = {7: None, 8: " \n"}
    return [{"n": i, "text": blanks.get(i, f"row {i}: é, 🙂")} for i in range(first, first + n)]


def write_tables(folder: Path, format: str) -> FilesSource:
    for number, first in enumerate((0, 30, 60)):
        path = folder / f"{number}.{format}"
        table = rows(first, 30)
        if format == "parquet":
            pq.write_table(pa.Table.from_pylist(table), path, row_group_size=10)
        elif format == "json":
            path.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
        else:
            lines = "".join(f'{row["n"]},"{row["text"] or ""}"\n' for row in table)
            path.write_text("n,text\n" + lines, encoding="utf-8")
    (folder / f"empty.{format}").touch()  # is skipped
    return FilesSource(kind="files", format=format, files=[str(folder / f"*.{format}")])


def write_set(folder: Path, **options) -> HubSource:
    folder.mkdir()
    write_tables(folder, "json")
    (folder / "empty.json").unlink()
    return HubSource(kind="hub", path=str(folder), **options)


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (minillama.data.files, minillama.data.tables):
        monkeypatch.setattr(module, "PART_BYTES", 300)


BOOK = [f"line {i}\n" for i in range(500_000)]


def write_texts(folder: Path) -> FilesSource:
    write(folder / "book.txt", "".join(BOOK))
    write(folder / "short.txt", "short")
    write(folder / "blank.txt", "")
    return files(*(folder / name for name in ("short.txt", "book.txt", "blank.txt")))


def sources(tmp_path: Path) -> dict[str, tuple[Source, int]]:
    """Sources, and in how many parts each comes where parts are small."""
    return {
        "pydocs": (PYDOCS, 1),
        "text": (write_texts(tmp_path), 256),
        "json": (write_tables(tmp_path, "json"), 3),
        "csv": (write_tables(tmp_path, "csv"), 3),
        "parquet": (write_tables(tmp_path, "parquet"), 9),
        "hub": (write_set(tmp_path / "set"), 1),
        "hub stream": (write_set(tmp_path / "other", streaming=True), 3),
        "hub some": (write_set(tmp_path / "some", max_documents=41), 1),
        "hub stream some": (write_set(tmp_path / "first", streaming=True, max_documents=41), 1),
    }


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize(
    "name",
    [
        *("pydocs", "text", "json", "csv", "parquet"),
        *("hub", "hub stream", "hub some", "hub stream some"),
    ],
)
def test_a_stream_yields_the_documents_in_order_and_resumes_anywhere(tmp_path, name):
    source, n_parts = sources(tmp_path)[name]
    stream = open_source(source)
    assert stream.n_parts == n_parts
    parts = texts_of(stream)
    if name == "text":
        assert "".join(text for part in parts for text in part) == "short" + "".join(BOOK)
    elif name != "pydocs":
        texts = [row["text"] or "" for first in (0, 30, 60) for row in rows(first, 30)]
        n_texts = 41 if name.endswith("some") else 90
        assert [text.strip() for part in parts for text in part] == [
            text.strip() for text in texts[:n_texts]
        ]

    again = pickle.loads(pickle.dumps(stream))
    for part in {0, n_parts - 1}:
        places = []
        for _, place in stream.read(part):
            places.append(json.loads(json.dumps(place())))
            if len(places) == 200:
                break
        for done, place in list(enumerate(places, 1))[:: max(1, len(places) // 4)]:
            rest = [piece.text for piece, _ in again.read(part, place)]
            assert rest == parts[part][done:]


@pytest.mark.parametrize("name", ["text", "json", "parquet"])
def test_a_small_source_is_one_part(tmp_path, name):
    assert open_source(sources(tmp_path)[name][0]).n_parts == 1


def test_pieces_of_a_file_are_framed_once(tmp_path):
    source, _ = sources(tmp_path)["text"]
    stream = open_source(source)
    pieces = [piece for part in range(stream.n_parts) for piece, _ in stream.read(part)]
    inked = [(piece.begins, piece.ends) for piece in pieces if piece.text]
    book = [(True, False), *[(False, False)] * (len(inked) - 3), (False, True)]
    assert inked == [(True, True), *book]
    assert all(len(piece.text) < 2 * MIB for piece in pieces)


@pytest.mark.parametrize("always_hashed", [1 << 20, 0])
@pytest.mark.parametrize("name", ["text", "json", "hub stream"])
def test_the_hash_follows_the_content_alone(tmp_path, monkeypatch, name, always_hashed):
    monkeypatch.setattr("minillama.data.sources._ALWAYS_HASHED", always_hashed)
    source, _ = sources(tmp_path)[name]
    before = source_hash(source)
    assert source_hash(source) == before
    folder = Path(source.path) if name == "hub stream" else tmp_path
    path = folder / ("short.txt" if name == "text" else "1.json")
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    assert source_hash(source) == before
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b" ")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert source_hash(source) != before
    path.write_bytes(content)
    assert source_hash(source) == before

    moved = tmp_path / "moved"
    moved.mkdir()
    if name == "hub stream":
        moved = folder.rename(moved / "set")
        assert source_hash(source.model_copy(update={"path": str(moved)})) == before
    else:
        names = [Path(file).rename(moved / Path(file).name) for file in data_files(source)]
        assert source_hash(files(*names, format=source.format)) == before


def test_a_large_file_is_hashed_once(tmp_path, monkeypatch):
    monkeypatch.setattr("minillama.data.sources._ALWAYS_HASHED", 10)
    source = files(write(tmp_path / "large.txt", "large text"), write(tmp_path / "s.txt", "small"))
    before = source_hash(source)
    read = []
    monkeypatch.setattr(
        "minillama.data.sources.sha256_of_file",
        lambda path: read.append(path.name) or sha256_of_file(path),
    )
    assert source_hash(source) == before
    assert read == ["s.txt"]
    write(next((tmp_path / "cache" / "hashes").iterdir()), "damaged")
    assert source_hash(source) == before
    assert read == ["s.txt", "large.txt", "s.txt"]


def test_what_cannot_be_used_is_named_with_its_file(tmp_path):
    source = write_tables(tmp_path, "json")
    with pytest.raises(DataError, match=r"0\.json, row 1: there is no column 'body' .*: n, text$"):
        texts_of(open_source(source.model_copy(update={"text_field": "body"})))
    with pytest.raises(DataError, match=r"0\.json, row 1: column 'n' .* holds int, not strings"):
        texts_of(open_source(source.model_copy(update={"text_field": "n"})))
    (tmp_path / "1.json").write_text('{"text": "a"\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"cannot read .*1\.json: ") as error:
        texts_of(open_source(source))
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=r"no text in .*empty"):
        open_source(source.model_copy(update={"files": [str(tmp_path / "empty.json")]}))
    (tmp_path / "poems").mkdir()
    (tmp_path / "poems" / "poems.py").write_text("raise SystemExit", encoding="utf-8")
    with pytest.raises(DataError, match="exists only as a script"):
        open_source(HubSource(kind="hub", path=str(tmp_path / "poems"), streaming=True))
