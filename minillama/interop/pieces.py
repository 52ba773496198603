"""A sentencepiece model file as data: its pieces with scores and types, and what its encoder does.

The file is a protocol buffer (sentencepiece_model.proto in Google's repository).  sentencepiece
itself shows only part of what is in it, and the protobuf package is not among what we depend on,
so the few fields that matter are read and written here:

    ModelProto      1 pieces (repeated), 2 trainer_spec, 3 normalizer_spec
    SentencePiece   1 piece, 2 score (float), 3 type
    TrainerSpec     3 model_type, 4 vocab_size, 24 treat_whitespace_as_suffix, 35 byte_fallback,
                    40 unk_id, 41 bos_id, 42 eos_id, 43 pad_id
    NormalizerSpec  1 name, 2 precompiled_charsmap, 3 add_dummy_prefix,
                    4 remove_extra_whitespaces, 5 escape_whitespaces
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from minillama.errors import TokenizerError

SPACE = "▁"
"""How a piece writes a space."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # the wire types
_BPE = 2


class Kind(IntEnum):
    """The type of a piece; llama.cpp numbers them alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """What stands behind one id."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True)
class PieceModel:
    """What decides the ids of a text: the pieces in order of their ids, and the settings."""

    pieces: tuple[Piece, ...]
    bpe: bool = True
    byte_fallback: bool = True
    has_normalizer: bool = False
    add_dummy_prefix: bool = False
    remove_extra_whitespaces: bool = False
    escape_whitespaces: bool = True
    whitespace_as_suffix: bool = False

    def oddities(self) -> list[str]:
        """Return what keeps other programs' Llama tokenizer from giving the same ids."""
        kinds = {piece.kind for piece in self.pieces}
        texts = [piece.text for piece in self.pieces]
        found = {
            "it is no BPE model": not self.bpe,
            "it has no byte fallback": not self.byte_fallback or Kind.BYTE not in kinds,
            "it normalises text": self.has_normalizer,
            "it removes extra spaces": self.remove_extra_whitespaces,
            "it keeps spaces as they are": not self.escape_whitespaces,
            "it puts the space behind the word": self.whitespace_as_suffix,
            "it has user-defined pieces": Kind.USER_DEFINED in kinds,
            "it has unused pieces": Kind.UNUSED in kinds,
            "it has a piece twice": len(set(texts)) < len(texts),
        }
        return [what for what, is_so in found.items() if is_so]


def read_pieces(model: bytes) -> PieceModel:
    """Read a sentencepiece model file.

    Raises:
        TokenizerError: it is no such file.
    """
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    try:
        for number, value in _fields(model):
            if number == 1 and isinstance(value, bytes):
                fields = dict(_fields(value))
                text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
                assert isinstance(text, bytes)
                assert isinstance(score, bytes)
                kind = Kind(int(fields.get(3, Kind.NORMAL)))
                pieces.append(Piece(text.decode(), struct.unpack("<f", score)[0], kind))
            elif number in (2, 3) and isinstance(value, bytes):
                # A message that stands there twice is merged, as protocol buffers have it.
                (trainer if number == 2 else normalizer).update(_fields(value))
    except (IndexError, ValueError, AssertionError, struct.error):
        raise TokenizerError("not a sentencepiece model") from None
    return PieceModel(
        tuple(pieces),
        bpe=trainer.get(3, 1) == _BPE,
        byte_fallback=bool(trainer.get(35, 0)),
        whitespace_as_suffix=bool(trainer.get(24, 0)),
        has_normalizer=bool(normalizer.get(2, b"")),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        escape_whitespaces=bool(normalizer.get(5, 1)),
    )


def write_pieces(
    pieces: Sequence[Piece], ids: tuple[int, int, int], *, add_dummy_prefix: bool
) -> bytes:
    """Write a BPE model file with byte fallback that leaves the text as it is.

    ``ids`` are those of unk, bos and eos.
    """
    messages = [
        _field(
            1,
            _field(1, piece.text.encode())
            + bytes([2 << 3 | _FIXED32])
            + struct.pack("<f", piece.score)
            + _field(3, int(piece.kind)),
        )
        for piece in pieces
    ]
    trainer = _field(3, _BPE) + _field(4, len(pieces)) + _field(35, 1)
    trainer += b"".join(_field(40 + i, number) for i, number in enumerate(ids)) + _field(43, -1)
    normalizer = _field(1, b"identity") + _field(3, int(add_dummy_prefix)) + _field(4, 0)
    return b"".join([*messages, _field(2, trainer), _field(3, normalizer)])


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field: an int of a varint, else the bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            size, at = _varint(message, at)
        else:
            size = {_FIXED32: 4, _FIXED64: 8}.get(wire, -1)
        if not 0 <= size <= len(message) - at:
            raise ValueError("a field reaches beyond its message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the varint at ``at``, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a varint is too long")


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return _to_varint(number << 3 | _BYTES) + _to_varint(len(value)) + value
    return _to_varint(number << 3 | _VARINT) + _to_varint(value % (1 << 64))


def _to_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
