"""The page in a real browser: a cell that ends appears without a reload."""

import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from minillama.watch import server as watch_server
from minillama.watch.server import WatchServer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class CountingServer(WatchServer):
    """Lets the last cell end once the page has shown that three of four have."""

    summary: Path
    n_states = 0

    def state(self, folder: Path, figures_key: str) -> bytes:
        self.n_states += 1
        if self.n_states == 4:  # the page itself, then three requests of its script
            whole = json.loads(self.summary.read_text()) | {"finished": True}
            self.summary.write_text(json.dumps(whole))
        return super().state(folder, figures_key)


@pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("MINILLAMA_TEST_BROWSER") != "required",
    reason="no chromium on this machine",
)
def test_a_cell_that_ends_appears_by_itself(
    make_ablation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CHROMIUM is not None, "MINILLAMA_TEST_BROWSER=required, but chromium is missing"
    # The browser's clock runs ahead while it waits for nothing.
    monkeypatch.setattr(watch_server, "_FRESH_S", 0.0)
    monkeypatch.setattr(watch_server, "_BUSY_SHARE", float("inf"))
    pages: list[Any] = []
    page = watch_server._Handler._page
    monkeypatch.setattr(
        watch_server._Handler, "_page", lambda self, query: (pages.append(1), page(self, query))
    )
    root = make_ablation({"rms": {1e-3: [2.0], 3e-3: [1.9]}, "ln": {1e-3: [2.4], 3e-3: [1.95]}})
    with CountingServer(root, 0) as server:
        server.summary = root / "cells" / "ln" / "lr-0.003" / "seed-0" / "summary.json"
        whole = json.loads(server.summary.read_text())
        server.summary.write_text(json.dumps(whole | {"finished": False}))
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        command = [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--virtual-time-budget=12000", "--window-size=1300,1000"),
            f"--user-data-dir={tmp_path / 'profile'}",
            *("--dump-dom", server.url),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        server.shutdown()
        thread.join()
    assert server.n_states > 4
    assert len(pages) == 1  # not loaded again
    dom = done.stdout
    assert "<dt>ended</dt><dd>4 of 4</dd>" in dom
    grid = dom[dom.index('<table id="grid">') :]
    marks = re.findall(r'class="cell (\w+)"', grid[: grid.index("</table>")])
    assert marks == ["ok"] * 4
    assert dom.count('class="main-svg"') >= 2  # the figures are drawn
