"""The cost of a step is compared within pairs of cells."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minillama.ablation.analysis import analyse_arms
from minillama.ablation.report.cost import costs
from minillama.ablation.results import read_results


def timed(folder: Path, seconds: Any, **entries: Any) -> Path:
    for path in folder.rglob("summary.json"):
        arm, lr, seed = path.parts[-4:-1]
        summary = json.loads(path.read_text())
        key = arm, float(lr.removeprefix("lr-")), int(seed.removeprefix("seed-"))
        path.write_text(json.dumps(summary | {"training_seconds": seconds(*key)} | entries))
    return folder


def test_the_ratio_is_that_within_pairs(make_ablation: Any) -> None:
    grid = {arm: {1e-3: [2.0, 2.0, 2.0], 1e-2: [2.5, 2.5, None]} for arm in ("base", "arm")}
    rng = np.random.default_rng(0)
    load = {(lr, seed): rng.uniform(1, 9) for lr in (1e-3, 1e-2) for seed in range(3)}

    def seconds(arm: str, lr: float, seed: int) -> float:  # noise far above the ratio
        return float(load[lr, seed]) * (0.9 + 0.01 * seed if arm == "arm" else 1.0)

    found = costs(analyse_arms(read_results(timed(make_ablation(grid), seconds))))
    assert found["arm"].n_pairs == 6
    logs = np.log([0.9, 0.91, 0.92] * 2)
    half = 2.5706 * logs.std(ddof=1) / np.sqrt(6)
    assert found["arm"].ratio == pytest.approx(np.exp(logs.mean()))
    assert found["arm"].t95.high == pytest.approx(np.exp(logs.mean() + half), rel=1e-4)
    assert np.isnan(found["base"].ratio)
    assert found["base"].seconds == pytest.approx(
        np.median([load[lr, s] / (100 if (lr, s) == (1e-2, 2) else 200) for lr, s in load])
    )


def test_runs_without_times_have_no_cost(make_ablation: Any) -> None:
    folder = make_ablation({"a": {1e-3: [2.0]}, "b": {1e-3: [2.0]}})
    assert costs(analyse_arms(read_results(folder))) == {}
