"""The user's own files: finding them and reading UTF-8."""

from __future__ import annotations

import codecs
from pathlib import Path

from minillama.config import FilesSource
from minillama.data.download import download
from minillama.errors import DataError

_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_READ_AT_ONCE = 1 << 20  # bytes


def local_files(source: FilesSource) -> list[Path]:
    """Return the files of ``source`` in order, patterns expanded and URLs downloaded.

    Raises:
        DataError: a file is missing, or a pattern matches none.
        SourceUnreachableError: a URL cannot be reached, and is not in the cache.
    """
    found: dict[Path, None] = {}  # a file that two patterns match counts once
    for name in source.files:
        if name.startswith(("http://", "https://")):
            found[download(name)] = None
        else:
            found |= dict.fromkeys(_matching(Path(name).expanduser()))
    return list(found)


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
