import json
import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minillama.config.run import FilesSource, HubSource, PydocsSource, Source
from minillama.data.sources import open_documents
from minillama.data.streams import Stream, open_stream, source_stamp
from minillama.errors import DataError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "cache"))


def texts_of(stream: Stream) -> list[list[str]]:
    return [[piece.text for piece, _ in stream.read(part)] for part in range(stream.n_parts)]


def rows(first: int, n: int) -> list[dict]:
    blanks = {7: None, 8: " \n"}
    return [{"n": i, "text": blanks.get(i, f"row {i}: é, 🙂")} for i in range(first, first + n)]


def write_tables(folder: Path, format: str) -> FilesSource:
    for number, first in enumerate((0, 30, 60)):
        path = folder / f"{number}.{format}"
        some = rows(first, 30)
        if format == "parquet":
            pq.write_table(pa.Table.from_pylist(some), path, row_group_size=10)
        elif format == "json":
            path.write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
        else:
            lines = "".join(f'{row["n"]},"{row["text"] or ""}"\n' for row in some)
            path.write_text("n,text\n" + lines, encoding="utf-8")
    (folder / f"empty.{format}").touch()  # is skipped
    return FilesSource(kind="files", format=format, files=[str(folder / f"*.{format}")])


def write_set(folder: Path, **options) -> HubSource:
    folder.mkdir()
    write_tables(folder, "json")
    (folder / "empty.json").unlink()
    return HubSource(kind="hub", path=str(folder), **options)


def sources(tmp_path: Path) -> dict[str, tuple[Source, int]]:
    """Sources, and in how many parts each comes."""
    book = tmp_path / "book.txt"
    book.write_text("".join(f"line {i}\n" for i in range(500_000)), encoding="utf-8")
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    (tmp_path / "blank.txt").write_text("", encoding="utf-8")
    texts = [str(tmp_path / name) for name in ("short.txt", "book.txt", "blank.txt")]
    return {
        "pydocs": (PydocsSource(kind="pydocs"), 1),
        "text": (FilesSource(kind="files", files=texts), 4),
        "json": (write_tables(tmp_path, "json"), 3),
        "csv": (write_tables(tmp_path, "csv"), 3),
        "parquet": (write_tables(tmp_path, "parquet"), 9),
        "hub": (write_set(tmp_path / "set"), 1),
        "hub stream": (write_set(tmp_path / "other", streaming=True), 3),
        "hub some": (write_set(tmp_path / "some", max_documents=41), 1),
        "hub stream some": (write_set(tmp_path / "first", streaming=True, max_documents=41), 1),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("pydocs", "text", "json", "csv", "parquet"),
        *("hub", "hub stream", "hub some", "hub stream some"),
    ],
)
def test_a_stream_is_what_the_documents_are_in_order_and_goes_on_anywhere(tmp_path, name):
    source, n_parts = sources(tmp_path)[name]
    stream = open_stream(source, 2 * MIB)
    assert stream.n_parts == n_parts
    parts = texts_of(stream)
    if name == "text":
        assert "".join(text for part in parts for text in part) == "".join(open_documents(source))
    elif name != "pydocs":  # which takes seconds to open
        assert [text for part in parts for text in part] == list(open_documents(source))

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


def test_pieces_of_a_file_are_framed_once(tmp_path):
    source, _ = sources(tmp_path)["text"]
    stream = open_stream(source, MIB)
    pieces = [piece for part in range(stream.n_parts) for piece, _ in stream.read(part)]
    inked = [(piece.begins, piece.ends) for piece in pieces if piece.text]
    book = [(True, False), *[(False, False)] * (len(inked) - 3), (False, True)]
    assert inked == [(True, True), *book]
    assert all(len(piece.text) < 2 * MIB for piece in pieces)


@pytest.mark.parametrize("name", ["text", "json", "hub stream"])
def test_a_stamp_follows_the_files(tmp_path, name):
    source, _ = sources(tmp_path)[name]
    before = source_stamp(source)
    assert source_stamp(source) == before
    path = Path(source.path) / "1.json" if name == "hub stream" else Path(tmp_path / "short.txt")
    path = tmp_path / "1.json" if name == "json" else path
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    touched = source_stamp(source)
    path.write_bytes(path.read_bytes() + b" ")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert len({before, touched, source_stamp(source)}) == 3


def test_what_cannot_be_used_is_named_with_its_file(tmp_path):
    source = write_tables(tmp_path, "json")
    with pytest.raises(DataError, match=r"0\.json has no column 'body' .* has: n, text$"):
        texts_of(open_stream(source.model_copy(update={"text_field": "body"}), MIB))
    with pytest.raises(DataError, match=r"0\.json: column 'n' .* holds int, not strings"):
        texts_of(open_stream(source.model_copy(update={"text_field": "n"}), MIB))
    (tmp_path / "1.json").write_text('{"text": "a"\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"cannot read .*1\.json: ") as error:
        texts_of(open_stream(source, MIB))
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=r"no text in .*empty"):
        open_stream(source.model_copy(update={"files": [str(tmp_path / "empty.json")]}), MIB)
    (tmp_path / "poems").mkdir()
    (tmp_path / "poems" / "poems.py").write_text("raise SystemExit", encoding="utf-8")
    with pytest.raises(DataError, match="exists only as a script"):
        open_stream(HubSource(kind="hub", path=str(tmp_path / "poems"), streaming=True), MIB)
