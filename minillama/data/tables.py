"""Documents that are rows of tables: json, csv and parquet files, and data sets of the hub.

``datasets`` streams them; nothing is converted or copied first.

    files, or row groups of large parquet files ──────────────────┐
    data set of the hub ─▶ its files if streamed, else its rows ──┴─▶ tables ─▶ parts ─▶ rows
"""

from __future__ import annotations

import contextlib
import glob
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import datasets
import fsspec.compression
import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.errors
import pyarrow.parquet

from minillama.config.run import FilesSource, HubSource
from minillama.data.files import (
    PART_BYTES,
    check_url,
    count_parts,
    data_files,
    is_compressed,
    is_url,
    open_zstd,
    read_pieces,
)
from minillama.data.split import Piece, Pieces, Place
from minillama.errors import DataError, MinillamaError, SourceUnreachableError
from minillama.files import cache_folder

_FEW_FILES = 64  # so many parquet files or fewer of a data set are read by row group
_PART_ROWS = 100_000  # of a data set that is not streamed
# pandas would read texts such as "NA" and "null" as missing.
_CSV_OPTIONS = {"encoding": "utf-8-sig", "keep_default_na": False, "na_values": [""]}
_HUB_TIMEOUT = 10.0  # seconds until the hub counts as unreachable
_HTTP_PACKAGES = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "aiohttp")

_LOGGER = logging.getLogger("minillama")

fsspec.compression.register_compression("zstd", open_zstd, "zst", force=True)


class Table(NamedTuple):
    """A table that has not been opened yet.

    Attributes:
        where: its name in messages.
        open: returns its ``datasets.IterableDataset``; can be pickled.
        n_bytes: on the disk, about; if that is not known, those of a part.
        diagnose: raises a better error, if it can, once reading has failed.
    """

    where: str
    open: Callable[[], Any]
    n_bytes: int = PART_BYTES
    diagnose: Callable[[], None] | None = None


class Tables:
    """Rows of tables as a stream of documents; each table belongs to one part.

    Args:
        field: the column that holds the text, or ``outer.inner`` where it is nested.
        tables: in order.
    """

    def __init__(self, field: str, tables: list[Table]) -> None:
        self._field = field
        total = sum(table.n_bytes for table in tables)
        n_parts = min(count_parts(total), len(tables))
        parts: dict[int, list[Table]] = {}
        first = 0
        for table in tables:
            middle = first + table.n_bytes // 2
            parts.setdefault(middle * n_parts // total, []).append(table)
            first += table.n_bytes
        self._parts = list(parts.values())
        self.n_parts = len(self._parts)

    def read(self, part: int, place: Place = None) -> Pieces:
        """Yield the rows of ``part``, from ``place`` on; a row without text is an empty document.

        Raises:
            DataError: a table cannot be read, lacks the column, or holds no strings in it.
            SourceUnreachableError: the connection was lost, and could not be restored.
        """
        first, n_rows, state = place or (0, 0, None)
        for number, table in enumerate(self._parts[part][first:], first):
            lost = f"the connection to {table.where} was lost, and could not be restored"
            with _quiet(), _explained(table.where, lost, table.diagnose):
                opened = table.open()
                if state is not None:
                    opened.load_state_dict(state)
                for row_number, row in enumerate(opened, n_rows + 1):
                    text = _text_of(row, self._field, f"{table.where}, row {row_number}")
                    yield Piece(text), partial(_place, number, row_number, opened)
            n_rows, state = 0, None


def _place(table: int, n_rows: int, opened: Any) -> Place:
    return [table, n_rows, opened.state_dict()]


# ---------------------------------------------------------------------------------------- columns


def _text_of(row: Mapping[str, Any], field: str, where: str) -> str:
    value: Any = row
    names = [field] if field in row else field.split(".")
    for name in names:
        if value is None:
            break
        if not isinstance(value, Mapping) or name not in value:
            raise DataError(
                f"{where}: there is no column {field!r} (data.source.text_field); there are: "
                f"{', '.join(_columns(row))}"
            )
        value = value[name]
    if value is not None and not isinstance(value, str):
        raise DataError(
            f"{where}: column {field!r} (data.source.text_field) holds {type(value).__name__}, "
            "not strings"
        )
    return value or ""


def _columns(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _columns(value))
        else:
            yield name


# ------------------------------------------------------------------------------------------ files


def open_files(source: FilesSource) -> Tables:
    """Open json, csv or parquet files; those at URLs are read from there.

    Raises:
        DataError: a file is missing, or all are empty.
        SourceUnreachableError: a URL cannot be reached.
    """
    tables: list[Table] = []
    for name in data_files(source):
        opened = partial(_open_file, source.format, name)
        if is_url(name):
            tables.append(Table(name, opened, diagnose=partial(check_url, name)))
        elif n_bytes := Path(name).stat().st_size:
            is_text = source.format != "parquet" and not is_compressed(Path(name))
            table = Table(name, opened, n_bytes, partial(_check_utf8, name) if is_text else None)
            is_large = source.format == "parquet" and n_bytes > PART_BYTES
            tables += _by_row_group(table) if is_large else [table]
        else:
            _LOGGER.warning("%s is empty and is skipped", name)
    if not tables:
        raise DataError(f"no text in {', '.join(source.files)}; add some", "data.source.files")
    return Tables(source.text_field, tables)


def _open_file(format: str, name: str) -> Any:
    options: dict[str, Any] = _CSV_OPTIONS if format == "csv" else {}
    if format == "csv" and ".tsv" in PurePath(name).suffixes:
        options = {**options, "sep": "\t"}
    return datasets.load_dataset(
        format,
        data_files=name if is_url(name) else glob.escape(name),
        split="train",
        streaming=True,
        **options,
    )


def read_rows(format: str, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of one json, csv or parquet file, whole.

    Raises:
        DataError: the file cannot be read.
    """
    with _quiet(), _explained(name):
        yield from _open_file(format, name)


def column_bytes(paths: Sequence[Path], field: str) -> int:
    """Return how many bytes the column ``field`` of these parquet files holds, uncompressed."""
    total = 0
    for path in paths:
        meta = pyarrow.parquet.read_metadata(path)
        columns = (
            meta.row_group(i).column(j)
            for i in range(meta.num_row_groups)
            for j in range(meta.num_columns)
        )
        total += sum(c.total_uncompressed_size for c in columns if c.path_in_schema == field)
    return total


def _check_utf8(name: str) -> None:
    for _ in read_pieces(Path(name)):
        pass


def _by_row_group(table: Table) -> list[Table]:
    with _quiet(), _explained(table.where):
        return _shards(table.where, _reshard(table.open()), table.n_bytes)


def _reshard(opened: Any) -> Any:
    """Cut parquet files at their row groups, where this version of ``datasets`` can."""
    return opened.reshard() if hasattr(opened, "reshard") else opened


def _shards(where: str, opened: Any, n_bytes: int | None = None) -> list[Table]:
    n = opened.num_shards
    size = PART_BYTES if n_bytes is None else max(1, n_bytes // n)
    names = [f"{where} (part {i + 1} of {n})" if n > 1 else where for i in range(n)]
    return [Table(names[i], partial(opened.shard, n, i), size) for i in range(n)]


# -------------------------------------------------------------------------------------------- hub


def open_hub(source: HubSource, cache_name: str) -> Tables:
    """Open a data set of the hub, or one in a local folder.

    Without a network a data set that ``datasets`` has in its own cache is used.

    Args:
        source: which one.
        cache_name: names the content of a local folder.

    Raises:
        DataError: there is no such data set or split, or it exists as a script only.
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
            cache_dir=str(cache_folder() / "datasets" / cache_name) if is_local else None,
        )
        most = source.max_documents
        if most is not None:
            table = table.take(most)
        if not source.streaming:
            table = table.to_iterable_dataset(num_shards=max(1, len(table) // _PART_ROWS))
        elif most is not None:  # the first rows: shards would each have as many
            return Tables(source.text_field, [Table(where, partial(table.shard, 1, 0))])
        elif table.num_shards <= _FEW_FILES:
            table = _reshard(table)
        return Tables(source.text_field, _shards(where, table))


def _hub_answers(source: HubSource) -> bool:
    """Return whether the hub can be reached, within seconds.

    Raises:
        DataError: it answers that there is no such data set or revision, or that it is private.
    """
    try:
        huggingface_hub.HfApi().dataset_info(
            source.path, revision=source.revision, timeout=_HUB_TIMEOUT
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
        return True  # whatever its answer means, load_dataset will say
    except Exception:
        return False  # without a network each version of the client raises other errors
    return True


# ----------------------------------------------------------------------------------------- errors


@contextlib.contextmanager
def _explained(
    where: str, unreachable: str | None = None, diagnose: Callable[[], None] | None = None
) -> Iterator[None]:
    """Turn what ``datasets`` raises into an error of one line.

    Args:
        where: what is read.
        unreachable: the message where the network fails; default: that of the hub.
        diagnose: raises a better error, if it can: ``datasets`` does not say which byte is not
            UTF-8, and calls a server that does not answer a missing file.

    Raises:
        DataError: ``where`` cannot be read.
        SourceUnreachableError: the network failed.
    """
    try:
        yield
    except MinillamaError:
        raise
    except Exception as error:
        causes = list(_chain(error))
        if any(_is_of_network(cause) for cause in causes):
            raise SourceUnreachableError(
                unreachable
                or f"cannot reach {where} on the Hugging Face hub, and it is not in the local "
                "cache; connect to the network, or use data.source.kind=pydocs, which needs none, "
                "or kind=files"
            ) from error
        if "scripts are no longer supported" in str(error):
            raise DataError(
                f"{where} exists only as a script, which datasets does not run; use one that "
                "holds data files"
            ) from error
        if diagnose is not None:
            diagnose()
        if any(isinstance(cause, UnicodeDecodeError) for cause in causes):
            raise DataError(f"{where} is not UTF-8; save it as UTF-8") from error
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


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Restrict ``datasets`` to its own cache."""
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
    """Keep ``datasets`` from printing progress bars and errors, which become ours."""
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
