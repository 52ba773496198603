"""The user's own files: finding them and reading UTF-8."""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from minillama.config.run import FilesSource
from minillama.data.download import download
from minillama.errors import DataError

_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_READ_AT_ONCE = 1 << 20  # bytes


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one that stands apart from the rest."""

    text: str
    begins: bool = True
    ends: bool = True


def local_files(source: FilesSource) -> list[Path]:
    """Return the files of ``source`` in order, patterns expanded and URLs downloaded.

    Raises:
        DataError: a file is missing, or a pattern matches none.
        SourceUnreachableError: a URL cannot be reached, and is not in the cache.
    """
    return [Path(download(name) if is_url(name) else name) for name in data_files(source)]


def data_files(source: FilesSource) -> list[str]:
    """Return the files of ``source`` in order, patterns expanded and URLs as they are.

    Raises:
        DataError: a file is missing, or a pattern matches none.
    """
    found: dict[str, None] = {}  # a file that two patterns match counts once
    for name in source.files:
        matches = [name] if is_url(name) else map(str, _matching(Path(name).expanduser()))
        found |= dict.fromkeys(matches)
    return list(found)


def is_url(name: str) -> bool:
    """Tell a URL from the path of a file."""
    return name.startswith(("http://", "https://"))


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, without a byte order mark, with ``\\n`` as its line ends.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error.start, data) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def check_utf8(path: Path) -> None:
    """Check a file of any size without holding it in memory.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0  # of the first byte that the decoder has not seen through
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(_READ_AT_ONCE)
                decoder.decode(block, final=not block)
                if not block:
                    return
                offset = file.tell() - len(decoder.getstate()[0])
    except UnicodeDecodeError as error:
        raise _not_utf8(path, offset + error.start, error.object[error.start :]) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def read_piece(path: Path, number: int, size: int) -> Piece:
    """Return piece ``number`` of a UTF-8 file that is cut into pieces of about ``size`` bytes.

    A piece ends after the first line end at or beyond a multiple of ``size``; where the next
    ``size`` bytes have none, at that multiple itself, or at the next character.  The pieces make up
    what :func:`read_text` returns; the last may be empty, and the one before it then ends the file.
    ``size`` is at least 4, the bytes of a character.

    Raises:
        DataError: the file cannot be read, or is not UTF-8 here.
    """
    try:
        with path.open("rb") as file:
            start, end = (_border(file, at * size, size) for at in (number, number + 1))
            file.seek(start)
            data = file.read(end - start)
            ends = end >= os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, start + error.start, data) from None
    text = (text if start else text.removeprefix("\ufeff")).replace("\r\n", "\n")
    return Piece(text, begins=number == 0, ends=ends)


def _border(file: BinaryIO, offset: int, reach: int) -> int:
    if not offset:
        return 0
    file.seek(offset)
    data = file.read(reach)
    line = data.find(b"\n") + 1
    if line:
        return offset + line
    inside = [byte & 0xC0 == 0x80 for byte in data[:3]]  # of a character that began before
    return offset + (inside.index(False) if False in inside else len(inside))


def _not_utf8(path: Path, offset: int, data: bytes) -> DataError:
    looks = "; it looks like UTF-16" if offset == 0 and data.startswith(_UTF16_BOMS) else ""
    return DataError(
        f"{path} is not UTF-8 at byte {offset}{looks}; save it as UTF-8, e.g. with "
        "iconv -f ENCODING -t UTF-8"
    )


def _matching(path: Path) -> list[Path]:
    if path.is_file():
        return [path.absolute()]
    if path.is_dir():
        raise DataError(
            f"data.source.files: {path} is a folder; name its files, as in {path}/*.txt"
        )
    matches: list[Path] = []
    if any(sign in str(path) for sign in "*?["):
        root = Path(path.anchor or Path.cwd())
        pattern = str(path.relative_to(path.anchor))
        matches = sorted(match for match in root.glob(pattern) if match.is_file())
    if not matches:
        raise DataError(f"data.source.files: no such file: {path} (seen from {Path.cwd()})")
    return matches
