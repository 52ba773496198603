"""The page in a real browser, where one is installed: no error, a hover answers, an arm toggles."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from minillama.ablation.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

PROBE = """
<script>
const said = [];
addEventListener("error", (event) => said.push("error: " + event.message));
addEventListener("securitypolicyviolation", (event) => said.push("blocked: " + event.blockedURI));
console.error = (...parts) => said.push("console: " + parts.join(" "));
addEventListener("load", async () => {
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  await pause(500);
  const plot = document.getElementById("loss-rate");
  said.push("plots: " + document.querySelectorAll(".plot .main-svg").length / 3);
  const layer = plot.querySelector(".nsewdrag");
  const box = layer.getBoundingClientRect();
  const full = plot._fullLayout;
  const place = { bubbles: true, clientX: box.left + full.xaxis.l2p(-3),
    clientY: box.top + full.yaxis.l2p(2.0) };
  layer.dispatchEvent(new MouseEvent("mouseover", place));
  layer.dispatchEvent(new MouseEvent("mousemove", place));
  await pause(500);
  const hover = plot.querySelector(".hoverlayer");
  said.push("hover: " + hover.textContent);
  const seen = () => plot._fullData.filter((trace) => trace.visible === true).length;
  const curves = () => document.getElementById("loss-step")._fullData
    .filter((trace) => trace.visible === true).length;
  const before = seen();
  const button = document.querySelectorAll("[data-arm]")[1];
  button.click();
  said.push("toggled: " + before + " to " + seen() + " " + button.getAttribute("aria-pressed"));
  const select = document.getElementById("rate");
  const shown = [curves()];
  for (const value of ["all", "0.003"]) {
    select.value = value;
    select.dispatchEvent(new Event("change"));
    shown.push(curves());
  }
  said.push("curves: " + shown.join(" "));
  document.body.dataset.said = said.join(" | ");
});
</script>
"""


@pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("MINILLAMA_TEST_BROWSER") != "required",
    reason="no chromium on this machine",
)
def test_the_page_works_in_a_browser(make_ablation: Any, tmp_path: Path) -> None:
    losses: dict[str, Any] = {
        "rms": {1e-3: [2.0, 2.1], 3e-3: [1.9, 1.91]},
        "ln": {1e-3: [2.4, 2.4], 3e-3: [1.95, None]},
    }
    page = write_report(make_ablation(losses, probes=True))
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("<main>", PROBE + "<main>", 1))
    assert CHROMIUM is not None, "MINILLAMA_TEST_BROWSER=required, but chromium is missing"
    command = [
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--virtual-time-budget=10000", "--window-size=1300,1000"),
        f"--user-data-dir={tmp_path / 'profile'}",
        *("--dump-dom", probed.as_uri()),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = re.search(r'data-said="([^"]*)"', dom)
    assert found is not None, dom[-500:]
    said = dict(part.split(": ", 1) for part in found[1].split(" | "))
    assert not {"error", "console", "blocked"} & set(said), said
    assert said["plots"] == "7"
    assert "lr 0.001, seed 0" in said["hover"]
    assert "loss 2.0000 (ok)" in said["hover"]
    assert said["toggled"] == "5 to 2 false"
    # of rms alone: raw, mean and validation of two seeds at the best rate, at all, at one
    assert said["curves"] == "6 12 6"
