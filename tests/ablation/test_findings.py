"""findings.md, and that documents quote it to the letter.

A document marks what it quotes from a shipped experiment:

    <!-- from norms/findings.md -->
    - rmsnorm and layernorm are equivalent within ±0.02 nats per token ...
    <!-- end -->
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillama.ablation.analysis import analyse_arms, compare_arms
from minillama.ablation.report import write_report
from minillama.ablation.report.quote import margin_in_steps, quotable
from minillama.ablation.results import read_results

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "configs" / "ablations"
QUOTING = [ROOT / "README.md", ROOT / "README.zh-CN.md", SHIPPED / "README.md"]
_BLOCK = re.compile(r"<!-- from ([\w-]+)/findings\.md -->\n(.*?)<!-- end -->", re.DOTALL)


def misquoted(text: str, folder: Path) -> list[str]:
    """Return the marked lines of a document that are not in the findings that they name."""
    wrong = []
    for name, block in _BLOCK.findall(text):
        path = folder / name / "findings.md"
        found = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        wrong += [line for line in block.splitlines() if line.strip() and line not in found]
    return wrong


@pytest.mark.parametrize("path", QUOTING, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_quote_the_findings_to_the_letter(path: Path) -> None:
    assert misquoted(path.read_text(encoding="utf-8"), SHIPPED) == []


def test_every_shipped_experiment_with_findings_is_quoted() -> None:
    text = (SHIPPED / "README.md").read_text(encoding="utf-8")
    quoted = {name for name, _ in _BLOCK.findall(text)}
    assert {path.parent.name for path in SHIPPED.glob("*/findings.md")} <= quoted


def test_a_changed_number_or_word_is_a_misquotation(tmp_path: Path) -> None:
    (tmp_path / "norms").mkdir()
    (tmp_path / "norms" / "findings.md").write_text("- a is 0.120 below b\n", encoding="utf-8")
    block = "<!-- from norms/findings.md -->\n{}\n<!-- end -->\n"
    assert misquoted(block.format("- a is 0.120 below b"), tmp_path) == []
    for line in ("- a is 0.121 below b", "- a is 0.120 above b", "0.120"):
        assert misquoted(block.format(line), tmp_path) == [line]
    missing = "<!-- from other/findings.md -->\nx\n<!-- end -->"
    assert misquoted(missing, tmp_path) == ["x"]


def test_findings_state_the_claim_its_interval_and_conditions(make_ablation: Any) -> None:
    grid = {
        "rms": {1e-3: [2.0, 2.01, 2.02], 1e-2: [2.5, 2.5, 2.5]},
        "ln": {1e-3: [2.2, 2.22, 2.21], 1e-2: [2.5, None, 2.5]},
    }
    folder = make_ablation(grid)
    write_report(folder)
    text = (folder / "findings.md").read_text(encoding="utf-8")
    results = read_results(folder)
    arms = analyse_arms(results)
    (c,) = compare_arms(arms, results.margin)
    quote = text.splitlines()[2]
    assert quote == quotable(results, arms, [c])
    assert f"ln − rms {c.mean:.3f} nats per token ({c.t95.low:.3f} to {c.t95.high:.3f})" in quote
    for part in ("900 k parameters", "3 seeds", "its own best of 2 learning rates (0.001 to 0.01)"):
        assert part in quote
    assert quote.endswith("`minillama ablate test/ablation.yaml out_dir=NEW_FOLDER`")
    assert "| rms | 0.001 | 2.010 ± 0.010 | 0.245 | 0 of 6 |" in text
    assert "| ln | 0.001 | 2.210 ± 0.010" in text
    assert "1 of 6 |" in text
    assert str(folder) not in text


def test_findings_of_one_seed_claim_nothing(make_ablation: Any) -> None:
    results = read_results(make_ablation({"rms": {1e-3: [2.0]}, "ln": {1e-3: [2.4]}}))
    arms = analyse_arms(results)
    assert quotable(results, arms, compare_arms(arms, results.margin)) == ""


def test_the_margin_in_steps_follows_the_slope_of_the_loss(make_ablation: Any) -> None:
    folder = make_ablation({"a": {1e-3: [2.0]}, "b": {1e-3: [2.0]}})
    # loss = 5 − 0.5 ln(step): 0.02 nats are worth e^0.04 − 1 of more steps
    lines = [f'{{"step": {n}, "loss": {5 - 0.5 * np.log(n)}}}' for n in range(1, 201)]
    (folder / "cells/a/lr-0.001/seed-0/metrics.jsonl").write_text("\n".join(lines) + "\n")
    results = read_results(folder)
    assert margin_in_steps(results, analyse_arms(results)) == pytest.approx(np.expm1(0.04))
