import bz2
import functools
import gc
import gzip
import json
import logging
import lzma
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minillama.config.run import FilesSource, HubSource, parse_run
from minillama.data.prepare import prepare
from minillama.data.sources import read_documents, source_hash
from minillama.errors import DataError

COMPRESS = {
    "gz": functools.partial(gzip.compress, mtime=0),  # test names hold these bytes
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
}
TEXTS = ["first", 'a\nsecond, with\t"quotes"', "你好 🙂 ▁", "NA", "  null ", "x" * 100_000]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    yield
    with warnings.catch_warnings():  # pandas leaves a csv file that is not read to its end open
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def opened(format: str, *paths: Path, **options) -> list[str]:
    names = [str(path) for path in paths]
    source = FilesSource(kind="files", format=format, files=names, **options)
    return list(read_documents(source))


def csv_of(texts: list[str]) -> str:
    return "n,text\n" + "".join(
        '{},"{}"\n'.format(i, text.replace('"', '""')) for i, text in enumerate(texts)
    )


def parquet_of(path: Path, columns: dict) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


ROWS = [{"n": i, "text": text} for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize(
    ("format", "name", "content"),
    [
        ("json", "lines.jsonl", lines(ROWS)),
        ("json", "array.json", json.dumps(ROWS)),
        ("json", "bom.jsonl", "\ufeff" + lines(ROWS)),
        ("json", "lines.jsonl.gz", gzip.compress(lines(ROWS).encode(), mtime=0)),
        ("json", "br[a]c*kets?.jsonl", lines(ROWS)),
        ("csv", "table.csv", csv_of(TEXTS)),
        ("csv", "bom.csv", "\ufeff" + csv_of(TEXTS)),
    ],
)
def test_each_row_is_a_document(tmp_path, format, name, content, capfd):
    assert opened(format, write(tmp_path / name, content)) == TEXTS
    assert capfd.readouterr() == ("", "")  # no bars, no warnings


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_of_several_row_groups(tmp_path, kind):
    texts = [f"row {i}" for i in range(2500)]
    pq.write_table(
        pa.table({"body": pa.array(texts, kind)}), tmp_path / "t.parquet", row_group_size=99
    )
    assert opened("parquet", tmp_path / "t.parquet", text_field="body") == texts


def test_files_may_differ_in_their_other_columns_and_keep_their_order(tmp_path):
    one = write(tmp_path / "z.jsonl", lines([{"text": "a", "extra": 1}]))
    two = write(tmp_path / "b.jsonl", lines([{"title": "t", "text": "b"}]))
    assert opened("json", one, two) == ["a", "b"]


@pytest.mark.parametrize("format", ["json", "csv", "parquet"])
def test_rows_without_text_are_skipped_and_counted(tmp_path, format, caplog):
    texts = ["a", None, "", "b", " \n"]
    path = tmp_path / f"t.{format}"
    if format == "parquet":
        parquet_of(path, {"text": texts})
    elif format == "json":
        write(path, lines([{"text": text} for text in texts]))
    else:
        write(path, csv_of([text or "" for text in texts]))
    assert opened(format, path) == ["a", "b"]
    source = {"kind": "files", "format": format, "files": [str(path)]}
    data = {"source": source, "seq_len": 1, "val_fraction": 0.5}
    config = parse_run({"data": data, "tokenizer": {"kind": "byte"}}, "test")
    with caplog.at_level(logging.WARNING, "minillama"):
        prepare(config)
    assert "3 of 5 rows hold no text and are skipped" in caplog.text


@pytest.mark.parametrize("format", ["json", "csv", "parquet"])
def test_a_missing_column_lists_the_others(tmp_path, format):
    path = tmp_path / f"t.{format}"
    if format == "parquet":
        parquet_of(path, {"body": ["a"], "n": [1]})
    else:
        write(path, lines([{"body": "a", "n": 1}]) if format == "json" else "body,n\na,1\n")
    with pytest.raises(
        DataError, match=rf"t\.{format}, row 1: there is no column 'text' .*: body, n$"
    ):
        opened(format, path)


@pytest.mark.parametrize(
    ("format", "name", "content", "complaint"),
    [
        ("json", "t.json", lines([{"text": 1}]), "row 1: column 'text' .* holds int, not strings"),
        ("csv", "t.csv", "text\n1\n2\n", "row 1: column 'text' .* holds int, not strings"),
        ("json", "t.json", lines([{"text": ["a"]}]), "column 'text' .* holds .*, not strings"),
        ("json", "t.json", lines([{"text": "a"}, {"text": 1}]), "holds .*, not strings"),
        ("json", "t.json", lines([{"text": ""}] * 3), "no text in column 'text'"),
        ("json", "t.json", '{"text": "a"\n', r"cannot read .*t\.json: "),
        ("json", "t.json", "", "no text in"),
        ("json", "t.json", "\n", r"no text in .*t\.json"),
        ("csv", "t.csv", "", "no text in"),
        ("csv", "t.csv", "text,n\na,1\nb,2,3\n", r"cannot read .*t\.csv: .*line 3"),
        ("json", "t.json", '{"text": "é"}'.encode("latin-1"), r"t\.json is not UTF-8 at byte 10"),
        ("csv", "t.csv", "text\né".encode("latin-1"), r"t\.csv is not UTF-8 at byte 5"),
        ("json", "t.json.gz", gzip.compress(b'{"text": "\xe9"}', mtime=0), "not UTF-8"),
        ("parquet", "t.parquet", "text", r"cannot read .*t\.parquet: "),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    tmp_path, format, name, content, complaint, capfd
):
    with pytest.raises(DataError, match=complaint) as error:
        opened(format, write(tmp_path / name, content))
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_nested_text_is_named_with_dots(tmp_path):
    nested = [{"id": 1, "meta": {"text": "a", "deep": {"er": "b"}}}, {"id": 2, "meta": None}]
    path = write(tmp_path / "t.jsonl", lines(nested))
    assert opened("json", path, text_field="meta.text") == ["a"]
    assert opened("json", path, text_field="meta.deep.er") == ["b"]
    for wrong in ("text", "meta.body", "id.text", "meta.text.more"):
        with pytest.raises(DataError, match=r": id, meta\.text, meta\.deep\.er$"):
            opened("json", path, text_field=wrong)
    with pytest.raises(DataError, match=r"row 1: column 'meta' .* holds dict, not strings"):
        opened("json", path, text_field="meta")
    dotted = write(tmp_path / "dotted.jsonl", lines([{"meta.text": "own name"}]))
    assert opened("json", dotted, text_field="meta.text") == ["own name"]
    write(tmp_path / "late.jsonl", lines([{"meta": {"text": "a"}}, {"meta": {"text": 7}}]))
    with pytest.raises(DataError, match="late"):
        opened("json", tmp_path / "late.jsonl", text_field="meta.text")


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("format", ["json", "csv"])
def test_a_compressed_table_is_read(tmp_path, format, suffix):
    content = lines(ROWS) if format == "json" else csv_of(TEXTS)
    path = write(tmp_path / f"t.{format}.{suffix}", COMPRESS[suffix](content.encode()))
    assert opened(format, path) == TEXTS
    write(path, path.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"cannot read .*t\.{format}\.{suffix}: "):
        opened(format, path)


def test_changed_content_is_read_again_even_with_the_same_time(tmp_path):
    path = write(tmp_path / "t.jsonl", lines([{"text": "old"}]))
    assert opened("json", path) == ["old"]
    stat = path.stat()
    write(path, lines([{"text": "new"}]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert opened("json", path) == ["new"]


# ------------------------------------------------------------------------------------------ hub


def local_data_set(folder: Path, n: int = 10) -> Path:
    folder.mkdir(exist_ok=True)
    write(folder / "train.jsonl", lines([{"Text": f"doc {i}", "n": i} for i in range(n)]))
    write(folder / "test.jsonl", lines([{"Text": "held out", "n": 0}]))
    return folder


def hub(path: Path | str, **options) -> HubSource:
    return HubSource(**{"kind": "hub", "path": str(path), "text_field": "Text", **options})


def read(path: Path, **options) -> list[str]:
    return list(read_documents(hub(path, **options)))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_is_read_by_split_and_up_to_max_documents(tmp_path, streaming):
    path = local_data_set(tmp_path / "set")
    whole = [f"doc {i}" for i in range(10)]
    assert read(path, streaming=streaming) == whole
    assert read(path, streaming=streaming, max_documents=3) == whole[:3]
    assert read(path, streaming=streaming, max_documents=99) == whole
    assert read(path, streaming=streaming, split="test") == ["held out"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_column_or_split_of_a_data_set_is_named(tmp_path, streaming):
    path = local_data_set(tmp_path / "set")
    with pytest.raises(DataError, match=r"row 1: there is no column 'text' .*: Text, n$"):
        read(path, text_field="text", streaming=streaming)
    with pytest.raises(DataError, match=r"holds int.*, not strings"):
        read(path, text_field="n", streaming=streaming)
    with pytest.raises(DataError, match=r"[Uu]nknown split|Bad split"):
        read(path, split="dev", streaming=streaming)
    with pytest.raises(DataError, match="'other' not found"):
        read(path, name="other", streaming=streaming)


def test_a_changed_local_data_set_has_another_hash(tmp_path):
    path = local_data_set(tmp_path / "set")
    before = source_hash(hub(path))
    assert source_hash(hub(path, streaming=True)) == before
    assert source_hash(hub(path, max_documents=3)) != before
    local_data_set(path, 11)
    assert source_hash(hub(path)) != before
    assert len(read(path)) == 11


def test_a_data_set_that_is_a_script_is_refused(tmp_path):
    folder = tmp_path / "poems"
    folder.mkdir()
    write(folder / "poems.py", "raise SystemExit")
    with pytest.raises(DataError, match=r"'.*poems' exists only as a script"):
        read(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_without_a_network_a_hub_source_fails_without_waiting_in_one_line(tmp_path, streaming):
    # No server listens on port 9 of this machine, whether or not it has a network.
    program = (
        "import time, sys\n"
        "import minillama.data.tables\n"
        "from minillama.config.run import HubSource\n"
        "from minillama.data.sources import read_documents\n"
        "from minillama.errors import SourceUnreachableError\n"
        "waits, connections = [], []\n"
        "time.sleep = waits.append\n"
        "def watch(event, found):\n"
        "    if event == 'socket.connect':\n"
        "        connections.append(found[1])\n"
        "sys.addaudithook(watch)\n"
        "try:\n"
        f"    list(read_documents(HubSource(kind='hub', path='some/set', streaming={streaming})))\n"
        "except SourceUnreachableError as error:\n"
        "    print(error)\n"
        "assert not waits and 0 < len(connections) <= 4, (waits, connections)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "HF_HOME": str(tmp_path / "hf"),
            "MINILLAMA_CACHE": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert "data set 'some/set'" in done.stdout
    assert "use data.source.kind=pydocs" in done.stdout


@pytest.mark.parametrize(
    "name", ["t.jsonl", "t.JSON", "t.ndjson.gz", "t.csv", "t.tsv", "t.parquet"]
)
def test_the_ending_of_the_names_gives_the_format(tmp_path, name):
    path, rows = tmp_path / name, [{"n": 1, "text": "a, b"}]
    if name == "t.parquet":
        parquet_of(path, {"text": ["a, b"]})
    elif name == "t.csv":
        write(path, csv_of(["a, b"]))
    elif name == "t.tsv":
        write(path, "n\ttext\n1\ta, b\n")
    else:
        write(path, gzip.compress(lines(rows).encode()) if name.endswith("gz") else lines(rows))
    assert list(read_documents(FilesSource(kind="files", files=[str(path)]))) == ["a, b"]
