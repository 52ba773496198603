"""Tables that are read as they come: nothing is converted, copied or counted beforehand."""

from __future__ import annotations

import contextlib
import glob
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets

from minillama.config.run import FilesSource, HubSource
from minillama.data.files import Piece, data_files, is_url
from minillama.data.streams import Pieces, Place
from minillama.data.table_faults import explained, quiet, text_of
from minillama.data.tables import CSV_OPTIONS, load_hub
from minillama.errors import DataError

_MOST_PARTS = 256  # each ends with a shard that is not full
_FEW_FILES = 64  # so many parquet files or fewer are read by row group
_ROWS = 100_000  # of a data set that does not stream, in a part

_LOGGER = logging.getLogger("minillama")

Table = tuple[str, Callable[[], Any]]
"""What messages call it, and what opens the ``datasets.IterableDataset``; it can be pickled."""


class TableStream:
    """Rows of tables, which may be of any size.

    Args:
        field: the column that holds the text.
        tables: in order; every one belongs to one part.
    """

    def __init__(self, field: str, tables: list[Table]) -> None:
        self._field, self._tables = field, tables

    @property
    def n_parts(self) -> int:
        """How many parts there are."""
        return min(len(self._tables), _MOST_PARTS)

    def read(self, part: int, place: Place = None) -> Pieces:
        """Yield the rows of ``part`` that hold text, from ``place`` on.

        Raises:
            DataError: a table cannot be read, lacks the column, or holds no strings in it.
            SourceUnreachableError: the connection was lost, and could not be made again.
        """
        tables, parts = len(self._tables), self.n_parts
        number, inside = place or (tables * part // parts, None)
        for at in range(number, tables * (part + 1) // parts):
            where, opened = self._tables[at]
            lost = f"the connection to {where} was lost, and could not be made again"
            with explained(where, lost):
                table = opened()
                if inside is not None:
                    table.load_state_dict(inside)
                for row in table:
                    text = text_of(row, self._field, where)
                    if text is not None and text.strip():
                        yield Piece(text), partial(_place, at, table)
            inside = None


def _place(at: int, table: Any) -> Place:
    return [at, table.state_dict()]


def open_table_stream(source: FilesSource | HubSource, stamp: str) -> TableStream:
    """Open json, csv or parquet files, or a data set of the hub.

    Raises:
        DataError: a file or data set is missing or cannot be used.
        SourceUnreachableError: the hub, or a URL, cannot be reached.
    """
    if isinstance(source, FilesSource):
        return _open_files(source)
    where = f"data set {source.path!r}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(explained(where))
        table = load_hub(source, stamp, stack)
        most = source.max_documents
        if not source.streaming:
            table = table if most is None else table.take(most)
            table = table.to_iterable_dataset(num_shards=max(1, len(table) // _ROWS))
        elif most is None:
            table = _by_row_group(table)
        else:  # the first ones, so in one part
            return TableStream(source.text_field, [(where, partial(table.take(most).shard, 1, 0))])
        return TableStream(source.text_field, _shards_of(where, table))


def _open_files(source: FilesSource) -> TableStream:
    names = []
    for name in data_files(source):
        if is_url(name) or Path(name).stat().st_size:
            names.append(name)
        else:
            _LOGGER.warning("%s is empty and is skipped", name)
    if not names:
        raise DataError(f"data.source.files: no text in {', '.join(source.files)}; add some")
    tables: list[Table] = [(name, partial(_open_file, source.format, name)) for name in names]
    if source.format == "parquet" and len(names) <= _FEW_FILES:
        tables = [
            shard for name, opened in tables for shard in _shards_of(name, _by_row_group(opened()))
        ]
    return TableStream(source.text_field, tables)


def _open_file(format: str, name: str) -> Any:
    with quiet(), explained(name, f"cannot reach {name}; connect to the network"):
        return datasets.load_dataset(
            format,
            data_files=name if is_url(name) else glob.escape(name),
            split="train",
            streaming=True,
            **(CSV_OPTIONS if format == "csv" else {}),
        )


def _by_row_group(table: Any) -> Any:
    """Cut parquet files at their row groups, where ``datasets`` can and their number is small."""
    can = hasattr(table, "reshard") and table.num_shards <= _FEW_FILES
    return table.reshard() if can else table


def _shards_of(where: str, table: Any) -> list[Table]:
    shards = table.num_shards
    return [(where, partial(table.shard, shards, index)) for index in range(shards)]
