"""Serves the page on 127.0.0.1, and nothing but the page, its data and the report's own files.

    GET /                      the list of folders, or the page of the only one
    GET /?folder=NAME          the page of one; NAME as in the list
    GET /state?folder=NAME     its data, as JSON
    GET /report?folder=NAME    its report.html, if there is one
    GET /plotly.js

A name is looked up among the folders that were found, so no path leads elsewhere.  A request under
another host name than this machine's is refused: a page of another site, whose name was pointed to
127.0.0.1, may not read the data (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jinja2 import Environment
from plotly.offline import get_plotlyjs

from minillama import launch
from minillama.ablation import report
from minillama.ablation.report.page import CAPTIONS, template_environment
from minillama.commands.runs import find_folders, read_entry
from minillama.errors import ConfigError, MinillamaError
from minillama.watch.live import LiveFolder

PORT = 8765
_PORTS_TRIED = 20
_HOSTS = {"127.0.0.1", "localhost", "[::1]"}
_BUSY_SHARE = 0.1  # of a core at most, for reading what is watched
_FRESH_S = 0.5  # data no older than this is not read again
_LINGER_S = 3.0  # how long the page of an ablation outlives it, to show its end
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HERE = Path(__file__).parent


class WatchServer(ThreadingHTTPServer):
    """The server of the page for ``root``: an ablation, a run, or a folder with some of them.

    Args:
        root: may appear later.
        port: None: the first free one from :data:`PORT` on; 0: any.

    Raises:
        ConfigError: the port is in use or may not be used.
    """

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # elsewhere it would take a busy port

    def __init__(self, root: Path, port: int | None = None) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._live: dict[Path, LiveFolder] = {}
        self._states: dict[tuple[Path, str], tuple[float, bytes]] = {}
        ports = range(PORT, PORT + _PORTS_TRIED) if port is None else [port]
        for candidate in ports:
            try:
                super().__init__(("127.0.0.1", candidate), _Handler)
                return
            except (OSError, OverflowError) as error:
                if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                    continue
                raise ConfigError(
                    f"port {candidate} cannot be used: {error}; choose another with --port"
                ) from None
        busy = f"port {port}" if port is not None else f"ports {PORT} to {ports[-1]}"
        raise ConfigError(f"{busy} in use by another program; choose another with --port")

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a reader that left is not an error."""

    def find(self, name: str) -> Path | None:
        """Return the folder called ``name`` in the list; an empty name is the root itself."""
        if not name:
            return self.root if _holds_results(self.root) else None
        return {self._name(folder): folder for folder in self._folders()}.get(name)

    def index(self) -> list[dict[str, Any]]:
        """Return what ``minillama runs`` lists, for JSON, each named by its path below the root."""
        entries = {self._name(folder): read_entry(folder) for folder in self._folders()}
        newest_first = sorted(entries.items(), key=lambda item: item[1].changed, reverse=True)
        return [asdict(entry) | {"name": name} for name, entry in newest_first]

    def _folders(self) -> list[Path]:
        """Return the folders in the list; a link that leads out of the root is not followed."""
        root = self.root.resolve()
        return [each for each in find_folders(self.root) if each.resolve().is_relative_to(root)]

    def _name(self, folder: Path) -> str:
        return folder.relative_to(self.root).as_posix()

    def state(self, folder: Path, figures_key: str) -> bytes:
        """Return the state of a folder as JSON; many readers at once cost no more than one."""
        with self._lock:
            key = (folder, figures_key)
            until, payload = self._states.get(key, (0.0, b""))
            if time.monotonic() < until:
                return payload
            began = time.monotonic()
            live = self._live.setdefault(folder, LiveFolder(folder))
            try:
                state = live.state(figures_key)
            except MinillamaError as error:  # such as a file that is damaged
                state = {"error": str(error)}
            payload = json.dumps(state, separators=(",", ":"), allow_nan=False).encode()
            ended = time.monotonic()
            self._states = {k: v for k, v in self._states.items() if v[0] > ended}
            self._states[key] = (ended + max(_FRESH_S, (ended - began) / _BUSY_SHARE), payload)
            return payload


def _holds_results(folder: Path) -> bool:
    return (folder / "ablation.yaml").is_file() or (folder / "config.yaml").is_file()


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version = "minillama"
    sys_version = ""
    timeout = 10  # seconds; of a reader that says nothing

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing: a line for each request would hide the terminal's own."""

    def do_GET(self) -> None:
        """Answer a request."""
        host = self.headers.get("Host", "").rpartition(":")
        name = host[0] if host[0] and host[2].isdigit() else self.headers.get("Host", "")
        if name not in _HOSTS:
            self._refuse(HTTPStatus.FORBIDDEN, "open this page as http://127.0.0.1:PORT/")
            return
        address = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        answers = {
            "/": self._page,
            "/state": self._state,
            "/report": self._report,
            "/plotly.js": self._plotly,
        }
        answer = answers.get(address.path)
        if answer is None:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        answer(query)

    do_HEAD = do_GET  # noqa: N815  the name is the standard library's

    def _folder(self, query: dict[str, str]) -> Path | None:
        folder = self.server.find(query.get("folder", ""))
        if folder is None and "folder" in query:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such run or ablation")
        return folder

    def _page(self, query: dict[str, str]) -> None:
        folder = self._folder(query)
        if folder is None and "folder" in query:
            return
        template = "index.html" if folder is None else "page.html"
        state = {} if folder is None else json.loads(self.server.state(folder, ""))
        figures = state.get("figures", {"arms": [], "rates": [], "figures": []})
        page = (
            _environment()
            .get_template(template)
            .render(
                root=self.server.root.name or str(self.server.root),
                folder=query.get("folder", ""),
                name=state.get("name") or self.server.root.name,
                kind=state.get("kind", "run"),
                arms=figures["arms"],
                data=json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c"),
            )
        )
        self._send(page.encode(), "text/html; charset=utf-8")

    def _state(self, query: dict[str, str]) -> None:
        folder = self._folder(query)
        if folder is not None:
            payload = self.server.state(folder, query.get("figures", ""))
        elif "folder" in query:
            return
        else:
            payload = json.dumps({"folders": self.server.index()}).encode()
        self._send(payload, "application/json")

    def _report(self, query: dict[str, str]) -> None:
        folder = self._folder(query)
        if folder is None and "folder" in query:
            return
        try:
            page = ((folder or self.server.root) / "report.html").read_bytes()
        except OSError:
            self._refuse(HTTPStatus.NOT_FOUND, "the report is not written yet")
            return
        self._send(page, "text/html; charset=utf-8")

    def _plotly(self, query: dict[str, str]) -> None:
        self._send(_plotly_bytes(), "text/javascript; charset=utf-8", cache_s=3600)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(f"{why}\n".encode(), "text/plain; charset=utf-8", status=status)

    def _send(
        self, body: bytes, kind: str, *, status: HTTPStatus = HTTPStatus.OK, cache_s: int = 0
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", f"max-age={cache_s}" if cache_s else "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@cache
def _plotly_bytes() -> bytes:
    code: str = get_plotlyjs()
    return code.encode()


@cache
def _environment() -> Environment:
    drawing = Path(report.__file__).parent
    environment = template_environment(_HERE)
    environment.globals.update(
        titles={name: title for name, (title, _) in CAPTIONS.items()},
        css="\n".join(
            path.read_text(encoding="utf-8") for path in (drawing / "page.css", _HERE / "watch.css")
        ),
        draw=(drawing / "page.js").read_text(encoding="utf-8"),
        script=(_HERE / "watch.js").read_text(encoding="utf-8"),
        index=(_HERE / "index.js").read_text(encoding="utf-8"),
    )
    return environment


# ------------------------------------------------------------------------------------- starting


def watch(root: str | Path, port: int | None = None) -> None:
    """Serve the page for ``root`` until Ctrl-C.

    Raises:
        ConfigError: there is no such folder, or the port cannot be used.
    """
    root = Path(root)
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder; name the folder of runs, such as runs")
    with WatchServer(root, port) as server:
        print(f"watching {root}: {server.url}  (Ctrl-C ends)", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)


@contextlib.contextmanager
def watching(root: str | Path, port: int | None = None) -> Iterator[None]:
    """Serve the page for ``root`` from a process of its own while the body runs.

    Whatever happens to that process, the body is not affected.  It ends soon after the body, or
    with this process.
    """
    arguments = [str(root), "" if port is None else str(port)]
    command = launch.module_command("minillama.watch.server", *arguments)
    try:
        # In a session of its own: Ctrl-C saves the cells, and the page shows that.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        print(f"the page cannot be served: {error}", file=sys.stderr, flush=True)
        yield
        return
    try:
        yield
    finally:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        threading.Thread(target=process.wait, daemon=True).start()  # nothing waits for its end


def main(root: str, port: str) -> int:
    """Serve the page until stdin ends, which it does when the parent process closes it or dies."""
    sys.stderr = launch.SafeStream(sys.stderr)
    if hasattr(os, "nice"):
        os.nice(10)  # the cells come first
    try:
        server = WatchServer(Path(root), int(port) if port else None)
    except ConfigError as error:
        print(f"the page cannot be served: {error}", file=sys.stderr, flush=True)
        return 1
    with server:
        print(f"watch: {server.url}", file=sys.stderr, flush=True)

        def end_with_parent() -> None:
            sys.stdin.buffer.read()
            time.sleep(_LINGER_S)
            server.shutdown()

        threading.Thread(target=end_with_parent, daemon=True).start()
        server.serve_forever(poll_interval=0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
