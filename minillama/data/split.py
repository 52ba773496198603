"""The split: which text is held out for validation.

    documents ─▶ blocks of 16 MiB ─▶ shuffled within each ─▶ train ................ | val
                                                                the last val_fraction ┘

A document that the border falls into is cut there: its head ends the training text without an eos,
its tail begins the held-out text without a bos.  A document longer than a block is cut at the
block's end and continues in the next, so that each block of it has held-out text.
Nothing else decides the split: neither the number of files and processes nor the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

_BLOCK_BYTES = 16 << 20
_CUT_CHARS = 4096  # how far the border moves, at most, to the end of a line or of a word

Place = Any
"""Where to resume reading a part of a source; JSON can hold it."""


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one that is read separately.

    Attributes:
        text: of the piece.
        begins, ends: whether the document begins and ends with it.
    """

    text: str
    begins: bool = True
    ends: bool = True


Pieces = Iterator[tuple[Piece, Callable[[], Place]]]
"""Pieces, each with a function that returns the place after it, until the next is read."""


class Block(NamedTuple):
    """Consecutive documents of a part, which are split together.

    Attributes:
        pieces: one for each document; only the first and the last may be parts of one.
        n_blank: how many documents held no text and were left out.
        place: where the block begins.
    """

    pieces: list[Piece]
    n_blank: int
    place: Place


def read_blocks(pieces: Pieces, place: Place, block_bytes: int = _BLOCK_BYTES) -> Iterator[Block]:
    """Group pieces into blocks of at least ``block_bytes``, except the last.

    Args:
        pieces: the rest of a part, from ``place`` on.
        place: where the first block begins.
        block_bytes: a block ends with the piece that reaches this size.
    """
    texts: list[list[str]] = []  # of each document, in pieces
    begins = ends = True
    n_blank = size = 0

    def block() -> Block:
        last = len(texts) - 1
        joined = [
            Piece("".join(parts), number > 0 or begins, number < last or ends)
            for number, parts in enumerate(texts)
        ]
        return Block(joined, n_blank, place)

    for piece, place_after in pieces:
        if piece.begins and piece.ends and not piece.text.strip():
            n_blank += 1
            continue
        if not texts:
            begins = piece.begins
        if piece.begins or not texts:
            texts.append([])
        texts[-1].append(piece.text)
        ends = piece.ends
        size += len(piece.text.encode())
        if size >= block_bytes:
            yield block()
            texts, n_blank, size, place = [], 0, 0, place_after()
    if texts or n_blank:
        yield block()


def split_block(
    pieces: list[Piece], val_fraction: float, seed: int
) -> tuple[list[Piece], list[Piece]]:
    """Return the training and the held-out text of a block, both shuffled.

    The held-out text has ``val_fraction`` of the UTF-8 bytes, and at most a tenth more where the
    border moves to the end of a line or a word.

    Args:
        pieces: of the block; none is empty.
        val_fraction: share of the bytes that is held out, between 0 and 1.
        seed: of the shuffle.
    """
    if not pieces:
        return [], []
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(pieces))
    shuffled = [pieces[i] for i in order]
    ends = np.cumsum([len(piece.text.encode()) for piece in shuffled])
    total = int(ends[-1])
    border = total - round(val_fraction * total)
    at = int(np.searchsorted(ends, border, "right"))  # the first document that ends beyond it
    train, val = shuffled[:at], shuffled[at + 1 :]
    if at < len(shuffled):
        piece = shuffled[at]
        inside = border - (int(ends[at - 1]) if at else 0)
        head, tail = cut(piece.text, inside, min(_CUT_CHARS, (total - border) // 10))
        if head:
            train.append(Piece(head, piece.begins, piece.ends and not tail))
        if tail:
            val.insert(0, Piece(tail, piece.begins and not head, piece.ends))
    return train, val


def cut(text: str, size: int, reach: int) -> tuple[str, str]:
    """Cut ``text`` after at most ``size`` UTF-8 bytes, at a good place near there.

    That is after the last line end among the ``reach`` characters before the border, else before
    the last white space among them, else between the two characters at the border.
    """
    border = len(text.encode()[:size].decode("utf-8", "ignore"))
    start = max(0, border - reach)
    line = text.rfind("\n", start, border) + 1
    if line:
        border = line
    else:
        spaces = [i for i in range(start, border) if text[i].isspace()]
        border = spaces[-1] if spaces else border
    return text[:border], text[border:]
