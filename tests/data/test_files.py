from pathlib import Path

import pytest

from minillama.data.files import check_utf8, read_text
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
