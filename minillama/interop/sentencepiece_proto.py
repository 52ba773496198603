"""sentencepiece model files as protocol buffers: their pieces, and what their encoder does.

sentencepiece's Python class shows only part of what is in a file, so files are read and written
with the message classes that it ships, and the protobuf package.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from minillama.errors import MinillamaError, TokenizerError

try:
    from sentencepiece import sentencepiece_model_pb2
except Exception as error:  # protobuf's own VersionError, or a TypeError before it had one
    raise MinillamaError(
        "sentencepiece's protocol buffers cannot be loaded; upgrade both: "
        f"pip install -U sentencepiece protobuf ({error})"
    ) from None

_proto: Any = sentencepiece_model_pb2

SPACE = "▁"
"""How a piece writes a space."""


class Kind(IntEnum):
    """The type of a piece; llama.cpp uses the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """The piece of one id."""

    text: str
    score: float
    kind: Kind


class PieceModel(NamedTuple):
    """What decides the ids of a text: the pieces in order of their ids, and the settings."""

    pieces: tuple[Piece, ...]
    trainer: Any
    """TrainerSpec of sentencepiece_model.proto"""
    normalizer: Any
    """NormalizerSpec of sentencepiece_model.proto"""

    @property
    def add_dummy_prefix(self) -> bool:
        """Whether a space is put in front of each text."""
        return bool(self.normalizer.add_dummy_prefix)

    def obstacles(self) -> list[str]:
        """Return what keeps other programs' Llama tokenizer from giving the same ids."""
        kinds = {piece.kind for piece in self.pieces}
        texts = [piece.text for piece in self.pieces]
        is_bpe = self.trainer.model_type == self.trainer.BPE
        found = {
            "it is no BPE model": not is_bpe,
            "it has no byte fallback": not self.trainer.byte_fallback or Kind.BYTE not in kinds,
            "it normalises text": bool(self.normalizer.precompiled_charsmap),
            "it removes extra spaces": self.normalizer.remove_extra_whitespaces,
            "it keeps spaces as they are": not self.normalizer.escape_whitespaces,
            "it puts the space after the word": self.trainer.treat_whitespace_as_suffix,
            "it has user-defined pieces": Kind.USER_DEFINED in kinds,
            "it has unused pieces": Kind.UNUSED in kinds,
            "it has the same piece twice": len(set(texts)) < len(texts),
        }
        return [what for what, is_so in found.items() if is_so]


def read_pieces(content: bytes) -> PieceModel:
    """Read a sentencepiece model file.

    Raises:
        TokenizerError: it is not one.
    """
    model = _proto.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError:
        raise TokenizerError("not a sentencepiece model") from None
    pieces = tuple(Piece(p.piece, p.score, Kind(p.type)) for p in model.pieces)
    if not all(isinstance(piece.text, str) for piece in pieces):  # bytes where not UTF-8
        raise TokenizerError("not a sentencepiece model: a piece is not UTF-8")
    return PieceModel(pieces, model.trainer_spec, model.normalizer_spec)


def write_pieces(
    pieces: Iterable[Piece], ids: tuple[int, int, int], *, add_dummy_prefix: bool
) -> bytes:
    """Write a BPE model file with byte fallback that does not normalise text.

    ``ids`` are those of unk, bos and eos.
    """
    model = _proto.ModelProto()
    for piece in pieces:
        model.pieces.add(piece=piece.text, score=piece.score, type=int(piece.kind))
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.vocab_size = trainer.BPE, len(model.pieces)
    trainer.byte_fallback = True
    trainer.unk_id, trainer.bos_id, trainer.eos_id = ids
    trainer.pad_id = -1
    normalizer.name, normalizer.precompiled_charsmap = "identity", b""
    normalizer.add_dummy_prefix = add_dummy_prefix
    normalizer.remove_extra_whitespaces = False
    content: bytes = model.SerializeToString()
    return content
