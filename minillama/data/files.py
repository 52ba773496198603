"""The user's own files: finding, downloading and reading them.

    names, patterns, URLs ─▶ local paths ─▶ pieces of about 1 MiB that end at a line's end

.gz, .bz2, .xz and .zst files are read as the text that they hold.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import hashlib
import http.client
import io
import logging
import lzma
import os
import stat
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from tqdm.auto import tqdm

from minillama.config.run import FilesSource, format_by_ending
from minillama.data.split import Piece, Pieces, Place
from minillama.errors import DataError, SourceUnreachableError
from minillama.files import atomic_file, cache_folder, lock

_PIECE_BYTES = 1 << 20
PART_BYTES = 16 << 20  # of a source, at least, in each of its parts
_MOST_PARTS = 256  # each ends with a shard that is not full


def open_zstd(file: Any, mode: str = "rb", **_: Any) -> Any:
    """Open a Zstandard file, given by its path or open; unlike others this finds one cut short."""
    import pyarrow as pa  # slow to import, and needed by few runs

    return pa.CompressedInputStream(pa.input_stream(file, compression=None), "zstd")


_OPEN_COMPRESSED: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": open_zstd,
}
_NOT_TEXT = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "gzip, whose name should end in .gz",
    b"\xfd7zXZ": "xz, whose name should end in .xz",
    b"\x28\xb5\x2f\xfd": "Zstandard, whose name should end in .zst",
    b"PAR1": "Parquet, for data.source.format=parquet",
    b"\xd0\xcf\x11\xe0": "an old Office document, whose text has to be saved as a .txt file",
}
"""How files begin that are not UTF-8, and what they are."""
_DOCUMENTS = {
    b"PK\x03\x04": "a zip archive, as .docx, .odt and .epub are too",
    b"%PDF-": "a PDF",
    b"{\\rtf": "RTF",
    b"SQLite format 3\0": "an SQLite database",
}
"""How files begin that may be valid UTF-8 and yet are not plain text."""
_MOST_NULS = 0.1  # share of NUL characters in a text; that of ASCII saved as UTF-16 is a half
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)

_URL_TIMEOUT = 10.0  # seconds without an answer
_DOWNLOADED_AT_ONCE = 1 << 16  # bytes

_FIELD = "data.source.files"

_LOGGER = logging.getLogger("minillama")


def count_parts(n_bytes: int) -> int:
    """Return into how many parts a source of ``n_bytes`` is cut: its size alone decides."""
    return max(1, min(_MOST_PARTS, n_bytes // PART_BYTES))


@contextmanager
def cache_entry(path: Path) -> Iterator[None]:
    """Hold the lock of ``path``, a file or folder of the cache, while the body fills it.

    Raises:
        DataError: the cache cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        busy = "waiting for another process that prepares the same data"
        with lock(path.with_name(f"{path.name}.lock"), busy=busy):
            yield
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; set the environment variable "
            "MINILLAMA_CACHE to a folder that can be written and has space"
        ) from error


# ---------------------------------------------------------------------------------------- finding


def data_files(source: FilesSource) -> list[str]:
    """Return the files of ``source`` in order: patterns expanded, URLs as they are.

    A file that is named twice, be it by two paths or through a link, is returned once.

    Raises:
        DataError: a file is missing or cannot be read as one, or a pattern matches none.
    """
    found: dict[str, str] = {}
    for name in source.files:
        if is_url(name):
            found.setdefault(name, name)
        else:
            for path in _matching(Path(name).expanduser()):
                found.setdefault(os.path.realpath(path), str(path.absolute()))
    return list(found.values())


def local_files(source: FilesSource) -> list[Path]:
    """Return the files of ``source`` as :func:`data_files` does, URLs downloaded.

    Raises:
        DataError: a file is missing or cannot be read as one, or a pattern matches none.
        SourceUnreachableError: a URL cannot be reached, and is not in the cache.
    """
    return [download(name) if is_url(name) else Path(name) for name in data_files(source)]


def is_url(name: str) -> bool:
    """Return whether ``name`` is an http or https URL."""
    return name.startswith(("http://", "https://"))


def _matching(path: Path) -> list[Path]:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise DataError(f"cannot read {path}: {error.strerror}", _FIELD) from error
        mode = 0
    if stat.S_ISREG(mode):
        return [path]
    if stat.S_ISDIR(mode):
        raise DataError(f"{path} is a folder; name its files, as in {path}/*.txt", _FIELD)
    if mode:
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
        raise DataError(
            f"{path} is {kind}, and data is read more than once; save it to a file first", _FIELD
        )
    matches: list[Path] = []
    if any(sign in str(path) for sign in "*?["):
        root = Path(path.anchor or Path.cwd())
        pattern = str(path.relative_to(path.anchor))
        matches = sorted(match for match in root.glob(pattern) if match.is_file())
    if not matches:
        raise DataError(f"no such file: {path} (seen from {Path.cwd()})", _FIELD)
    return matches


# ---------------------------------------------------------------------------------------- reading


def is_compressed(path: Path) -> bool:
    """Return whether ``path`` is read through a decompressor, which its name decides."""
    return path.suffix in _OPEN_COMPRESSED


def compression_ratio(path: Path) -> float:
    """Return how many bytes of text the beginning of ``path`` holds for each byte on the disk.

    Raises:
        DataError: the file cannot be read.
    """
    if not is_compressed(path):
        return 1.0
    try:
        with path.open("rb") as packed:
            n_bytes = len(_OPEN_COMPRESSED[path.suffix](packed, "rb").read(8 * _PIECE_BYTES))
            return n_bytes / max(1, packed.tell())
    except _UNREADABLE as error:
        raise DataError(f"cannot read {path}: {error}") from error


class TextFiles:
    """Text files as a stream of pieces, each file one document.

    A part is a range of the bytes of all files, one after the other; a compressed file belongs to
    the part in which it begins.
    """

    def __init__(self, paths: list[Path]) -> None:
        for path in paths:
            if (kind := format_by_ending(path.name)) != "text":
                _warn_once(
                    f"{path} is read as plain text with all its markup; data.source.format={kind} "
                    "reads the column data.source.text_field of its rows"
                )
        sizes = [path.stat().st_size for path in paths]
        total = sum(sizes)
        self.n_parts = count_parts(total)
        self._ranges: list[list[tuple[Path, int, int | None]]] = [[] for _ in range(self.n_parts)]
        first = 0  # byte of the file, counted over all files
        for path, size in zip(paths, sizes, strict=True):
            begin = first * self.n_parts // max(1, total)
            if is_compressed(path) or not size:
                self._ranges[min(begin, self.n_parts - 1)].append((path, 0, None))
            else:
                end = (first + size - 1) * self.n_parts // total
                for part in range(begin, end + 1):
                    start = max(0, -(-part * total // self.n_parts) - first)
                    stop = -(-(part + 1) * total // self.n_parts) - first
                    self._ranges[part].append((path, start, stop if stop < size else None))
            first += size

    def read(self, part: int, place: Place = None) -> Pieces:
        """Yield the pieces of ``part`` that are not blank files, from ``place`` on.

        Raises:
            DataError: a file cannot be read, or is not UTF-8.
        """
        first, offset = place or (0, None)
        for number, (path, start, stop) in enumerate(self._ranges[part][first:], first):
            for piece, end in read_pieces(path, start, stop, place=offset):
                if piece.begins and piece.ends and not piece.text.strip():
                    _warn_once(f"{path} holds no text and is skipped")
                else:
                    yield piece, partial(list, (number, end))
            offset = None


@functools.cache
def _warn_once(message: str) -> None:
    """Log ``message`` once, though a file is opened for the tokenizer and again for its ids."""
    _LOGGER.warning("%s", message)


def read_pieces(
    path: Path,
    start: int = 0,
    stop: int | None = None,
    *,
    place: int | None = None,
    size: int = _PIECE_BYTES,
) -> Iterator[tuple[Piece, int]]:
    """Yield the text of a UTF-8 file in pieces, each with the offset of the byte after it.

    A piece ends after the first line end beyond ``size`` bytes or, if the next ``size`` bytes have
    none, between two characters.  A byte order mark is dropped, and ``\\r\\n`` becomes ``\\n``.  An
    empty file is one empty piece.

    Args:
        path: of the file, which may be compressed.
        start, stop: the range of bytes to read; each moves on to the next line's begin.
        place: the offset after an earlier piece, to resume from there.
        size: bytes in a piece, about.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    try:
        at = _line_after(path, start, size) if place is None else place
        end = None if stop is None else _line_after(path, stop, size)
        with _opened(path) as file:
            _skip(file, at, path)
            while at == 0 or (file.peek(1) and (end is None or at < end)):
                data = _read_lines(file, size, None if end is None else end - at)
                yield _piece(path, at, data, ends=not file.peek(1)), at + len(data)
                at += len(data)
                if not data:
                    return
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {reason}") from error


def _opened(path: Path) -> io.BufferedReader:
    opened = _OPEN_COMPRESSED.get(path.suffix)
    return path.open("rb") if opened is None else io.BufferedReader(opened(path, "rb"))


def _skip(file: io.BufferedReader, n_bytes: int, path: Path) -> None:
    if not is_compressed(path):
        file.seek(n_bytes)
        return
    while n_bytes and (data := file.read(min(n_bytes, _PIECE_BYTES))):
        n_bytes -= len(data)


def _line_after(path: Path, offset: int, reach: int) -> int:
    """Return where the next line begins or, if it is not within ``reach``, the next character."""
    if not offset:
        return 0
    with path.open("rb") as file:
        file.seek(offset)
        line = file.readline(reach)
        if line.endswith(b"\n") or len(line) < reach:
            return offset + len(line)
        file.seek(offset)
        return offset + len(_finish_character(file, b""))


def _read_lines(file: io.BufferedReader, size: int, most: int | None) -> bytes:
    data = file.read(size if most is None else min(size, most))
    if not data.endswith(b"\n"):
        data += file.readline(size if most is None else min(size, most - len(data)))
    return data if data.endswith(b"\n") else _finish_character(file, data)


def _finish_character(file: io.BufferedReader, data: bytes) -> bytes:
    """Add to ``data`` the rest of a character, or of a line end, that it was cut in."""
    for _ in range(3):
        byte = file.peek(1)[:1]
        is_rest = bool(byte) and byte[0] & 0xC0 == 0x80
        if not is_rest and not (data.endswith(b"\r") and byte == b"\n"):
            break
        data += file.read(1)
    return data


def _piece(path: Path, offset: int, data: bytes, *, ends: bool) -> Piece:
    for sign, kind in _DOCUMENTS.items():
        if not offset and data.startswith(sign):
            raise DataError(f"{path} is {kind}, not plain text; extract its text into a .txt file")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        found = offset + error.start
        looks = [kind for sign, kind in _NOT_TEXT.items() if not offset and data.startswith(sign)]
        if is_compressed(path) and looks:
            raise DataError(
                f"{path} holds no UTF-8 text; what is in it looks like {looks[0].split(',')[0]}: "
                "was it compressed twice?"
            ) from None
        raise DataError(
            f"{path} is not UTF-8 at byte {found}; it looks like {looks[0]}"
            if looks and looks[0] != "UTF-16"
            else f"{path} is not UTF-8 at byte {found}{'; it looks like UTF-16' * len(looks)}; "
            "save it as UTF-8, e.g. with iconv -f ENCODING -t UTF-8"
        ) from None
    if data.count(0) > _MOST_NULS * len(data):
        raise DataError(
            f"{path} is not plain text: from byte {offset} on it has {data.count(0)} NUL "
            f"characters among {len(data)}; if it is UTF-16, save it as UTF-8, e.g. with "
            "iconv -f UTF-16 -t UTF-8"
        )
    text = text if offset else text.removeprefix("\ufeff")
    return Piece(text.replace("\r\n", "\n"), begins=offset == 0, ends=ends)


# -------------------------------------------------------------------------------------- downloads


def download(url: str) -> Path:
    """Return the local copy of ``url``, fetched if the cache does not have it yet.

    Raises:
        DataError: the server answers that there is no such file, or the cache cannot be written.
        SourceUnreachableError: the server cannot be reached, or stops half-way.
    """
    name = PurePosixPath(urlsplit(url).path).name or "index"
    folder = cache_folder() / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:32]
    path = folder / name
    with cache_entry(path):
        if not path.exists():
            with atomic_file(path) as temporary:
                _fetch(url, temporary, name)
    return path


def check_url(url: str) -> None:
    """Refuse a URL that does not answer.

    Raises:
        DataError: the server answers that there is no such file.
        SourceUnreachableError: the server cannot be reached.
    """
    _open_url(url).close()


def _open_url(url: str) -> http.client.HTTPResponse:
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(url, timeout=_URL_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(
            f"{url}: the server answers {error.code} {error.reason}; check the address"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, getattr(error, "reason", error)) from error
    return response


def _fetch(url: str, path: Path, name: str) -> None:
    with _open_url(url) as response, path.open("wb") as file:
        total = int(response.headers.get("Content-Length", 0)) or None
        n_read = 0
        with tqdm(total=total, unit="B", unit_scale=True, desc=name, delay=2) as bar:
            while block := _receive(url, response):
                file.write(block)
                n_read += len(block)
                bar.update(len(block))
        if total and n_read < total:
            raise _unreachable(url, f"the answer ended after {n_read} of {total} bytes")


def _receive(url: str, response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_DOWNLOADED_AT_ONCE)
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, error) from error


def _unreachable(url: str, reason: object) -> SourceUnreachableError:
    return SourceUnreachableError(
        f"cannot fetch {url}: {reason}; connect to the network, or use a local file, or "
        "data.source.kind=pydocs, which needs none"
    )
