"""Where documents come from: each source is a stream of documents in a few parts.

    pydocs ──ast──▶ docstrings and manual pages ─────────┐
    files, text ──▶ pieces of files (see files.py) ──────┼──▶ parts ──▶ documents
    files, json csv parquet ─┐                           │
    hub ─────────────────────┴─ datasets (tables.py) ────┘

What the parts are depends on the source alone.  Memory holds one document, or 1 MiB of one, at a
time; reading can resume at any of them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

from minillama.config.run import FilesSource, PydocsSource, Source
from minillama.data.files import TextFiles, data_files, is_url, local_files
from minillama.data.split import Piece, Pieces, Place
from minillama.errors import DataError
from minillama.files import cache_folder, sha256_of_file, write_atomic

_ALWAYS_HASHED = 16 << 20  # bytes: larger files are hashed once and again after a change

# Installed packages, the tests of the standard library, and what the build machine decides.
_NO_PROSE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BUILD_FILE = "_sysconfigdata"


class DocumentStream(Protocol):
    """A source in parts; can be pickled."""

    @property
    def n_parts(self) -> int:
        """How many parts there are, counted from 0."""

    def read(self, part: int, place: Place = None) -> Pieces:
        """Yield the documents of ``part``, long ones in pieces, from ``place`` on."""


def open_source(source: Source) -> DocumentStream:
    """Open ``source``; errors in its content are raised when that is read.

    Raises:
        DataError: a file is missing, or the data set cannot be used.
        SourceUnreachableError: the source is on the network, which cannot be reached.
    """
    if isinstance(source, PydocsSource):
        return _Pydocs()
    if isinstance(source, FilesSource) and source.format == "text":
        return TextFiles(local_files(source))
    from minillama.data import tables  # importing datasets takes a second; most runs need not

    if isinstance(source, FilesSource):
        return tables.open_files(source)
    return tables.open_hub(source, source_hash(source)[:32])


def read_documents(source: Source) -> Iterator[str]:
    """Yield all documents of ``source`` that hold text, each as a whole.

    Raises:
        DataError: the source cannot be used or read, or holds no text.
        SourceUnreachableError: the source is on the network, which cannot be reached.
    """
    stream = open_source(source)
    parts: list[str] = []
    is_empty = True
    for part in range(stream.n_parts):
        for piece, _ in stream.read(part):
            parts.append(piece.text)
            if piece.ends:
                text = "".join(parts)
                parts = []
                if text.strip():
                    is_empty = False
                    yield text
    if is_empty:
        raise no_text(source)


def no_text(source: Source) -> DataError:
    """Return the error of a ``source`` without any text."""
    if isinstance(source, PydocsSource):
        return DataError("data.source.kind=pydocs: this Python's library has no docstrings")
    if isinstance(source, FilesSource):
        column = "" if source.format == "text" else f" in column {source.text_field!r}"
        return DataError(f"no text{column} in {', '.join(source.files)}", "data.source.files")
    return DataError(f"data set {source.path!r} holds no text in column {source.text_field!r}")


def source_hash(source: Source) -> str:
    """Return a SHA-256 (hex) that changes with the source's content, wherever its files are.

    Of a data set on the hub it covers the settings only: ``revision`` pins the content.  The same
    is true of the URL of a table.

    Raises:
        DataError: a file is missing or cannot be read.
        SourceUnreachableError: a text is at a URL that cannot be reached, and not in the cache.
    """
    if isinstance(source, PydocsSource):
        return _hash_files(source.kind, [str(path) for path in _standard_library()])
    if isinstance(source, FilesSource):
        if source.format == "text":
            return _hash_files("files text ", [str(path) for path in local_files(source)])
        return _hash_files(f"files {source.format} {source.text_field}", data_files(source))
    settings = source.model_dump(exclude={"streaming"})  # how it is read, not what is read
    if Path(source.path).exists():
        del settings["path"]
    local = sorted(str(path) for path in Path(source.path).rglob("*") if path.is_file())
    return _hash_files(json.dumps(settings, sort_keys=True), local)


def _hash_files(settings: str, names: list[str]) -> str:
    digest = hashlib.sha256(settings.encode())
    for name in names:
        try:
            digest.update(name.encode() if is_url(name) else _content_hash(Path(name)))
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror}") from error
    return digest.hexdigest()


def _content_hash(path: Path) -> bytes:
    """Return the SHA-256 of a file; that of a large one is kept in the cache until it changes."""
    stat = path.stat()
    if stat.st_size < _ALWAYS_HASHED:
        return bytes.fromhex(sha256_of_file(path))
    # The time of change, unlike that of modification, cannot be set back by a program.
    identity = [os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    kept = cache_folder() / "hashes" / name
    try:
        found = bytes.fromhex(kept.read_text(encoding="ascii"))
        if len(found) == hashlib.sha256().digest_size:
            return found
    except (OSError, ValueError):
        pass
    content = sha256_of_file(path)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(kept, content)
    return bytes.fromhex(content)


# --------------------------------------------------------------------------------------- pydocs


class _Pydocs:
    """English prose that ships with CPython, in one part."""

    n_parts = 1

    @cached_property
    def _texts(self) -> list[str]:
        texts = [*_topics(_library_root() / "pydoc_data" / "topics.py")]
        texts += [text for path in _standard_library() if (text := _docstrings(path))]
        # A docstring may spell out half a surrogate pair, which no UTF-8 text can hold.
        return [text.encode("utf-8", "replace").decode() for text in texts]

    def read(self, part: int, place: Place = None) -> Pieces:
        for number, text in enumerate(self._texts[place or 0 :], (place or 0) + 1):
            yield Piece(text), number.__int__


def _library_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _standard_library() -> list[Path]:
    root = _library_root()
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _NO_PROSE)
        paths += [
            Path(folder, name)
            for name in sorted(names)
            if name.endswith(".py") and not name.startswith(_BUILD_FILE)
        ]
    if not paths:
        raise DataError(
            f"this Python keeps no source of its standard library in {root}, which "
            "data.source.kind=pydocs reads; use data.source.kind=files with text of your own"
        )
    return paths


def _topics(path: Path) -> Iterator[str]:
    """Yield the pages of the language manual: the literal dict ``topics`` of the file."""
    tree = _parse(path) if path.is_file() else None
    for node in tree.body if tree else []:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            yield from (page for page in ast.literal_eval(node.value).values() if page.strip())


def _docstrings(path: Path) -> str:
    """Return the docstrings of a module, its classes and functions, in the order of the file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    holding_statements = (ast.stmt, ast.excepthandler, ast.match_case)
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            found.append(text)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, holding_statements):
                visit(child)

    if tree := _parse(path):
        visit(tree)
    return "\n\n".join(found)


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # files that are wrong on purpose
        return None
