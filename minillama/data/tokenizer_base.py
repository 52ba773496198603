"""What all tokenizers share: the checks of arguments, and bos and eos around a text."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

from minillama.errors import TokenizerError


class Tokenizer(ABC):
    """Text to ids and back; can be pickled.

    Attributes:
        kind: the ``tokenizer.kind`` of a config.
        vocab_size: how many ids there are.
        unk_id: the id of unknown text.
        bos_id: the id that begins a document or a prompt.
        eos_id: the id that ends a document.
        sha256: the sha256 (hex) of all that decides which ids a text gets.
    """

    kind: str
    vocab_size: int
    unk_id: int
    bos_id: int
    eos_id: int
    sha256: str

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the ids of ``text``, between bos and eos if asked for.

        Raises:
            TokenizerError: ``text`` is not a string, or it has a lone surrogate.
        """
        ids = [self.bos_id] if bos else []
        for part in self.encode_parts(text):
            ids += part
        return [*ids, self.eos_id] if eos else ids

    @abstractmethod
    def encode_parts(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of ``text`` in lists of bounded length, for texts of any size."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids`` without special ones; invalid UTF-8 becomes U+FFFD.

        Raises:
            TokenizerError: ``ids`` are not integers, or one is out of range.
        """
        try:
            numbers = None if isinstance(ids, str) else [operator.index(i) for i in ids]
        except TypeError:
            numbers = None
        if numbers is None:
            raise TokenizerError(f"decode takes a list of integer ids, not {ids!r:.80}")
        for i in numbers:
            if not 0 <= i < self.vocab_size:
                raise TokenizerError(
                    f"id {i} is out of range; this tokenizer has ids 0 to {self.vocab_size - 1}"
                )
        return self._decode(numbers)

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of ``ids``, all of which are in the vocabulary."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write what ``load_tokenizer`` needs to the file ``path``; a byte tokenizer needs none."""


def check_text(text: str) -> None:
    """Refuse what is not text.

    Raises:
        TokenizerError: ``text`` is not a string, or it has a lone surrogate.
    """
    if not isinstance(text, str):
        raise TokenizerError(f"the text must be a string, not {type(text).__name__}: {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text has a lone surrogate, {text[error.start]!a}, at character {error.start}; "
            "that is not Unicode text: remove it, or read the text as UTF-8"
        ) from None
