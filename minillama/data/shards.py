"""Tokens in one or many files, read as one array.

    train-00000-00000.bin   part 0 of the source, shard 0          little-endian, nothing else
    train-00000-00001.bin
    train-00001-00000.bin   ...

Files are mapped into memory when something in them is read, and unmapped again, so that neither
the pages in use nor the open files grow with the data.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from minillama.errors import DataError
from minillama.files import sha256_of_file

# Linux maps up to 64 KiB around a page that is touched; an open map counts against a limit of
# files, often 1024, so that it is charged as if it were large.
_MOST_MAPPED = 64 << 20  # bytes
_COST_OF_A_MAP = 2 << 20
_COST_OF_A_READ = 64 << 10


class ShardFile(BaseModel):
    """One file: its name, its tokens, the UTF-8 bytes of their text and its sha256."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    tokens: int
    bytes: int
    sha256: str


def are_complete(folder: Path, files: Iterable[ShardFile], dtype: str) -> bool:
    """Return whether ``folder`` has all ``files``, each of its size."""
    width = np.dtype(dtype).itemsize
    try:
        return all((folder / f.file).stat().st_size == f.tokens * width for f in files)
    except OSError:
        return False


class TokenShards:
    """A read-only one-dimensional array of ids, any slice of which is read from its files.

    ``tokens[a:b]`` is a new array of the ids a to b − 1; ``tokens[i]`` is one id.  np.asarray reads
    all of them into memory.  Its pickle holds the names of the files only.

    Args:
        folder: where the files are.
        files: in order; none is empty.
        dtype: of the ids, little-endian on disk.
    """

    ndim = 1

    def __init__(self, folder: Path, files: Sequence[ShardFile], dtype: str) -> None:
        self.folder = folder
        self.files = tuple(files)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._ends = list(accumulate(shard.tokens for shard in self.files))
        self._maps: dict[int, NDArray[Any]] = {}
        self._mapped = 0  # bytes of the maps' pages, at most

    def __reduce__(self) -> tuple[type[TokenShards], tuple[Any, ...]]:
        return TokenShards, (self.folder, self.files, self.dtype.name)

    def __len__(self) -> int:
        return self._ends[-1] if self.files else 0

    @property
    def shape(self) -> tuple[int]:
        """The number of ids, in a tuple."""
        return (len(self),)

    @property
    def sha256(self) -> str:
        """The sha256 (hex) of the hashes of the files, in order; reads none of them."""
        hashes = "\n".join(shard.sha256 for shard in self.files)
        return hashlib.sha256(hashes.encode()).hexdigest()

    @overload
    def __getitem__(self, where: slice) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, where: int) -> Any: ...
    def __getitem__(self, where: int | slice) -> Any:
        """Return a slice of step 1, or one id.

        Raises:
            DataError: a file is missing, or shorter than its record says.
            IndexError: an id beyond the end, or a slice of another step.
        """
        if not isinstance(where, slice):
            index = range(len(self))[where]
            return self[index : index + 1][0]
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise IndexError(f"a slice of token shards has step 1, not {step}")
        parts = []
        shard = bisect_right(self._ends, start)
        while start < stop:
            end = self._ends[shard]
            first = end - self.files[shard].tokens
            parts.append(self._map(shard)[start - first : stop - first])
            self._mapped += max(_COST_OF_A_READ, parts[-1].nbytes)
            start, shard = end, shard + 1
        if len(parts) == 1:
            return parts[0].copy()
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("token shards are not an array in memory: a copy is needed")
        whole = self[:]
        return whole if dtype is None else whole.astype(dtype)

    def damaged(self) -> list[Path]:
        """Return the files whose content does not have the recorded SHA-256; reads all of them."""
        paths = [self.folder / shard.file for shard in self.files]
        return [
            path
            for path, shard in zip(paths, self.files, strict=True)
            if sha256_of_file(path) != shard.sha256
        ]

    def _map(self, shard: int) -> NDArray[Any]:
        if self._mapped > _MOST_MAPPED:
            self._maps.clear()
            self._mapped = 0
        if shard not in self._maps:
            path = self.folder / self.files[shard].file
            try:
                mapped = np.memmap(path, self.dtype, "r", shape=self.files[shard].tokens)
            except (OSError, ValueError) as error:
                raise DataError(
                    f"cannot read the token shard {path}: {error}; minillama data prepare writes "
                    "it again"
                ) from error
            self._maps[shard] = np.asarray(mapped)  # slices of a memmap are slow to make
            self._mapped += _COST_OF_A_MAP
        return self._maps[shard]


Tokens = NDArray[Any] | TokenShards
"""One-dimensional ids: an array, a memory map or shards; all have ``len``, ``dtype``, ``[a:b]``."""
