import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from minillama.config.run import FilesSource
from minillama.data.download import download
from minillama.data.sources import open_documents
from minillama.errors import DataError, SourceUnreachableError


class Handler(BaseHTTPRequestHandler):
    """Serves a text and a table, says no to /gone.txt and hangs up half-way on /short.txt."""

    def do_GET(self) -> None:
        bodies = {
            "/book.txt": b"It was\r\n a dark night",
            "/rows.jsonl": b'{"text": "row"}\n',
            "/short.txt": b"half",
        }
        body = bodies.get(self.path.partition("?")[0])
        self.send_response(404 if body is None else 200)
        promised = len(body or b"") * (2 if self.path == "/short.txt" else 1)
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "cache"))


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
    source = FilesSource(kind="files", files=[f"{address}/book.txt"])
    assert list(open_documents(source)) == ["It was\n a dark night"]
    table = FilesSource(kind="files", format="json", files=[f"{address}/rows.jsonl?download=1"])
    assert list(open_documents(table)) == ["row"]


def test_a_url_is_fetched_once(address, server):
    path = download(f"{address}/book.txt")
    server.shutdown()
    server.server_close()
    assert download(f"{address}/book.txt") == path
    assert path.name == "book.txt"


def test_a_file_that_the_server_does_not_have_is_the_users_fault(address):
    with pytest.raises(DataError, match=r"/gone\.txt: the server answers 404") as error:
        download(f"{address}/gone.txt")
    assert error.value.exit_status == 2


def test_half_a_file_is_not_kept(address, tmp_path):
    with pytest.raises(SourceUnreachableError, match="ended after 4 of 8 bytes"):
        download(f"{address}/short.txt")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.name == "short.txt"]


def test_without_a_network_a_url_fails_with_one_line():
    with pytest.raises(SourceUnreachableError, match=r"cannot fetch http.*pydocs") as error:
        download("http://127.0.0.1:9/book.txt")
    assert "\n" not in str(error.value)
    assert error.value.exit_status == 1
