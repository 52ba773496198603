from typing import Any

import pytest
from scipy import stats

from minillama.ablation.analysis import analyse_arms
from minillama.ablation.failures import compare_failures
from minillama.ablation.report.inference import failure_rates
from minillama.ablation.results import read_results
from minillama.ablation.statistics import rate_difference_interval

GOOD = 2.0


def compared(make_ablation: Any, rms: list[Any], ln: list[Any]) -> Any:
    low = [GOOD + i / 100 for i in range(len(rms))]
    folder = make_ablation({"rms": {1e-3: low, 0.3: rms}, "ln": {1e-3: low, 0.3: ln}})
    return compare_failures(analyse_arms(read_results(folder)))


def test_failures_are_compared_by_seed_where_a_run_failed(make_ablation: Any) -> None:
    rms = [GOOD] * 9 + [None]
    ln = [None] * 8 + [GOOD, None]
    (found,) = compared(make_ablation, rms, ln)
    assert (found.arm, found.baseline, found.lr, found.n_seeds) == ("ln", "rms", 0.3, 10)
    assert (found.failed, found.baseline_failed) == (9, 1)
    assert found.difference == pytest.approx(0.8)
    ends = rate_difference_interval(both=1, first=8, second=0, neither=1)
    assert (found.rate95.low, found.rate95.high) == ends
    assert found.p == found.p_holm == pytest.approx(stats.binomtest(8, 8).pvalue)
    said = failure_rates([found])
    assert said.startswith("ln fails more often than rms at 0.3: 9 of 10 against 1 of 10 (95%")


def test_a_few_failures_are_said_with_an_interval_and_no_verdict(make_ablation: Any) -> None:
    found = compared(make_ablation, [GOOD] * 6, [None] * 5 + [GOOD])
    said = failure_rates(found).replace("\N{NO-BREAK SPACE}", " ")
    assert said.startswith("No difference in how often runs fail is shown: ln at 0.3, 5 of 6")
    assert "interval of the difference" in said
    assert "p = .062" in said or "p = .063" in said


def test_a_missing_run_is_no_failure_and_no_failure_is_no_sentence(make_ablation: Any) -> None:
    found = compared(make_ablation, [None, GOOD, None], ["missing", GOOD, None])
    assert [(each.n_seeds, each.failed, each.baseline_failed) for each in found] == [(2, 1, 1)]
    assert failure_rates([]) == ""
