"""Verdicts on hypotheses, against the tests that they name and simulated data of known truth."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from minillama.ablation.analysis import analyse_arms, compare_arms
from minillama.ablation.grid import Place
from minillama.ablation.hypotheses import record_hypotheses
from minillama.ablation.hypothesis_tests import HypothesisResult, check_hypotheses
from minillama.ablation.report.hypotheses import hypothesis_sentences
from minillama.ablation.report.prose import findings
from minillama.ablation.results import read_results
from minillama.ablation.sequential import repeated_less
from minillama.ablation.statistics import t_test, tost
from minillama.config.ablation import load_ablation

BASE = [2.0, 2.01, 2.02, 1.99, 2.0, 2.01]
LOWER = [1.9, 1.92, 1.9, 1.9, 1.91, 1.9]
LR = 1e-3
HIGH = 1e-1
GRID = {
    "rms": {LR: BASE, HIGH: [5.5] * 6},
    "new": {LR: LOWER, HIGH: [3.0] * 5 + [5.5]},
}


def claim(name: str, what: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "arm": "new", "claim": what, **fields}


@pytest.fixture
def claimed(make_ablation: Any) -> Any:
    """Return a function that makes an ablation with planned hypotheses."""

    def make(*hypotheses: dict[str, Any], grid: Any = GRID) -> Path:
        folder: Path = make_ablation(grid)
        path = folder / "ablation.yaml"
        raw = yaml.safe_load(path.read_text())
        raw |= {"hypotheses": list(hypotheses), "out_dir": str(folder)}
        path.write_text(yaml.safe_dump(raw))
        record_hypotheses(load_ablation(path), [])
        return folder

    return make


def checked(folder: Path) -> dict[str, HypothesisResult]:
    results = read_results(folder)
    found = check_hypotheses(results, analyse_arms(results))
    return {each.recorded.hypothesis.name: each for each in found}


def test_each_claim_has_its_own_test(claimed: Any) -> None:
    claims = ("same", "lower", "higher", "different")
    found = checked(claimed(*(claim(name, name) for name in claims)))
    d = np.subtract(LOWER, BASE)
    assert found["same"].p == pytest.approx(float(tost(d, 0.02)))
    assert found["lower"].p == pytest.approx(stats.ttest_1samp(d, 0, alternative="less").pvalue)
    assert found["higher"].p == pytest.approx(1 - found["lower"].p)
    assert found["different"].p == pytest.approx(float(t_test(d)))
    assert [name for name, each in found.items() if each.is_shown] == ["lower", "different"]
    assert [name for name, each in found.items() if each.refuted] == ["same", "higher"]
    assert found["lower"].p_holm == pytest.approx(4 * found["lower"].p)


def test_failures_and_sensitivity_are_tested_too(claimed: Any) -> None:
    found = checked(
        claimed(
            claim("fails", "lower", measure="failures", rate=HIGH),
            claim("fails-other", "different", measure="failures", rate=HIGH),
            claim("s", "lower", measure="S"),
        )
    )
    assert found["fails"].mean == pytest.approx(-5 / 6)
    assert found["fails"].p == pytest.approx(0.5**5)
    assert found["fails-other"].p == pytest.approx(2 * 0.5**5)
    assert found["fails"].interval.high < 0
    assert found["s"].mean < -0.5
    assert found["s"].n_pairs == 6


def test_a_rate_of_its_own_is_compared_there(claimed: Any) -> None:
    found = checked(claimed(claim("at-high", "lower", rate=HIGH)))
    assert found["at-high"].mean == pytest.approx((5 * -2.5 + 0.0) / 6)


def test_planned_hypotheses_are_adjusted_among_themselves(claimed: Any) -> None:
    folder = claimed(claim("a", "lower"), claim("b", "different"))
    path = folder / "ablation.yaml"
    raw = yaml.safe_load(path.read_text())
    raw["hypotheses"].append(claim("late", "lower"))
    path.write_text(yaml.safe_dump(raw))
    record_hypotheses(load_ablation(path), [Place("new", LR, 0)])
    found = checked(folder)
    assert found["late"].p_holm == found["late"].p
    assert found["a"].p_holm == pytest.approx(2 * found["a"].p)
    said = hypothesis_sentences(read_results(folder), analyse_arms(read_results(folder)))
    assert [text.split(" (")[0] for text in said[:3]] == [
        "Planned",
        "Planned",
        "Added after 1 of its runs had ended",
    ]


def test_the_report_separates_what_was_planned_from_what_was_found(claimed: Any) -> None:
    folder = claimed(claim("as-good", "same"))
    results = read_results(folder)
    arms = analyse_arms(results)
    said = findings(results, arms, compare_arms(arms, results.margin))
    sha = json.loads((folder / "hypotheses.json").read_text())[0]["sha256"]
    assert said[0].startswith("Planned (as-good, 20")
    assert f"sha256 {sha[:8]}): the loss of new is the same as rms's within ±0.02" in said[0]
    assert "at their best learning rates. Refuted: −0.100, 95% interval" in said[0]
    assert "adjusted for 1 planned hypothesis." in said[0]
    assert said[1] == "What follows was not planned: it was found in these results."
    assert "new ended 0.100 nats per token below rms" in said[2]


def test_a_dropped_hypothesis_is_still_reported(claimed: Any) -> None:
    folder = claimed(claim("gone", "same"))
    path = folder / "ablation.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"hypotheses": []}))
    results = read_results(folder)
    (said, _) = hypothesis_sentences(results, analyse_arms(results))
    assert "the config no longer has it" in said


def test_fewer_than_two_seeds_test_nothing(claimed: Any) -> None:
    folder = claimed(claim("early", "lower"), grid={"rms": {LR: [2.0]}, "new": {LR: [1.0]}})
    results = read_results(folder)
    assert not checked(folder)["early"].is_shown
    assert "Not tested yet: 1 seed shared" in " ".join(
        hypothesis_sentences(results, analyse_arms(results))
    )


def test_a_one_sided_claim_is_made_no_more_often_than_its_level() -> None:
    d = np.random.default_rng(3).normal(0, 0.02, (800, 24))
    looks = (6, 12, 24)
    shown = [min(repeated_less(row[:n], looks, k) for k, n in enumerate(looks)) for row in d]
    rate = float(np.mean(np.array(shown) < 0.05))
    assert 0.02 < rate < 0.05 + 4 * 0.0077 + 0.003
