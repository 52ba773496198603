"""Sources that are read in parts, each from any place on, so that none is ever in memory whole.

    pydocs, text files ──▶ pieces of about 1 MiB, grouped ───────────────────┐
    json, csv, parquet ──▶ files, or row groups of a few parquet files ──────┼──▶ parts
    hub ──▶ files of a data set that streams, ranges of rows of another ─────┘

What the parts are depends on the source alone, not on how many processes read them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from minillama.config.run import FilesSource, PydocsSource, Source
from minillama.data.files import Piece, data_files, is_url, local_files, read_piece
from minillama.data.sources import open_documents, source_hash
from minillama.errors import DataError

_PIECE = 1 << 20  # bytes

Place = Any
"""Where to go on in a part: what JSON can hold, and only the stream that gave it understands."""

Pieces = Iterator[tuple[Piece, Callable[[], Place]]]
"""Pieces, each with a function that tells, until the next is asked for, the place after it."""


class Stream(Protocol):
    """A source in parts.  It can be pickled."""

    @property
    def n_parts(self) -> int:
        """How many parts there are, counted from 0."""

    def read(self, part: int, place: Place = None) -> Pieces:
        """Yield what is in ``part``, from ``place`` on."""


class PieceStream:
    """Pieces that can be read in any order.

    Args:
        n_pieces: how many there are.
        read_one: returns a piece.
        per_part: how many pieces make a part.
    """

    def __init__(self, n_pieces: int, read_one: Callable[[int], Piece], per_part: int) -> None:
        self._n_pieces, self._read_one, self._per_part = n_pieces, read_one, per_part

    @property
    def n_parts(self) -> int:
        """How many parts there are."""
        return -(-self._n_pieces // self._per_part)

    def read(self, part: int, place: Place = None) -> Pieces:
        """Yield the pieces of ``part``, from ``place`` on."""
        start = part * self._per_part if place is None else place
        for number in range(start, min((part + 1) * self._per_part, self._n_pieces)):
            yield self._read_one(number), (number + 1).__int__


class _Documents:
    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __call__(self, number: int) -> Piece:
        return Piece(self._texts[number])


class _TextFiles:
    """The pieces of text files; a file of up to 1 MiB is one."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._firsts = [0]  # the number of the first piece of each file, then that of all
        for path in paths:
            self._firsts.append(self._firsts[-1] + max(1, -(-path.stat().st_size // _PIECE)))

    def __len__(self) -> int:
        return self._firsts[-1]

    def __call__(self, number: int) -> Piece:
        file = bisect_right(self._firsts, number) - 1
        return read_piece(self._paths[file], number - self._firsts[file], _PIECE)


def open_stream(source: Source, part_bytes: int) -> Stream:
    """Open ``source`` in parts; those of text files have about ``part_bytes`` bytes.

    Raises:
        DataError: a file is missing, or the data set cannot be used.
        SourceUnreachableError: the source is on the network, which is not there.
    """
    if isinstance(source, PydocsSource):
        texts = list(open_documents(source))
        return PieceStream(len(texts), _Documents(texts), len(texts))
    if isinstance(source, FilesSource) and source.format == "text":
        pieces = _TextFiles(local_files(source))
        return PieceStream(len(pieces), pieces, max(1, part_bytes // _PIECE))
    tables = importlib.import_module("minillama.data.table_streams")  # `datasets` takes a second
    stream: Stream = tables.open_table_stream(source, source_stamp(source))
    return stream


def source_stamp(source: Source) -> str:
    """Return a sha256 (hex) that changes when the source does, without reading large files.

    Of a file it covers path, size and time of change; of a URL or the hub what the config says.

    Raises:
        DataError: a file is missing.
        SourceUnreachableError: a text is behind a URL that cannot be reached.
    """
    if isinstance(source, PydocsSource):
        return source_hash(source)
    if isinstance(source, FilesSource):
        text = source.format == "text"
        names = [str(path) for path in local_files(source)] if text else data_files(source)
    else:
        names = sorted(str(path) for path in Path(source.path).rglob("*") if path.is_file())
    try:
        files = [name if is_url(name) else _stamp(Path(name)) for name in names]
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error
    settings = source.model_dump(mode="json", exclude={"files", "streaming"})
    return hashlib.sha256(json.dumps([settings, files], sort_keys=True).encode()).hexdigest()


def _stamp(path: Path) -> list[Any]:
    stat = path.stat()
    return [str(path), stat.st_size, stat.st_mtime_ns]
