import gzip
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minillama.config.run import FilesSource, HubSource
from minillama.data.sources import open_documents, source_hash
from minillama.errors import DataError

TEXTS = ["first", 'a\nsecond, with\t"quotes"', "你好 🙂 ▁", "NA", "  null ", "x" * 100_000]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "cache"))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def opened(format: str, *paths: Path, **options):
    return open_documents(
        FilesSource(kind="files", format=format, files=[str(path) for path in paths], **options)
    )


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
    documents = opened(format, write(tmp_path / name, content))
    assert list(documents) == TEXTS
    assert documents[-1] == TEXTS[-1]
    assert documents.sizes.tolist() == [len(text.encode()) for text in TEXTS]
    assert capfd.readouterr() == ("", "")  # no bars, no warnings


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_of_several_row_groups(tmp_path, kind):
    texts = [f"row {i}" for i in range(2500)]
    pq.write_table(
        pa.table({"body": pa.array(texts, kind)}), tmp_path / "t.parquet", row_group_size=99
    )
    documents = opened("parquet", tmp_path / "t.parquet", text_field="body")
    assert list(documents) == texts
    assert [documents[i] for i in (2499, 0, 98, 99, 100)] == [
        texts[i] for i in (2499, 0, 98, 99, 100)
    ]


def test_files_may_differ_in_their_other_columns_and_keep_their_order(tmp_path):
    one = write(tmp_path / "z.jsonl", lines([{"text": "a", "extra": 1}]))
    two = write(tmp_path / "b.jsonl", lines([{"title": "t", "text": "b"}]))
    assert list(opened("json", one, two)) == ["a", "b"]


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
    with caplog.at_level(logging.WARNING, "minillama"):
        documents = opened(format, path)
    assert list(documents) == ["a", "b"]
    assert documents.sizes.tolist() == [1, 1]
    assert "3 of 5 rows hold no text and are skipped" in caplog.text


@pytest.mark.parametrize("format", ["json", "csv", "parquet"])
def test_a_missing_column_lists_those_there_are(tmp_path, format):
    path = tmp_path / f"t.{format}"
    if format == "parquet":
        parquet_of(path, {"body": ["a"], "n": [1]})
    else:
        write(path, lines([{"body": "a", "n": 1}]) if format == "json" else "body,n\na,1\n")
    with pytest.raises(DataError, match=rf"t\.{format} has no column 'text' .* has: body, n$"):
        opened(format, path)


@pytest.mark.parametrize(
    ("format", "name", "content", "complaint"),
    [
        ("json", "t.json", lines([{"text": 1}]), "column 'text' .* holds int64, not strings"),
        ("csv", "t.csv", "text\n1\n2\n", "column 'text' .* holds int64, not strings"),
        ("json", "t.json", lines([{"text": ["a"]}]), "column 'text' .* holds .*, not strings"),
        ("json", "t.json", lines([{"text": "a"}, {"text": 1}]), "holds .*, not strings"),
        ("json", "t.json", lines([{"text": ""}] * 3), "holds no text in any of its 3 rows"),
        ("json", "t.json", '{"text": "a"\n', r"cannot read .*t\.json: "),
        ("json", "t.json", "", "holds no text"),
        ("json", "t.json", "\n", r"cannot read .*t\.json"),
        ("csv", "t.csv", "", "holds no text"),
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


def test_changed_content_is_read_anew_even_with_the_same_time(tmp_path):
    path = write(tmp_path / "t.jsonl", lines([{"text": "old"}]))
    assert list(opened("json", path)) == ["old"]
    stat = path.stat()
    write(path, lines([{"text": "new"}]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert list(opened("json", path)) == ["new"]


# ------------------------------------------------------------------------------------------ hub


def local_data_set(folder: Path, n: int = 10) -> Path:
    folder.mkdir(exist_ok=True)
    write(folder / "train.jsonl", lines([{"Text": f"doc {i}", "n": i} for i in range(n)]))
    write(folder / "test.jsonl", lines([{"Text": "held out", "n": 0}]))
    return folder


def hub(path: Path | str, **options) -> HubSource:
    return HubSource(**{"kind": "hub", "path": str(path), "text_field": "Text", **options})


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_is_read_by_split_and_up_to_max_documents(tmp_path, streaming):
    path = local_data_set(tmp_path / "set")
    documents = open_documents(hub(path, streaming=streaming))
    assert list(documents) == [f"doc {i}" for i in range(10)]
    assert documents[-1] == "doc 9"
    assert documents.source_hash == source_hash(hub(path))
    few = open_documents(hub(path, streaming=streaming, max_documents=3))
    assert list(few) == ["doc 0", "doc 1", "doc 2"]
    assert len(open_documents(hub(path, streaming=streaming, max_documents=99))) == 10
    assert list(open_documents(hub(path, streaming=streaming, split="test"))) == ["held out"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_missing_column_or_split_of_a_data_set_is_named(tmp_path, streaming):
    path = local_data_set(tmp_path / "set")
    with pytest.raises(DataError, match=r"has no column 'text' .* it has: Text, n"):
        open_documents(hub(path, text_field="text", streaming=streaming))
    with pytest.raises(DataError, match=r"holds int.*, not strings"):
        open_documents(hub(path, text_field="n", streaming=streaming))
    with pytest.raises(DataError, match=r"[Uu]nknown split|Bad split"):
        open_documents(hub(path, split="dev", streaming=streaming))
    with pytest.raises(DataError, match="'other' not found"):
        open_documents(hub(path, name="other", streaming=streaming))


def test_a_changed_local_data_set_has_another_hash(tmp_path):
    path = local_data_set(tmp_path / "set")
    before = source_hash(hub(path))
    assert source_hash(hub(path, streaming=True)) == before
    assert source_hash(hub(path, max_documents=3)) != before
    local_data_set(path, 11)
    assert source_hash(hub(path)) != before
    assert len(open_documents(hub(path))) == 11


def test_a_data_set_that_is_a_script_is_refused(tmp_path):
    folder = tmp_path / "poems"
    folder.mkdir()
    write(folder / "poems.py", "raise SystemExit")
    with pytest.raises(DataError, match=r"'.*poems' exists only as a script"):
        open_documents(hub(folder))


@pytest.mark.parametrize("streaming", [False, True])
def test_without_a_network_a_hub_source_fails_in_seconds_with_one_line(tmp_path, streaming):
    # Nobody listens on port 9 of this machine, whether or not it has a network.
    program = (
        "import time, sys\n"
        "import minillama.data.tables\n"
        "from minillama.config.run import HubSource\n"
        "from minillama.data.sources import open_documents\n"
        "from minillama.errors import SourceUnreachableError\n"
        "start = time.monotonic()\n"
        "try:\n"
        f"    open_documents(HubSource(kind='hub', path='some/set', streaming={streaming}))\n"
        "except SourceUnreachableError as error:\n"
        "    print(error)\n"
        "sys.exit(time.monotonic() - start > 5)\n"
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
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert "data set 'some/set'" in done.stdout
    assert "use data.source.kind=pydocs" in done.stdout
