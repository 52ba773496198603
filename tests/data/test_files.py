from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillama.data.files import check_utf8, read_piece, read_text
from minillama.errors import DataError


@pytest.mark.parametrize("read", [read_text, check_utf8])
@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf", "é".encode() * (1 << 19), b"x" * 2097151])
def test_a_byte_that_is_not_utf8_is_named_with_its_offset(tmp_path: Path, read, head):
    path = tmp_path / "latin.txt"
    for bad in (b"caf\xe9!", b"caf\xe2\x82", b"caf\xff" + b"y" * (1 << 20)):
        path.write_bytes(head + bad)
        place = rf"latin\.txt is not UTF-8 at byte {len(head) + 3};.*iconv"
        with pytest.raises(DataError, match=place):
            read(path)
    path.write_bytes(head + b"caf\xc3\xa9")
    read(path)


@pytest.mark.parametrize("read", [read_text, check_utf8])
def test_utf16_is_recognised(tmp_path: Path, read):
    (tmp_path / "wide.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(DataError, match="byte 0; it looks like UTF-16"):
        read(tmp_path / "wide.txt")


@pytest.mark.parametrize("read", [read_text, check_utf8])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, read):
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt: No such file"):
        read(tmp_path / "gone.txt")


@given(
    st.lists(st.sampled_from(["a", "é", "🙂", "\n", "\r\n", "word "]), max_size=60),
    st.integers(4, 16),
    st.booleans(),
)
def test_pieces_make_up_the_file(tmp_path_factory, parts, size, marked):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(b"\xef\xbb\xbf" * marked + "".join(parts).encode())
    n_bytes = path.stat().st_size
    pieces = [read_piece(path, number, size) for number in range(max(1, -(-n_bytes // size)))]
    assert "".join(piece.text for piece in pieces) == read_text(path)
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    inked = [piece for piece in pieces if piece.text]
    assert [piece.ends for piece in inked][:-1] == [False] * (len(inked) - 1)
    assert pieces[-1].ends
    assert not inked or inked[-1].ends or not pieces[-1].text
    for piece in pieces:
        assert len(piece.text.encode()) <= 2 * size + 3


def test_a_piece_ends_at_a_line_where_there_is_one(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)), encoding="utf-8")
    texts = [read_piece(path, number, 100).text for number in range(8)]
    assert all(text.endswith("\n") for text in texts)
    assert [len(text) for text in texts] == [102, 104, 96, 104, 96, 104, 96, 88]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_bad_byte_of_a_piece_is_named_with_its_offset_in_the_file(tmp_path, number):
    path = tmp_path / "latin.txt"
    data = bytearray(b"0123456789" * 30)
    data[100 * number + 50] = 0xE9
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"latin\.txt is not UTF-8 at byte {100 * number + 50};"):
        read_piece(path, number, 100)
    path.write_bytes(b"\x80" * 300)
    with pytest.raises(DataError, match="not UTF-8 at byte"):
        read_piece(path, number, 100)
    with pytest.raises(DataError, match=r"cannot read .*gone: No such file"):
        read_piece(tmp_path / "gone", number, 100)
