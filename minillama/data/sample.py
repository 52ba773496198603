"""A sample of the user's files, and how much text they hold, without reading all of it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillama.config.run import FilesSource
from minillama.data import tables
from minillama.data.files import TextFiles, compression_ratio, local_files
from minillama.errors import DataError

SAMPLE_BYTES = 4 << 20
"""About how much text is read."""

_PLACES = 8  # in which text is read, evenly over all of it
_ROWS_SEEN = 20  # of a table, to tell which column holds the text


@dataclass(frozen=True)
class Sample:
    """What was read of a text.

    Attributes:
        source: with the column that holds the text.
        texts: documents, or the first pieces of long ones.
        n_bytes: of the whole text in UTF-8; estimated unless ``is_whole``.
        is_whole: ``texts`` is all of it.
    """

    source: FilesSource
    texts: list[str]
    n_bytes: int
    is_whole: bool


def sample_files(source: FilesSource, most: int = SAMPLE_BYTES) -> Sample:
    """Read up to about ``most`` bytes of text from ``source``.

    Raises:
        DataError: a file is missing, cannot be read, is not text or holds none, or no column does.
        SourceUnreachableError: a URL cannot be reached.
    """
    paths = local_files(source)
    sample = _of_text if source.format == "text" else _of_tables
    found = sample(source, paths, most)
    if not any(text.strip() for text in found.texts):
        raise DataError(f"there is no text in {', '.join(source.files)}")
    return found


def _of_text(source: FilesSource, paths: list[Path], most: int) -> Sample:
    stream = TextFiles(paths)
    parts = _spread(stream.n_parts)
    texts, is_whole = [], len(parts) == stream.n_parts
    for part in parts:
        taken = 0
        with closing(stream.read(part)) as pieces:  # type: ignore[type-var]
            for piece, _ in pieces:
                if taken >= most / len(parts):
                    is_whole = False
                    break
                texts.append(piece.text)
                taken += len(piece.text.encode())
    n_bytes = sum(len(text.encode()) for text in texts)
    return Sample(source, texts, n_bytes if is_whole else _unpacked(paths), is_whole)


def _spread(n: int) -> list[int]:
    """Return at most ``_PLACES`` numbers below ``n``, evenly spaced."""
    return [i * n // _PLACES for i in range(_PLACES)] if n > _PLACES else list(range(n))


def _unpacked(paths: list[Path]) -> int:
    """Return the bytes in ``paths``; of compressed ones, as the first of their kind compresses."""
    kinds = {path.suffix: path for path in reversed(paths)}
    ratios = {suffix: compression_ratio(path) for suffix, path in kinds.items()}
    return round(sum(path.stat().st_size * ratios[path.suffix] for path in paths))


# ------------------------------------------------------------------------------------------ tables


def _of_tables(source: FilesSource, paths: list[Path], most: int) -> Sample:
    chosen = [paths[i] for i in _spread(len(paths))]
    texts: list[str] = []
    n_text = n_written = 0
    is_whole = len(chosen) == len(paths)
    for path in chosen:
        taken = 0
        rows = tables.read_rows(source.format, str(path))
        first = list(itertools.islice(rows, _ROWS_SEEN))
        if not texts:
            source = source.model_copy(update={"text_field": text_column(first, str(path))})
        for row in itertools.chain(first, rows):
            if taken >= most / len(chosen):
                is_whole = False
                break
            text = str(row.get(source.text_field) or "")
            texts.append(text)
            taken += len(text.encode())
            n_written += _written(row, source.format)
        n_text += taken
    if is_whole:
        n_bytes = n_text
    elif source.format == "parquet":
        n_bytes = tables.column_bytes(paths, source.text_field)
    else:
        n_bytes = round(_unpacked(paths) * n_text / n_written)
    return Sample(source, texts, n_bytes, is_whole)


def text_column(rows: Sequence[Mapping[str, Any]], where: str) -> str:
    """Return the column that holds the text: ``text``, else the strings with most characters.

    Raises:
        DataError: no column of the rows of ``where`` holds strings.
    """
    lengths: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, str):
                size = math.inf if name == "text" else len(value)
                lengths[name] = lengths.get(name, 0) + size
    if not lengths:
        raise DataError(f"{where}: no column holds text")
    return max(lengths, key=lengths.__getitem__)


def _written(row: Mapping[str, Any], format: str) -> int:
    """Return about how many bytes a row takes in a file of ``format``, json or csv."""
    if format == "json":
        return len(json.dumps(dict(row), ensure_ascii=False, default=str).encode()) + 1
    return sum(len(str(value).encode()) + 1 for value in row.values())
