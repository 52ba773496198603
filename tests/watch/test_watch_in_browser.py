"""The page in a real browser: a cell that ends appears without a reload, an arm's name is text."""

import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from minillama.watch.server import WatchServer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

PROBE = """
addEventListener("load", async () => {
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const seen = [];
  const errors = [];
  addEventListener("error", (event) => errors.push(event.message));
  const started = performance.timeOrigin;
  const ended = () => [...document.querySelectorAll("#counts dd")].map((each) => each.textContent)[0];
  const limit = Date.now() + 40000;
  while (Date.now() < limit && seen.at(-1) !== "4 of 4") {
    const now = ended();
    if (now && now !== seen.at(-1)) { seen.push(now); if (seen.length === 1) await fetch("?finish"); }
    await pause(50);
  }
  document.body.dataset.said = JSON.stringify({ seen, errors, started: started === performance.timeOrigin,
    marks: document.querySelectorAll("#grid .cell.ok").length,
    plots: document.querySelectorAll("#figures .main-svg").length / 3 });
});
"""


@pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("MINILLAMA_TEST_BROWSER") != "required",
    reason="no chromium on this machine",
)
def test_a_cell_that_ends_appears_by_itself(
    make_ablation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CHROMIUM is not None, "MINILLAMA_TEST_BROWSER=required, but chromium is missing"
    losses: dict[str, Any] = {"rms": {1e-3: [2.0]}, "ln": {1e-3: [2.4]}}
    losses = {arm: by_lr | {3e-3: [1.9]} for arm, by_lr in losses.items()}
    root = make_ablation(losses)
    summary = root / "cells" / "ln" / "lr-0.003" / "seed-0" / "summary.json"
    whole = json.loads(summary.read_text())
    summary.write_text(json.dumps(whole | {"finished": False}))
    with WatchServer(root, 0) as server:
        _finish_when_asked(monkeypatch, summary, whole)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--timeout=45000", "--window-size=1300,1000"),
            f"--user-data-dir={tmp_path / 'profile'}",
            *("--dump-dom", server.url),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        server.shutdown()
    found = re.search(r'data-said="([^"]*)"', done.stdout)
    assert found is not None, done.stdout[-800:]
    said = json.loads(found[1].replace("&quot;", '"'))
    assert said["seen"] == ["3 of 4", "4 of 4"]
    assert said["marks"] == 4 + 1  # and one in the legend
    assert said["plots"] >= 2
    assert said["errors"] == []
