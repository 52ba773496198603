"""A GGUF file as data: its metadata and where its tensors lie, every number of it distrusted.

    "GGUF"  version  n_tensors  n_entries
    entries:  key  type  value                 a string is its length and its bytes,
    tensors:  name  n_dims  dims  type  offset an array its type, its length and its items
    padding, then the tensors' bytes

Format: docs/gguf.md in the ggml repository.  A count or length is believed only as far as the file
reaches, so that a header that lies ends in an error and not in a full memory.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from minillama.errors import CheckpointError

_MAX_ITEMS = 1 << 22
"""Most items of an array; a vocabulary is the longest one."""

_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9

TYPES = {
    int(kind): kind
    for kind in (
        gguf.GGMLQuantizationType.F32,
        gguf.GGMLQuantizationType.F16,
        gguf.GGMLQuantizationType.BF16,
        gguf.GGMLQuantizationType.Q8_0,
    )
}
"""The types of tensors that can be read."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies; ``shape`` is numpy's, outermost first."""

    shape: tuple[int, ...]
    kind: int
    start: int
    """of its bytes in the file"""


@dataclass(frozen=True)
class GGUFFile:
    """The header of a file: metadata by key, tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor in float32."""
        info = self.tensors[name]
        rows, row_bytes = _rows(info)
        with self.path.open("rb") as file:
            file.seek(info.start)
            raw = np.frombuffer(file.read(rows * row_bytes), np.uint8).reshape(rows, row_bytes)
        with np.errstate(all="ignore"):  # a scale may be no number: it is the file's own
            floats: npt.NDArray[np.float32] = gguf.quants.dequantize(raw, TYPES[info.kind])
        return floats.reshape(info.shape).astype(np.float32, copy=False)


class _Cursor:
    """Reads numbers and strings one after the other, never beyond the end."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self.data) - self.at:
            raise LyingHeaderError("a length reaches beyond the end of the file")
        self.at += size
        return self.data[self.at - size : self.at].tobytes()

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """Read how many there are of things of at least ``least_bytes`` each."""
        count = int(self.number("Q"))
        if count > _MAX_ITEMS or count * least_bytes > len(self.data) - self.at:
            raise LyingHeaderError(f"it cannot hold {count} {what}")
        return count

    def string(self) -> str:
        return self.take(int(self.number("Q"))).decode()

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise LyingHeaderError(f"there is no type {kind}")
        inner = int(self.number("I"))
        if inner in _NUMBERS:
            code = _NUMBERS[inner]
            count = self.count("items of an array", struct.calcsize(f"<{code}"))
            return list(
                struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}")))
            )
        if inner != _STRING:
            raise LyingHeaderError(f"there are no arrays of type {inner}")
        return [self.string() for _ in range(self.count("strings", 8))]


class LyingHeaderError(ValueError):
    """The header says what cannot be so."""


def read_header(path: Path) -> GGUFFile:
    """Read all but the tensors themselves.

    Raises:
        CheckpointError: it is no GGUF file, it is truncated, it is of a version or byte order that
            is not supported, or a tensor has a type that cannot be read.
    """
    try:
        data = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    try:
        return _parse(path, _Cursor(data), len(data))
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{path} is damaged, or no GGUF file: {error}") from None


def _parse(path: Path, cursor: _Cursor, size: int) -> GGUFFile:
    if cursor.take(4) != b"GGUF":
        raise LyingHeaderError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise LyingHeaderError(f"it is of version {version}; 2 and 3 can be read")
    n_tensors = cursor.count("tensors", 24)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("entries", 13)):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    infos: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        name = cursor.string()
        n_dims = cursor.number("I")
        if not 1 <= n_dims <= 4 or name in infos:
            raise LyingHeaderError(
                f"the tensor {name!r} has {n_dims} dimensions, or is there twice"
            )
        dims = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims))
        kind = cursor.number("I")
        infos[name] = TensorInfo(tuple(reversed(dims)), kind, int(cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
        raise LyingHeaderError(f"general.alignment is {alignment}")
    begin = -(-cursor.at // alignment) * alignment
    tensors = {
        name: TensorInfo(info.shape, info.kind, begin + info.start) for name, info in infos.items()
    }
    for name, info in tensors.items():
        if info.kind not in TYPES:
            kind = gguf.GGMLQuantizationType(info.kind).name  # a ValueError if there is none
            raise LyingHeaderError(
                f"{name} is of type {kind}; only {', '.join(k.name for k in TYPES.values())} "
                "can be read"
            )
        if math.prod(_rows(info)) > size - info.start:
            raise LyingHeaderError(f"{name} reaches beyond the end of the file")
    return GGUFFile(path, metadata, tensors)


def _rows(info: TensorInfo) -> tuple[int, int]:
    """Return the number of rows and the bytes of each."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[TYPES[info.kind]]
    *outer, inner = info.shape
    if inner % block:
        raise LyingHeaderError(f"a row of {inner} is no whole number of blocks of {block}")
    return math.prod(outer), inner // block * block_bytes
