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
import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm import tqdm

from minillama.cache import cache_folder
from minillama.config import FilesSource, HubSource
from minillama.data.building import build_once
from minillama.data.files import check_utf8
from minillama.errors import DataError, MinillamaError, SourceUnreachableError

_LOGGER = logging.getLogger("minillama")
_TIMEOUT = 10.0  # seconds until the hub counts as unreachable
_ROWS_AT_ONCE = 1000
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
_HTTP_PACKAGES = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "aiohttp")
# pandas would read texts such as "NA" and "null" as nothing.
_CSV_OPTIONS = {"encoding": "utf-8-sig", "keep_default_na": False, "na_values": [""]}

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
        with _quiet(), _explained(str(path)):
            table = datasets.load_dataset(
                source.format,
                data_files=glob.escape(str(path)),
                split="train",
                # A folder for each content, since datasets knows a file by its name and time.
                cache_dir=str(_folder_of("datasets", source_hash)),
                **(_CSV_OPTIONS if source.format == "csv" else {}),
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
    is_local = Path(source.path).exists()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_explained(where))
        if not is_local and not _hub_answers(source):
            stack.enter_context(_offline())
        table = datasets.load_dataset(
            source.path,
            source.name,
            split=source.split,
            revision=source.revision,
            streaming=source.streaming,
            cache_dir=str(_folder_of("datasets", source_hash)) if is_local else None,
        )
        if source.streaming:
            chunks = _stream_chunks(source, table, source_hash)
        else:
            if source.max_documents is not None:
                table = table.select(range(min(source.max_documents, len(table))))
            chunks = _text_chunks(table, source.text_field, where)
    return _rows(chunks, f"{where}: column {source.text_field!r}")


def _folder_of(sort: str, source_hash: str) -> Path:
    return cache_folder() / sort / source_hash[:32]


# ---------------------------------------------------------------------------------- from Arrow


def _text_chunks(table: datasets.Dataset, field: str, where: str) -> list[Any]:
    if field not in table.column_names:
        raise _no_column(where, field, table.column_names)
    kind = str(getattr(table.features[field], "dtype", table.features[field]))
    if kind not in ("string", "large_string"):
        raise _not_text(where, field, kind)
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
    with _explained(where):
        for row in tqdm(table, desc="reading", unit=" documents", delay=2):
            if source.text_field not in row:
                raise _no_column(where, source.text_field, list(row))
            text = row[source.text_field]
            if text is not None and not isinstance(text, str):
                raise _not_text(where, source.text_field, type(text).__name__)
            yield text


def _batched(texts: Iterable[str | None]) -> Iterator[list[str | None]]:
    batch: list[str | None] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _ROWS_AT_ONCE:
            yield batch
            batch = []
    yield batch


# --------------------------------------------------------------------------- errors and network


def _no_column(where: str, field: str, columns: list[str]) -> DataError:
    return DataError(
        f"{where} has no column {field!r} (data.source.text_field); it has: {', '.join(columns)}"
    )


def _not_text(where: str, field: str, kind: str) -> DataError:
    return DataError(
        f"{where}: column {field!r} (data.source.text_field) holds {kind}, not strings"
    )


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn what ``datasets`` raises into one line of ours."""
    try:
        yield
    except MinillamaError:
        raise
    except Exception as error:
        causes = list(_chain(error))
        if any(_is_of_network(cause) for cause in causes):
            raise SourceUnreachableError(
                f"cannot reach {where} on the Hugging Face hub, and it is not in the local cache; "
                "connect to the network, or use data.source.kind=pydocs, which needs none, or "
                "kind=files"
            ) from error
        if "scripts are no longer supported" in str(error):
            raise DataError(
                f"{where} exists only as a script, which datasets does not run; use one that "
                "holds data files"
            ) from error
        reason = " ".join(str(causes[-1]).split()) or "it is empty"
        raise DataError(f"cannot read {where}: {reason[:300]}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_network(error: BaseException) -> bool:
    return (
        isinstance(error, (ConnectionError, TimeoutError, huggingface_hub.errors.HfHubHTTPError))
        or type(error).__module__.partition(".")[0] in _HTTP_PACKAGES
    )


def _hub_answers(source: HubSource) -> bool:
    """Ask the hub once, since ``datasets`` itself would try for half a minute."""
    try:
        huggingface_hub.HfApi().dataset_info(
            source.path, revision=source.revision, timeout=_TIMEOUT
        )
    except huggingface_hub.errors.RevisionNotFoundError:
        raise DataError(f"data set {source.path!r} has no revision {source.revision!r}") from None
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise DataError(
            f"the hub has no data set {source.path!r}, or it is private; check data.source.path"
        ) from None
    except huggingface_hub.errors.HFValidationError as error:
        raise DataError(f"data.source.path = {source.path!r}: {error}") from None
    except huggingface_hub.errors.HfHubHTTPError:
        return True  # it answers; whatever it means, load_dataset will say
    except Exception:
        return False  # each version of the hub's client has errors of its own for no network
    return True


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let ``datasets`` look into its own cache only."""
    holders: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [holder.HF_HUB_OFFLINE for holder in holders]
    for holder in holders:
        holder.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.HF_HUB_OFFLINE = value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep ``datasets`` from printing bars, and errors that we word ourselves."""
    bars = datasets.are_progress_bars_disabled()
    verbosity = datasets.utils.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()
