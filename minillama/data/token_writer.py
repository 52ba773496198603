"""Text to a file of tokens."""

from __future__ import annotations

import hashlib
from typing import Any, BinaryIO

import numpy as np

from minillama.data.files import Piece
from minillama.data.tokenizer import Tokenizer


class TokenWriter:
    """Writes ``[bos] tokens [eos]`` of one piece after the other.

    Attributes:
        n_tokens: written so far.
        n_bytes: the UTF-8 bytes of their text.
        digest: the sha256 of what was written, after what the one that was given has seen.
    """

    def __init__(
        self, file: BinaryIO, tokenizer: Tokenizer, dtype: np.dtype[Any], digest: Any = None
    ) -> None:
        self._file, self._tokenizer, self._dtype = file, tokenizer, dtype
        self.digest = hashlib.sha256() if digest is None else digest
        self.n_tokens = self.n_bytes = 0

    def add(self, piece: Piece) -> int:
        """Write a piece, a part of bounded length at a time; return the bytes of its text."""
        bos = [self._tokenizer.bos_id] if piece.begins else []
        eos = [self._tokenizer.eos_id] if piece.ends else []
        for ids in (bos, *self._tokenizer.encode_parts(piece.text), eos):
            data = np.array(ids, self._dtype).tobytes()
            self._file.write(data)
            self.digest.update(data)
            self.n_tokens += len(ids)
        size = len(piece.text.encode())
        self.n_bytes += size
        return size
