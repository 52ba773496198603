import html.parser
import json
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pyarrow.parquet as pq
import pytest
from PIL import Image

from minillama.ablation.report import write_report
from minillama.ablation.results import COLUMNS
from minillama.errors import ConfigError

GRID: dict[str, dict[float, list[Any]]] = {
    "rms": {1e-3: [2.0, 2.1, 2.05], 3e-3: [1.9, 1.91, 1.92], 1e-2: [2.3, 2.2, 2.4]},
    "ln": {1e-3: [2.1, 2.1, 2.05], 3e-3: [1.91, 1.9, 1.9], 1e-2: [4.95, None, 2.4]},
}


class _Page(html.parser.HTMLParser):
    """Collects what a page would fetch, its text outside scripts, and whether its tags match."""

    EMPTY = ("meta", "br", "line", "circle", "rect", "path", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "srcset")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.words.append(data)


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_is_self_contained(make_ablation: Any) -> None:
    path = write_report(make_ablation(GRID, probes=True))
    text = path.read_text(encoding="utf-8")
    page = _Page(text)
    assert page.open == []
    assert page.fetched == []
    assert "default-src 'none'" in text
    raw = text.partition('type="application/json">')[2].partition("</script>")[0]
    assert "<" not in raw  # nothing in it can end the script it stands in
    assert len(text.encode()) < 6_000_000
    shown = " ".join(page.words)
    for expected in (
        *("rms", "ln", "Every run", "sha256", "2.13.0", "a machine, 2 cores"),
        *("minillama ablate", "LR sensitivity", "1 collapsed", "1 diverged", "hashes equal"),
    ):
        assert expected in shown


def test_figures_are_valid_plotly_figures(make_ablation: Any) -> None:
    data = page_data(write_report(make_ablation(GRID, probes=True)).read_text())
    names = [figure["id"] for figure in data["figures"]]
    assert names == [
        *("loss-rate", "loss-step", "gradient-step", "layer-residual_rms", "layer-kurtosis"),
        *("layer-update_ratio", "differences"),
    ]
    for figure in data["figures"]:
        go.Figure(data=figure["traces"], layout=figure["layout"])  # raises on an unknown property
        assert {trace["meta"]["arm"] for trace in figure["traces"]} <= {0, 1}
    by_rate = data["figures"][0]
    marks = [trace for trace in by_rate["traces"] if trace["mode"] == "markers"]
    assert sum(len(trace["x"]) for trace in marks) == 18
    crosses = [t for t in marks if t["marker"]["symbol"] == "x-thin"]
    assert sorted(t["customdata"][0][2] for t in crosses) == ["collapsed", "diverged"]


def test_many_runs_are_thinned_to_fit(make_ablation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_ablation(GRID)
    full = len(write_report(folder).read_bytes())
    monkeypatch.setattr("minillama.ablation.report.page._MAX_DATA_BYTES", 60_000)
    page = write_report(folder).read_text()
    assert len(page.encode()) < full
    assert len(json.dumps(page_data(page), separators=(",", ":"))) < 60_000


def test_the_picture_is_large_enough_for_print(make_ablation: Any) -> None:
    folder = make_ablation(GRID)
    write_report(folder)
    with Image.open(folder / "report.png") as picture:
        assert picture.width > 1800
        assert len(picture.convert("RGB").getcolors(10**7) or []) > 50


def test_names_cannot_inject_html(make_run: Any) -> None:
    folder = make_run(
        2.0, name="<script>alert(1)</script>&<b>", sample="</code></script><img src=x>"
    )
    page = write_report(folder).read_text()
    assert "<script>alert" not in page
    assert "<img" not in page
    assert _Page(page).open == []
    assert "&lt;script&gt;alert(1)" in page


def test_a_half_finished_ablation_has_a_report(make_ablation: Any) -> None:
    folder = make_ablation(
        {"rms": {1e-3: [2.0, "missing"], 3e-3: ["missing", "missing"]}, "ln": {1e-3: [2.0, 2.0]}}
    )
    (folder / "cells/ln/lr-0.001/seed-1/summary.json").unlink()
    page = write_report(folder).read_text()
    assert "2 of 8" in page
    assert "5 cells not run yet" in page


def test_an_ablation_without_a_finished_run_has_a_report(make_ablation: Any) -> None:
    page = write_report(make_ablation({"rms": {1e-3: ["missing"], 3e-3: ["missing"]}})).read_text()
    assert "No run has ended yet" in page


def test_the_report_of_a_single_run_has_its_sample(make_run: Any) -> None:
    folder = make_run(2.0, name="tiny", sample="Once upon a time")
    path = write_report(folder)
    page = path.read_text()
    assert path == folder / "report.html"
    assert "Once upon a time" in page
    assert [f["id"] for f in page_data(page)["figures"]] == ["loss-step", "gradient-step"]
    assert (folder / "report.png").is_file()
    assert not (folder / "table.tex").exists()


def test_a_run_that_diverged_at_once_has_a_report(make_run: Any) -> None:
    page = write_report(make_run(None, steps=2)).read_text()
    assert "ended as diverged" in page


def test_the_report_is_the_same_each_time(make_ablation: Any) -> None:
    folder = make_ablation(GRID)
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


def test_tables_for_papers_and_for_analysis(make_ablation: Any) -> None:
    folder = make_ablation({"a_b": {1e-3: [2.0, 2.1]}, "c+d=1": {1e-3: [2.2, None]}})
    write_report(folder)
    tex = (folder / "table.tex").read_text()
    assert r"a\_b & 0.001 & $2.050 \pm 0.071$" in tex
    assert "1/2" in tex
    table = pq.read_table(folder / "cells.parquet")
    assert tuple(table.column_names) == COLUMNS
    assert table.column("val_loss").to_pylist() == [2.0, 2.1, 2.2, None]
    assert table.column("seed").to_pylist() == [0, 1, 0, 1]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the folder that"):
        write_report(tmp_path)
