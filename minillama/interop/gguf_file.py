"""The header of a GGUF file: its metadata, and where its tensors are.

    "GGUF"  version  n_tensors  n_entries
    entries:  key  type  value                 a string is its length and its bytes,
    tensors:  name  n_dims  dims  type  offset an array its type, its length and its items
    padding, then the tensors' bytes

Format: docs/gguf.md in the ggml repository.  The file may come from a stranger: a count or a length
is believed only as far as the file reaches, so that a false header ends in an error and not in a
full memory.

Why not ``gguf.GGUFReader`` (tried with gguf 0.19.0, 2026-12-03): lengths of arrays are inside the
header, so no check of the counts at its start bounds them.  A file of 113 bytes that claims an
array of 2⁶⁰ numbers took 3 GB of memory within 32 s, since the reader continues past the end of the
file; an honest array of four million bytes took more than 60 s, since each item becomes a numpy
object.  Neither takes a second here.
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
"""The longest array; a vocabulary is the longest in practice."""

_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""``struct``'s format of each of GGUF's types of numbers."""

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
    """Where a tensor is; ``shape`` is numpy's, outermost first."""

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
        with np.errstate(all="ignore"):  # the file may hold a scale that is not finite
            floats: npt.NDArray[np.float32] = gguf.quants.dequantize(raw, TYPES[info.kind])
        return floats.reshape(info.shape).astype(np.float32, copy=False)


class _FalseHeaderError(ValueError):
    """The header contradicts itself or the file's size."""


class _Cursor:
    """Reads values one after the other, never beyond the end."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data, self.position = data, 0

    def take(self, size: int) -> bytes:
        start = self.position
        if not 0 <= size <= len(self.data) - start:
            raise _FalseHeaderError("a length reaches beyond the end of the file")
        self.position += size
        return self.data[start : self.position].tobytes()

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def number(self, code: str) -> Any:
        return self.unpack(code)[0]

    def count(self, what: str, least_bytes: int) -> int:
        """Read how many things of at least ``least_bytes`` each follow."""
        count = int(self.number("Q"))
        if count > _MAX_ITEMS or count * least_bytes > len(self.data) - self.position:
            raise _FalseHeaderError(f"it cannot hold {count} {what}")
        return count

    def string(self) -> str:
        return self.take(int(self.number("Q"))).decode()

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise _FalseHeaderError(f"there is no type {kind}")
        inner = int(self.number("I"))
        if inner == _STRING:
            return [self.string() for _ in range(self.count("strings", 8))]
        if inner not in _NUMBERS:
            raise _FalseHeaderError(f"arrays of type {inner} are not supported")
        code = _NUMBERS[inner]
        return list(self.unpack(code, self.count("items of an array", struct.calcsize(code))))


def read_header(path: Path) -> GGUFFile:
    """Read all but the tensors themselves.

    Raises:
        CheckpointError: it is no GGUF file, it is truncated, its version or byte order is not
            supported, or a tensor has a type that cannot be read.
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
        raise _FalseHeaderError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise _FalseHeaderError(f"its version {version} is not supported; 2 and 3 are")
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
            raise _FalseHeaderError(f"tensor {name!r} has {n_dims} dimensions, or is there twice")
        dims = cursor.unpack("Q", n_dims)
        kind = cursor.number("I")
        infos[name] = TensorInfo(dims[::-1], kind, int(cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
        raise _FalseHeaderError(f"general.alignment is {alignment}")
    begin = -(-cursor.position // alignment) * alignment
    tensors = {
        name: TensorInfo(info.shape, info.kind, begin + info.start) for name, info in infos.items()
    }
    for name, info in tensors.items():
        if info.kind not in TYPES:
            kind = gguf.GGMLQuantizationType(info.kind).name  # a ValueError if there is none
            raise _FalseHeaderError(
                f"{name} is of type {kind}; only {', '.join(k.name for k in TYPES.values())} "
                "can be read"
            )
        if math.prod(_rows(info)) > size - info.start:
            raise _FalseHeaderError(f"{name} reaches beyond the end of the file")
    return GGUFFile(path, metadata, tensors)


def _rows(info: TensorInfo) -> tuple[int, int]:
    """Return the number of rows and the bytes of each."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[TYPES[info.kind]]
    *outer, inner = info.shape
    if inner % block:
        raise _FalseHeaderError(f"a row of {inner} is not a whole number of blocks of {block}")
    return math.prod(outer), inner // block * block_bytes
