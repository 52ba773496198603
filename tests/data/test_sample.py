import gc
import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet
import pytest

from minillama.config.run import FilesSource
from minillama.data.sample import SAMPLE_BYTES, sample_files, text_column
from minillama.errors import DataError

WORDS = ["norm", "stream", "depth", "grows", "is", "tamed", "größe", "unless", "the", "it"]


def prose(n_words, seed=0):
    drawn = random.Random(seed)
    lines = (" ".join(drawn.choices(WORDS, k=10)) for _ in range(n_words // 10))
    return "\n".join(lines) + "\n"


def sampled(*files, most=SAMPLE_BYTES):
    return sample_files(FilesSource(kind="files", files=[str(file) for file in files]), most)


@pytest.fixture(scope="module")
def megabyte(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "megabyte.txt"
    path.write_text(prose(190_000), encoding="utf-8")
    return path


def test_a_small_text_is_read_whole(tmp_path):
    path = tmp_path / "small.txt"
    path.write_text(prose(300), encoding="utf-8")
    sample = sampled(path)
    assert (sample.is_whole, sample.n_bytes) == (True, path.stat().st_size)
    assert "".join(sample.texts) == path.read_text(encoding="utf-8")


def test_of_gigabytes_a_few_are_read(tmp_path, megabyte):
    for i in range(2000):  # the same megabyte each time, which takes no space
        (tmp_path / f"{i:04}.txt").hardlink_to(megabyte)
    sample = sampled(tmp_path / "*.txt")
    assert sample.n_bytes == 2000 * megabyte.stat().st_size
    assert not sample.is_whole
    assert SAMPLE_BYTES <= sum(len(text.encode()) for text in sample.texts) <= 4 * SAMPLE_BYTES


def test_a_sparse_file_is_no_text(tmp_path, megabyte):
    path = tmp_path / "sparse.txt"
    path.write_bytes(megabyte.read_bytes())
    with path.open("r+b") as file:
        file.truncate(20 << 30)
    with pytest.raises(DataError, match="not plain text"):
        sampled(path)


def test_a_compressed_text_is_measured_by_its_beginning(tmp_path, megabyte):
    text = megabyte.read_bytes()
    path = tmp_path / "packed.txt.gz"
    path.write_bytes(gzip.compress(4 * text, mtime=0))
    sample = sampled(path, most=100_000)
    assert not sample.is_whole
    assert sample.n_bytes == pytest.approx(4 * len(text), rel=0.05)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "csv", "parquet"])
@pytest.mark.parametrize("most", [20_000, SAMPLE_BYTES])
def test_tables_give_their_text_column_and_its_size(tmp_path, ending, most):
    rows = [{"id": f"row {i}", "body": prose(60, seed=i)} for i in range(500)]
    n_bytes = sum(len(row["body"].encode()) for row in rows)
    path = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(
            pa.Table.from_pylist(rows), path, compression="zstd", use_dictionary=False
        )
    elif ending == "csv":
        lines = (f'{row["id"]},"{row["body"]}"\n' for row in rows)
        path.write_text("id,body\n" + "".join(lines), encoding="utf-8")
    else:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text, mtime=0) if ending.endswith("gz") else text)
    sample = sampled(path, most=most)
    assert sample.source.text_field == "body"
    assert sample.texts[0] == rows[0]["body"]
    assert sample.is_whole == (most == SAMPLE_BYTES)
    assert sample.n_bytes == (n_bytes if sample.is_whole else pytest.approx(n_bytes, rel=0.05))
    gc.collect()  # datasets leaves a csv open that is not read to its end, which warns


def test_a_column_called_text_is_the_text():
    rows = [{"text": "a", "note": "a longer one", "n": 1}, {"text": None, "note": "b", "n": 2}]
    assert text_column(rows, "x") == "text"
    assert text_column([{"title": "a", "body": "a longer one"}], "x") == "body"
    with pytest.raises(DataError, match="x: no column holds text"):
        text_column([{"n": 1}], "x")


def test_files_without_text_are_refused(tmp_path):
    (tmp_path / "blank.txt").write_text(" \n\n")
    with pytest.raises(DataError, match="there is no text in"):
        sampled(tmp_path / "blank.txt")
