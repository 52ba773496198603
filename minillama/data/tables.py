"""Documents that are rows of a table: json, csv and parquet files, and data sets of the hub.

All go through ``datasets`` into Arrow files that are mapped into memory, and read row by row.
"""

from __future__ import annotations

import contextlib
import glob
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm import tqdm

from minillama.config.run import FilesSource, HubSource
from minillama.data.building import build_once
from minillama.data.files import check_utf8
from minillama.data.table_faults import (
    explained,
    hub_answers,
    no_column,
    not_text,
    offline,
    quiet,
    text_of,
)
from minillama.errors import DataError
from minillama.files import cache_folder

_LOGGER = logging.getLogger("minillama")
_ROWS_AT_ONCE = 1000
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
# pandas would read texts such as "NA" and "null" as nothing.
CSV_OPTIONS = {"encoding": "utf-8-sig", "keep_default_na": False, "na_values": [""]}

Rows = tuple[NDArray[np.int64], Callable[[int], str]]
"""The size of each document in UTF-8 bytes, and the function that reads document i."""


def open_files(source: FilesSource, paths: list[Path], source_hash: str) -> Rows:
    """Open the column ``text_field`` of json, csv or parquet files; nulls and blanks are skipped.

    Raises:
        DataError: a file cannot be read as its format, lacks the column, or holds no text in it.
    """
    chunks: list[Any] = []
    for path in paths:
        if not path.stat().st_size:
            _LOGGER.warning("%s is empty and is skipped", path)
            continue
        if source.format != "parquet" and path.suffix not in _COMPRESSED:
            check_utf8(path)  # the readers of datasets tell no offset, or take any bytes
        with quiet(), explained(str(path)):
            table = datasets.load_dataset(
                source.format,
                data_files=glob.escape(str(path)),
                split="train",
                # A folder for each content, since datasets knows a file by its name and time.
                cache_dir=str(_folder_of("datasets", source_hash)),
                **(CSV_OPTIONS if source.format == "csv" else {}),
            )
            chunks += _text_chunks(table, source.text_field, str(path))
    return _rows(chunks, f"data.source.files: column {source.text_field!r}")


def open_hub(source: HubSource, source_hash: str) -> Rows:
    """Open the column ``text_field`` of a data set of the hub, or of one in a local folder.

    Without a network a data set that ``datasets`` has in its own cache is used.

    Raises:
        DataError: there is no such data set, split or column, or it exists as a script only.
        SourceUnreachableError: the hub cannot be reached.
    """
    where = f"data set {source.path!r}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(explained(where))
        table = load_hub(source, source_hash, stack)
        if source.streaming:
            chunks = _stream_chunks(source, table, source_hash)
        else:
            if source.max_documents is not None:
                table = table.select(range(min(source.max_documents, len(table))))
            chunks = _text_chunks(table, source.text_field, where)
    return _rows(chunks, f"{where}: column {source.text_field!r}")


def load_hub(source: HubSource, source_hash: str, stack: contextlib.ExitStack) -> Any:
    """Load a data set of the hub or of a local folder; until ``stack`` ends it may be offline."""
    is_local = Path(source.path).exists()
    if not is_local and not hub_answers(source):
        stack.enter_context(offline())
    return datasets.load_dataset(
        source.path,
        source.name,
        split=source.split,
        revision=source.revision,
        streaming=source.streaming,
        cache_dir=str(_folder_of("datasets", source_hash)) if is_local else None,
    )


def _folder_of(sort: str, source_hash: str) -> Path:
    return cache_folder() / sort / source_hash[:32]


# ---------------------------------------------------------------------------------- from Arrow


def _text_chunks(table: datasets.Dataset, field: str, where: str) -> list[Any]:
    if field not in table.column_names:
        raise no_column(where, field, table.column_names)
    kind = str(getattr(table.features[field], "dtype", table.features[field]))
    if kind not in ("string", "large_string"):
        raise not_text(where, field, kind)
    column = table.data.column(field)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"{where}: column {field!r} is not UTF-8 ({error})") from error
    return list(column.chunks)


def _rows(chunks: list[Any], where: str) -> Rows:
    """Leave out null and blank texts, and read the others out of the mapped ``chunks``."""
    starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
    sizes, kept = [], []
    for start, chunk in zip(starts[:-1], chunks, strict=True):
        inked = pc.fill_null(pc.greater(pc.binary_length(pc.utf8_trim_whitespace(chunk)), 0), False)
        rows = np.flatnonzero(inked.to_numpy(zero_copy_only=False))
        kept.append(rows + start)
        sizes.append(pc.binary_length(chunk.take(pa.array(rows))).to_numpy().astype(np.int64))
    rows = np.concatenate([np.empty(0, np.int64), *kept])
    if not len(rows):
        raise DataError(f"{where} holds no text in any of its {starts[-1]} rows")
    if len(rows) < starts[-1]:
        _LOGGER.warning(
            "%s: %d of %d rows hold no text and are skipped",
            where,
            starts[-1] - len(rows),
            starts[-1],
        )

    def read(index: int) -> str:
        row = rows[index]
        which = int(np.searchsorted(starts, row, "right")) - 1
        return str(chunks[which][int(row - starts[which])].as_py())

    return np.concatenate(sizes), read


def _stream_chunks(
    source: HubSource, table: datasets.IterableDataset, source_hash: str
) -> list[Any]:
    """Write the texts of a stream into an Arrow file in the cache, and map it."""
    if source.max_documents is not None:
        table = table.take(source.max_documents)

    def build(folder: Path) -> None:
        schema = pa.schema([("text", pa.large_string())])
        with (
            pa.OSFile(str(folder / "text.arrow"), "wb") as file,
            pa.ipc.new_stream(file, schema) as writer,
        ):
            for texts in _batched(_texts(source, table)):
                writer.write_batch(pa.record_batch([pa.array(texts, pa.large_string())], schema))

    folder = _folder_of("streams", source_hash)
    build_once(folder, Path.is_dir, build)
    mapped = pa.memory_map(str(folder / "text.arrow"))
    return list(pa.ipc.open_stream(mapped).read_all().column("text").chunks)


def _texts(source: HubSource, table: Iterable[dict[str, Any]]) -> Iterator[str | None]:
    where = f"data set {source.path!r}"
    with explained(where):
        for row in tqdm(table, desc="reading", unit=" documents", delay=2):
            yield text_of(row, source.text_field, where)


def _batched(texts: Iterable[str | None]) -> Iterator[list[str | None]]:
    batch: list[str | None] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _ROWS_AT_ONCE:
            yield batch
            batch = []
    yield batch
