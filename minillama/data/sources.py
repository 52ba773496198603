"""Where documents come from.

    pydocs ──ast──▶ docstrings and manual pages ──┐
    files, text ──read──▶ one document a file ────┼──▶ Documents: len, [i], sizes, source_hash
    files, json csv parquet ─┐                    │
    hub ─────────────────────┴─ datasets, Arrow ──┘    (see tables.py)

Documents are read when they are asked for, so that memory holds one at a time.  None is empty.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minillama.config.run import FilesSource, PydocsSource, Source
from minillama.data.files import local_files, read_text
from minillama.errors import DataError

_LOGGER = logging.getLogger("minillama")
_READ_AT_ONCE = 1 << 20  # bytes

# Installed packages, the tests of the standard library, and what the build machine decides.
_NO_PROSE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BUILD_FILE = "_sysconfigdata"


class Documents:
    """A sequence of texts, each read by ``read(i)`` when it is asked for.

    Args:
        source_hash: names the content; equal hashes mean equal documents.
        sizes: of each document, in UTF-8 bytes.
        read: returns document i, for i from 0.
    """

    def __init__(
        self, source_hash: str, sizes: NDArray[np.int64], read: Callable[[int], str]
    ) -> None:
        self.source_hash = source_hash
        self.sizes = sizes
        self._read = read

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> str:
        return self._read(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        return map(self._read, range(len(self)))


def open_documents(source: Source) -> Documents:
    """Open ``source``, checking all of it.

    Raises:
        DataError: a file is missing or not UTF-8, the column is missing or holds no text, there is
            no text at all, or the data set cannot be used.
        SourceUnreachableError: the source is on the network, which is not there.
    """
    if isinstance(source, PydocsSource):
        return _open_pydocs(source)
    if isinstance(source, FilesSource) and source.format == "text":
        return _open_text_files(source)
    # `datasets` takes a second to import, and most runs find their tokens prepared.
    tables = importlib.import_module("minillama.data.tables")
    name = source_hash(source)
    if isinstance(source, FilesSource):
        return Documents(name, *tables.open_files(source, local_files(source), name))
    return Documents(name, *tables.open_hub(source, name))


def source_hash(source: Source) -> str:
    """Return a sha256 (hex) that changes with the source's content, without parsing it.

    Of a data set on the hub it covers the settings only: ``revision`` pins the content.

    Raises:
        DataError: a file is missing or cannot be read.
        SourceUnreachableError: a file is a URL that cannot be reached, and is not in the cache.
    """
    if isinstance(source, PydocsSource):
        return _hash_of_files(source.kind, _standard_library())
    if isinstance(source, FilesSource):
        column = "" if source.format == "text" else source.text_field
        return _hash_of_files(f"{source.kind} {source.format} {column}", local_files(source))
    settings = source.model_dump(exclude={"streaming"})  # how it is read, not what is read
    local = sorted(path for path in Path(source.path).rglob("*") if path.is_file())
    return _hash_of_files(json.dumps(settings, sort_keys=True), local)


def _hash_of_files(what: str, paths: list[Path]) -> str:
    digest = hashlib.sha256(what.encode())
    for path in paths:
        content = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while block := file.read(_READ_AT_ONCE):
                    content.update(block)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        digest.update(content.digest())
    return digest.hexdigest()


# ----------------------------------------------------------------------------------- text files


def _open_text_files(source: FilesSource) -> Documents:
    paths, sizes = [], []
    for path in local_files(source):
        text = read_text(path)
        if text.strip():
            paths.append(path)
            sizes.append(len(text.encode()))
        else:
            _LOGGER.warning("%s holds no text and is skipped", path)
    if not paths:
        raise DataError(f"data.source.files: no text in {', '.join(source.files)}; add some")
    return Documents(source_hash(source), np.array(sizes), lambda i: read_text(paths[i]))


# --------------------------------------------------------------------------------------- pydocs


def _open_pydocs(source: PydocsSource) -> Documents:
    root = _library_root()
    texts = [*_topics(root / "pydoc_data" / "topics.py")]
    texts += [text for path in _standard_library() if (text := _docstrings(path))]
    # A docstring may spell out half a surrogate pair, which no UTF-8 text can hold.
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    sizes = np.array([len(text.encode()) for text in texts])
    return Documents(source_hash(source), sizes, texts.__getitem__)


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
    tree = _parsed(path) if path.is_file() else None
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

    if tree := _parsed(path):
        visit(tree)
    return "\n\n".join(found)


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # files that are wrong on purpose
        return None
