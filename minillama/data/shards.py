"""Tokens in many files, read as one array.

    index.json   {"dtype": "uint16", "train": [{file, tokens, bytes, sha256}, ...], "val": [...]}
    train-00000-00000.bin   part 0 of the source, shard 0          little-endian, nothing else
    train-00000-00001.bin
    train-00001-00000.bin   ...

Files are mapped into memory when something in them is asked for, and let go again, so that neither
the pages in use nor the open files grow with the data.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from minillama.errors import DataError

INDEX = "index.json"

# Linux maps up to 64 KiB around a page that is touched; an open map counts against a limit of
# files, often 1024, so that it is charged as if it were large.
_MOST_MAPPED = 64 << 20  # bytes
_COST_OF_A_MAP = 2 << 20
_COST_OF_A_READ = 64 << 10
_HASHED_AT_ONCE = 1 << 20


class ShardFile(BaseModel):
    """One file: its name, its tokens, the UTF-8 bytes of their text and its sha256."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    tokens: int
    bytes: int
    sha256: str


class ShardIndex(BaseModel):
    """All files of both splits, each in the order in which they are read; none is empty."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["uint16", "uint32"]
    train: tuple[ShardFile, ...]
    val: tuple[ShardFile, ...]

    @property
    def sha256(self) -> str:
        """The sha256 (hex) of all that it says."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def is_whole(self, folder: Path) -> bool:
        """Tell whether ``folder`` has all files, each of its size."""
        width = np.dtype(self.dtype).itemsize
        try:
            return all(
                (folder / shard.file).stat().st_size == shard.tokens * width
                for shard in (*self.train, *self.val)
            )
        except OSError:
            return False


class TokenShards:
    """A one-dimensional array of ids, read-only, of which any slice is read from its files.

    ``tokens[a:b]`` is a new array of the ids a to b − 1; ``tokens[i]`` is one id.  np.asarray makes
    an array of the whole, in memory.  It may be pickled, and then names its files only.

    Args:
        folder: where the files are.
        files: in order.
        dtype: of the ids, little-endian on disk.
    """

    ndim = 1

    def __init__(self, folder: Path, files: Sequence[ShardFile], dtype: str) -> None:
        self.folder = folder
        self.files = tuple(files)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._ends = list(accumulate(shard.tokens for shard in self.files))
        self._maps: dict[int, NDArray[Any]] = {}
        self._mapped = 0  # bytes, at most, of the pages of the maps

    def __reduce__(self) -> tuple[type[TokenShards], tuple[Any, ...]]:
        return TokenShards, (self.folder, self.files, self.dtype.name)

    def __len__(self) -> int:
        return self._ends[-1] if self.files else 0

    @property
    def shape(self) -> tuple[int]:
        """How many ids there are."""
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
            DataError: a file has gone, or is shorter than the index says.
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
            raise ValueError("token shards are no array in memory: a copy is needed")
        whole = self[:]
        return whole if dtype is None else whole.astype(dtype)

    def damaged(self) -> list[Path]:
        """Return the files whose content has another sha256 than the index says; reads all."""
        paths = [self.folder / shard.file for shard in self.files]
        return [
            path
            for path, shard in zip(paths, self.files, strict=True)
            if sha256_of(path) != shard.sha256
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
                    f"cannot read the token shard {path}: {error}; minillama data prepare makes "
                    "it again"
                ) from error
            self._maps[shard] = np.asarray(mapped)  # slices of a memmap are slow to make
            self._mapped += _COST_OF_A_MAP
        return self._maps[shard]


def sha256_of(*paths: Path) -> str:
    """Return the sha256 (hex) of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(_HASHED_AT_ONCE):
                digest.update(block)
    return digest.hexdigest()


Tokens = NDArray[Any] | TokenShards
"""One-dimensional ids: an array, a memory map or shards; all have ``len``, ``dtype``, ``[a:b]``."""
