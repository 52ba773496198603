from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from minillama.ablation.analysis import ArmResult, analyse_arms
from minillama.ablation.interactions import compare_over_axes
from minillama.ablation.report.inference import interaction_sentences
from minillama.ablation.results import read_results

WriteRun = Callable[..., Path]
LR = 1e-3


def arms_of(tmp_path: Path, write_run: WriteRun, losses: dict[str, Sequence[float]]) -> Any:
    """Write an ablation of pre and post with two inits; ``losses`` has each arm's by seed."""
    root = tmp_path / "axes"
    root.mkdir()
    config = {
        "name": "axes",
        "base": {"tokenizer": {"kind": "byte"}},
        "arms": {"pre": {}, "post": {"model.norm.placement": "post"}},
        "axes": {"model.init.kind": ["normal", "fan_in"]},
        "baseline": "pre",
        "lr": [LR],
        "seeds": list(range(len(next(iter(losses.values()))))),
    }
    (root / "ablation.yaml").write_text(yaml.safe_dump(config))
    for arm, row in losses.items():
        for seed, loss in enumerate(row):
            write_run(root / "cells" / arm / f"lr-{LR:g}" / f"seed-{seed}", loss, seed=seed)
    return root


def simulated(effect: float, n: int = 8) -> dict[str, Sequence[float]]:
    rng = np.random.default_rng(1)
    means = {("pre", "normal"): 2.0, ("post", "normal"): 2.1, ("pre", "fan_in"): 2.2}
    means["post", "fan_in"] = 2.3 + effect
    return {
        f"{arm}+kind={init}": (mean + rng.normal(0, 0.01, n)).tolist()
        for (arm, init), mean in means.items()
    }


def analysed(root: Path) -> list[ArmResult]:
    return analyse_arms(read_results(root))


def test_a_difference_of_differences_is_a_t_test_of_both(tmp_path: Path, write_run: Any) -> None:
    losses = simulated(-0.15)
    (found,) = compare_over_axes(analysed(arms_of(tmp_path, write_run, losses)))
    assert (found.arm, found.baseline, found.axis) == ("post", "pre", "kind")
    assert (found.value, found.reference, found.elsewhere) == ("fan_in", "normal", "")
    at = {name: np.array(row) for name, row in losses.items()}
    d = (at["post+kind=fan_in"] - at["pre+kind=fan_in"]) - (
        at["post+kind=normal"] - at["pre+kind=normal"]
    )
    reference = stats.ttest_1samp(d, 0)
    assert found.mean == pytest.approx(d.mean())
    assert found.p_t == found.p_holm == pytest.approx(reference.pvalue)
    interval = reference.confidence_interval(0.95)
    assert (found.t95.low, found.t95.high) == pytest.approx((interval.low, interval.high))
    (said,) = interaction_sentences([found])
    assert said.startswith("The difference post − pre depends on kind: it is 0.1")
    assert "lower with fan_in than with normal" in said


def test_equal_differences_are_no_interaction(tmp_path: Path, write_run: Any) -> None:
    found = compare_over_axes(analysed(arms_of(tmp_path, write_run, simulated(0.0))))
    (said,) = interaction_sentences(found)
    assert said.startswith("Whether an arm's difference depends on kind is not shown")


def test_without_axes_or_shared_seeds_there_is_no_interaction(
    make_ablation: Any, tmp_path: Path, write_run: Any
) -> None:
    plain = make_ablation({"rms": {LR: [2.0, 2.1]}, "ln": {LR: [2.0, 2.2]}})
    assert compare_over_axes(analysed(plain)) == []
    one = {name: row[:1] for name, row in simulated(0.1).items()}
    assert compare_over_axes(analysed(arms_of(tmp_path, write_run, one))) == []
    assert interaction_sentences([]) == []
