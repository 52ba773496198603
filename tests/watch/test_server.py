"""The server answers this machine alone, shows what was found and nothing else."""

import http.client
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillama import launch
from minillama.errors import ConfigError
from minillama.watch.server import WatchServer

LOSSES = {"rms": {1e-3: [2.0, 2.1], 3e-3: [1.9, "missing"]}}


@pytest.fixture
def server(make_ablation: Any) -> Iterator[WatchServer]:
    make_ablation(LOSSES, name="grid")
    folder = make_ablation({"rms": {1e-3: [2.0]}}, name="other")
    with WatchServer(folder.parent, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _get(server: WatchServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_list_names_what_the_folder_holds(server: WatchServer) -> None:
    status, body = _get(server, "/state")
    assert status == 200
    assert {each["name"] for each in json.loads(body)["folders"]} == {"grid", "other"}


def test_a_link_that_leads_out_is_not_followed(server: WatchServer, tmp_path: Path) -> None:
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.yaml").write_text("name: secret")
    (server.root / "link").symlink_to(elsewhere)
    assert {each["name"] for each in server.index()} == {"grid", "other"}
    assert _get(server, "/state?folder=link")[0] == 404


def test_a_folder_of_the_list_has_a_page_and_a_state(server: WatchServer) -> None:
    status, body = _get(server, "/?folder=grid")
    assert status == 200
    assert "<h1>grid</h1>" in body
    state = json.loads(_get(server, "/state?folder=grid")[1])
    assert state["counts"]["total"] == 4


@pytest.mark.parametrize(
    "path",
    [
        "/?folder=../grid",
        "/state?folder=%2e%2e%2f",
        "/state?folder=/etc",
        "/report?folder=grid/cells",
        "/grid/ablation.yaml",
        "/../../etc/passwd",
        "/%2e%2e/",
    ],
)
def test_no_path_leads_elsewhere(server: WatchServer, path: str) -> None:
    assert _get(server, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_another_host_name_is_refused(server: WatchServer, host: str) -> None:
    assert _get(server, "/state", host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:80"])
def test_a_forwarded_port_is_answered(server: WatchServer, host: str) -> None:
    assert _get(server, "/state", host)[0] == 200


def test_it_listens_on_this_machine_alone(server: WatchServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_damaged_file_is_named_on_the_page(server: WatchServer) -> None:
    (server.root / "grid" / "ablation.yaml").write_text("arms: [")
    assert "ablation.yaml" in json.loads(_get(server, "/state?folder=grid")[1])["error"]


def test_a_busy_port_is_named_or_passed_over(server: WatchServer) -> None:
    with pytest.raises(ConfigError, match=f"port {server.server_port} in use.*--port"):
        WatchServer(server.root, server.server_port)
    with WatchServer(server.root) as one, WatchServer(server.root) as other:
        assert one.server_port != other.server_port


def test_the_page_of_an_ablation_ends_with_it(tmp_path: Path) -> None:
    command = launch.module_command("minillama.watch.server", str(tmp_path), "0")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("watch: http://127.0.0.1:")
    port = int(line.rstrip("/\n").rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port), timeout=20).close()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    process.stderr.close()
