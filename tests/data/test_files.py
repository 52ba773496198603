import bz2
import functools
import gzip
import lzma
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillama.config.run import FilesSource
from minillama.data.files import TextFiles, cache_entry, data_files, download, read_pieces
from minillama.data.sources import read_documents
from minillama.errors import DataError, SourceUnreachableError

COMPRESS = {
    "gz": functools.partial(gzip.compress, mtime=0),  # test names hold these bytes
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "cache"))


def files(*paths: Path | str, **options) -> FilesSource:
    return FilesSource(kind="files", files=[str(path) for path in paths], **options)


def text_of(path: Path, **options) -> str:
    return "".join(piece.text for piece, _ in read_pieces(path, **options))


# ---------------------------------------------------------------------------------------- finding


def test_a_file_named_by_several_paths_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    path = tmp_path / "t.txt"
    path.write_text("text", encoding="utf-8")
    (tmp_path / "link.txt").symlink_to(path)
    (tmp_path / "folder").symlink_to(tmp_path, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    names = ["a/../t.txt", "t.txt", str(path), "link.txt", "folder/t.txt", "*.txt"]
    for first in names:
        assert len(data_files(files(first, *names))) == 1
    os.link(path, tmp_path / "copy.txt")  # a file in its own right
    assert len(data_files(files(*names))) == 2


def test_a_missing_file_a_folder_and_an_unmatched_pattern_are_named(tmp_path):
    (tmp_path / "there.txt").write_text("text", encoding="utf-8")
    for wrong in (tmp_path / "gone.txt", tmp_path / "*.md", tmp_path / "there.txt" / "x"):
        with pytest.raises(DataError, match=f"no such file: {tmp_path}") as error:
            data_files(files(tmp_path / "there.txt", wrong))
        assert wrong.name in str(error.value)
    with pytest.raises(DataError, match="is a folder; name its files"):
        data_files(files(tmp_path))


def test_a_pipe_or_a_device_is_refused_as_such(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(DataError, match=r"fifo is a pipe, and .* more than once; save it"):
        data_files(files(tmp_path / "fifo"))
    with pytest.raises(DataError, match="loop: Too many levels of symbolic links"):
        data_files(files(tmp_path / "loop"))
    with pytest.raises(DataError, match="null is a device or a socket"):
        data_files(files("/dev/null"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        with pytest.raises(DataError, match="s is a device or a socket"):
            data_files(files(tmp_path / "s"))


def test_stdin_is_refused_as_a_pipe():
    program = (
        "from minillama.config.run import FilesSource\n"
        "from minillama.data.files import data_files\n"
        "data_files(FilesSource(kind='files', files=['/dev/stdin']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input="text", capture_output=True, text=True, check=False
    )
    assert "/dev/stdin is a pipe" in done.stderr


# ---------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_is_read_as_the_text_in_it(tmp_path, suffix):
    text = "".join(f"line {i}: é 🙂\n" for i in range(200_000))  # several pieces
    path = tmp_path / f"book.txt.{suffix}"
    path.write_bytes(COMPRESS[suffix](text.encode()))
    pieces = list(read_pieces(path))
    assert "".join(piece.text for piece, _ in pieces) == text
    assert len(pieces) > 2
    assert list(read_pieces(path, place=pieces[1][1])) == pieces[2:]
    assert list(read_documents(files(path))) == [text]

    path.write_bytes(COMPRESS[suffix](text.encode())[:-20])
    with pytest.raises(DataError, match=rf"cannot read .*book\.txt\.{suffix}: "):
        text_of(path)
    path.write_bytes(b"no such thing")
    with pytest.raises(DataError, match=rf"cannot read .*book\.txt\.{suffix}: "):
        text_of(path)


@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf", "é".encode() * (1 << 19), b"x" * 2097151])
def test_a_byte_that_is_not_utf8_is_named_with_its_offset(tmp_path, head):
    path = tmp_path / "latin.txt"
    for bad in (b"caf\xe9!", b"caf\xe2\x82", b"caf\xff" + b"y" * (1 << 20)):
        path.write_bytes(head + bad)
        place = rf"latin\.txt is not UTF-8 at byte {len(head) + 3};.*iconv"
        with pytest.raises(DataError, match=place):
            text_of(path)
    path.write_bytes(head + b"caf\xc3\xa9")
    text_of(path)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("text".encode("utf-16"), "UTF-16"),
        (COMPRESS["gz"](b"text"), r"gzip, whose name should end in \.gz"),
        (COMPRESS["zst"](b"text"), r"Zstandard, whose name should end in \.zst"),
        (b"PAR1\xff", r"Parquet, for data\.source\.format=parquet"),
    ],
)
def test_what_is_not_text_is_recognised(tmp_path, content, kind):
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"not UTF-8 at byte \d; it looks like {kind}"):
        text_of(tmp_path / "t.txt")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for name in ("gone.txt", "gone.txt.gz"):
        with pytest.raises(DataError, match=rf"cannot read .*{name}: No such file"):
            text_of(tmp_path / name)


def expected(data: bytes) -> str:
    return data.decode().removeprefix("\ufeff").replace("\r\n", "\n")


LINES = st.lists(st.sampled_from(["a", "é", "🙂", "\n", "\r\n", "\r", "word "]), max_size=60)


@given(LINES, st.integers(4, 16), st.booleans(), st.sampled_from(["txt", "txt.gz"]))
def test_pieces_make_up_the_file_from_any_place_on(tmp_path_factory, parts, size, marked, suffix):
    path = tmp_path_factory.getbasetemp() / f"pieces.{suffix}"
    data = b"\xef\xbb\xbf" * marked + "".join(parts).encode()
    path.write_bytes(gzip.compress(data) if suffix == "txt.gz" else data)
    found = list(read_pieces(path, size=size))
    pieces = [piece for piece, _ in found]
    assert "".join(piece.text for piece in pieces) == expected(data)
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for number, (piece, place) in enumerate(found):
        assert len(piece.text.encode()) <= 2 * size + 3
        if place:
            assert list(read_pieces(path, size=size, place=place)) == found[number + 1 :]


@given(LINES, st.integers(4, 16), st.lists(st.integers(0, 150), max_size=3))
def test_ranges_of_bytes_make_up_the_file(tmp_path_factory, parts, size, borders):
    path = tmp_path_factory.getbasetemp() / "ranges.txt"
    path.write_bytes("".join(parts).encode())
    n_bytes = path.stat().st_size
    borders = sorted({0, *(min(border, n_bytes) for border in borders)})
    ranges = zip(borders, [*borders[1:], None], strict=True)
    pieces = [p for start, stop in ranges for p, _ in read_pieces(path, start, stop, size=size)]
    assert "".join(piece.text for piece in pieces) == expected(path.read_bytes())
    inked = [piece for piece in pieces if piece.text]
    assert [piece.begins for piece in inked] == [True] * bool(inked) + [False] * (len(inked) - 1)
    assert [piece.ends for piece in inked] == [False] * (len(inked) - 1) + [True] * bool(inked)


def test_a_piece_ends_at_a_line_where_there_is_one(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)), encoding="utf-8")
    texts = [piece.text for piece, _ in read_pieces(path, size=100)]
    assert all(text.endswith("\n") for text in texts)
    assert all(100 <= len(text) < 108 for text in texts[:-1])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 9))
def test_parts_share_the_bytes_of_all_files(tmp_path_factory, sizes, n_parts):
    folder = tmp_path_factory.mktemp("parts")
    paths = []
    for number, size in enumerate(sizes):
        paths.append(folder / f"{number}.txt")
        paths[-1].write_text("abcdefgh\n"[: size % 10] * (size // 3 + 1), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minillama.data.files.count_parts", lambda n_bytes: n_parts)
        parts = TextFiles(paths)
    text = "".join(p.text for part in range(n_parts) for p, _ in parts.read(part))
    assert text.split() == "".join(path.read_text(encoding="utf-8") for path in paths).split()


# ------------------------------------------------------------------------------------- the cache


def test_a_cache_that_cannot_be_written_is_named_with_the_fix(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(DataError, match=r"cannot write .*: .*; set .* MINILLAMA_CACHE"),
        cache_entry(tmp_path / "file" / "folder"),
    ):
        pass


def test_of_several_processes_one_fills_the_cache_and_the_others_wait(tmp_path):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from minillama.data.files import cache_entry\n"
        "path = Path(sys.argv[1])\n"
        "with cache_entry(path):\n"
        "    if not path.exists():\n"
        "        print('written')\n"
        "        time.sleep(1)\n"
        "        path.touch()\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "deep" / "file")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    printed = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(printed) == ["", "", "written\n"]


# -------------------------------------------------------------------------------------- downloads


class Handler(BaseHTTPRequestHandler):
    """Serves a text and a table, says no to /gone.txt and hangs up half-way on /short.txt."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        bodies = {
            "/book.txt": b"It was\r\n a dark night",
            "/book.txt.gz": gzip.compress(b"packed"),
            "/rows.jsonl": b'{"text": "row"}\n',
            "/short.txt": b"half",
        }
        body = bodies.get(self.path.partition("?")[0])
        self.send_response(404 if body is None else 200)
        promised = len(body or b"") * (2 if self.path == "/short.txt" else 1)
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        if with_body:
            self.wfile.write(body or b"")

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_a_url_is_a_file_like_any_other(address):
    assert list(read_documents(files(f"{address}/book.txt"))) == ["It was\n a dark night"]
    assert list(read_documents(files(f"{address}/book.txt.gz"))) == ["packed"]
    table = files(f"{address}/rows.jsonl?download=1", format="json")
    assert list(read_documents(table)) == ["row"]


def test_a_url_is_fetched_once(address, server):
    path = download(f"{address}/book.txt")
    server.shutdown()
    server.server_close()
    assert download(f"{address}/book.txt") == path
    assert path.name == "book.txt"


def test_a_file_that_the_server_does_not_have_is_the_users_error(address):
    with pytest.raises(DataError, match=r"/gone\.txt: the server answers 404") as error:
        download(f"{address}/gone.txt")
    assert error.value.exit_status == 2


def test_half_a_file_is_not_kept(address, tmp_path):
    with pytest.raises(SourceUnreachableError, match="ended after 4 of 8 bytes"):
        download(f"{address}/short.txt")
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["short.txt.lock"]


@pytest.mark.parametrize("format", ["text", "json"])
def test_without_a_network_a_url_fails_with_one_line(format):
    source = files("http://127.0.0.1:9/book.txt", format=format)
    with pytest.raises(SourceUnreachableError, match=r"cannot (fetch|reach) http") as error:
        list(read_documents(source))
    assert "connect to the network" in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_status == 1


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PK\x03\x04\x14", "is a zip archive, as .docx"),
        (b"%PDF-1.7 all of it ASCII", "is a PDF, not plain text; extract its text"),
        (rb"{\rtf1\ansi Hello}", "is RTF"),
        ("a text without a mark".encode("utf-16-le"), "has 21 NUL characters among 42; if it is"),
    ],
)
def test_what_is_valid_utf8_but_not_text_is_refused(tmp_path, content, kind):
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(DataError, match=re.escape(kind)):
        list(read_documents(files(tmp_path / "t.txt")))


def test_a_few_nul_characters_are_text(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"a long line\0 and more\n")
    assert list(read_documents(files(tmp_path / "t.txt"))) == ["a long line\0 and more\n"]


def test_a_table_that_is_read_as_plain_text_is_warned_of_once(tmp_path, caplog):
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    source = files(tmp_path / "*", format="text")
    for _ in range(2):
        assert list(read_documents(source)) == ['{"text": "a"}\n']
    assert caplog.text.count("is read as plain text with all its markup") == 1


def test_text_that_was_compressed_twice_is_recognised(tmp_path):
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(gzip.compress(b"text")))
    with pytest.raises(DataError, match="looks like gzip: was it compressed twice"):
        list(read_documents(files(tmp_path / "t.txt.gz")))
