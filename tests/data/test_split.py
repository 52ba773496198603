import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillama.data.split import Piece, cut, read_blocks, split_block

TEXTS = st.lists(st.text("ab \né🙂", min_size=1, max_size=40), min_size=1, max_size=20)


def n_bytes(pieces: list[Piece]) -> int:
    return sum(len(piece.text.encode()) for piece in pieces)


def numbered(pieces: list[Piece]):
    """A part of a source: the place after piece i is i + 1."""
    return ((piece, (number + 1).__int__) for number, piece in enumerate(pieces))


@given(TEXTS, st.floats(0.01, 0.99), st.integers(0, 2**40))
def test_train_and_val_are_disjoint_and_make_up_everything(texts, val_fraction, seed):
    train, val = split_block([Piece(text) for text in texts], val_fraction, seed)
    pieces = train + val
    assert all(piece.text for piece in pieces)
    whole, parts = [], []
    for piece in pieces:
        (whole if piece.begins and piece.ends else parts).append(piece)
    if parts:
        head, tail = parts
        assert (head is train[-1], tail is val[0]) == (True, True)
        assert (head.begins, head.ends, tail.begins, tail.ends) == (True, False, False, True)
    rejoined = [piece.text for piece in whole] + ["".join(p.text for p in parts)] * bool(parts)
    assert sorted(rejoined) == sorted(texts)
    wanted = round(val_fraction * sum(len(text.encode()) for text in texts))
    assert wanted <= n_bytes(val) <= 1.1 * wanted + 9 * 4


def test_a_larger_val_fraction_holds_out_the_same_and_more():
    pieces = [Piece(f"document {i}\n") for i in range(100)]
    small, large = (split_block(pieces, fraction, 0)[1] for fraction in (0.2, 0.4))
    assert {p.text for p in small if p.begins} < {p.text for p in large}


def test_documents_are_shuffled_by_the_seed():
    pieces = [Piece(f"document {i}\n") for i in range(100)]
    orders = [[p.text for p in split_block(pieces, 0.2, seed)[0]] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != [piece.text for piece in pieces[: len(orders[0])]]


def test_the_split_is_the_same_everywhere():
    # Written down, so that a change of the split, which would break comparisons, is seen.
    train, val = split_block([Piece(letter * 9) for letter in "abcdefgh"], 0.3, 0)
    assert ["".join(p.text[0] for p in side) for side in (train, val)] == ["cedgfa", "abh"]


@pytest.mark.parametrize(("begins", "ends"), [(True, True), (False, True), (True, False)])
def test_a_part_of_a_document_stays_one_where_it_is_cut(begins, ends):
    train, val = split_block([Piece("line\n" * 100, begins, ends)], 0.1, 0)
    assert train == [Piece("line\n" * 90, begins, ends=False)]
    assert val == [Piece("line\n" * 10, begins=False, ends=ends)]


@pytest.mark.parametrize(
    ("text", "size", "reach", "head"),
    [
        ("one\ntwo three", 6, 6, "one\n"),
        ("one\ntwo three", 10, 4, "one\ntwo"),
        ("one\ntwo three", 10, 1, "one\ntwo th"),
        ("one\n", 4, 2, "one\n"),
        ("éééé", 3, 0, "é"),
        ("🙂🙂", 7, 9, "🙂"),
        ("word", 2, 0, "wo"),
        (" word", 3, 9, ""),
    ],
)
def test_a_document_is_cut_at_a_line_a_space_or_a_character(text, size, reach, head):
    assert cut(text, size, reach) == (head, text[len(head) :])


# ---------------------------------------------------------------------------------------- blocks


@given(
    st.lists(st.lists(st.text("ab\n", min_size=1, max_size=9), min_size=1, max_size=5), max_size=9),
    st.integers(1, 40),
)
def test_blocks_hold_every_document_and_join_its_pieces(documents, block_bytes):
    pieces = [
        Piece(text, number == 0, number == len(parts) - 1)
        for parts in documents
        for number, text in enumerate(parts)
    ]
    blocks = list(read_blocks(numbered(pieces), 0, block_bytes))
    n_blank = sum(block.n_blank for block in blocks)
    assert n_blank == sum(len(parts) == 1 and not parts[0].strip() for parts in documents)
    text = "".join(piece.text for block in blocks for piece in block.pieces)
    assert text == "".join(p.text for p in pieces if not (p.begins and p.ends) or p.text.strip())
    for block in blocks:
        assert all(piece.begins for piece in block.pieces[1:])
        assert all(piece.ends for piece in block.pieces[:-1])
    for block in blocks[:-1]:
        assert block_bytes <= n_bytes(block.pieces) < block_bytes + 9
    framed = [p for block in blocks for p in block.pieces]
    n_documents = len(documents) - n_blank
    assert sum(p.begins for p in framed) == sum(p.ends for p in framed) == n_documents


@given(st.lists(st.sampled_from(["a", "bb\n", " ", "ccc"]), max_size=30), st.integers(1, 8))
def test_reading_resumes_at_any_block(texts, block_bytes):
    pieces = [Piece(text) for text in texts]
    blocks = list(read_blocks(numbered(pieces), 0, block_bytes))
    for number, block in enumerate(blocks):
        rest = list(numbered(pieces))[block.place :]
        assert list(read_blocks(iter(rest), block.place, block_bytes)) == blocks[number:]


def test_each_block_of_a_long_document_has_held_out_text():
    pieces = [Piece("some line\n" * 100, i == 0, i == 9) for i in range(10)]
    splits = [split_block(block.pieces, 0.1, 0) for block in read_blocks(numbered(pieces), 0, 5000)]
    assert [n_bytes(val) for _, val in splits] == [500, 500]
    assert [n_bytes(train) for train, _ in splits] == [4500, 4500]
