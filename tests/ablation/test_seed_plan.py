import math
from typing import Any

import numpy as np
import pytest

from minillama.ablation.power import difference_power, equivalence_power
from minillama.ablation.results import read_results
from minillama.ablation.seed_plan import describe_seed_plan, plan_seeds
from minillama.cli import main

BASE = [2.00, 2.05, 2.10, 2.02]
NOISE = [0.02, -0.01, 0.03, -0.02]


def grid(make_ablation: Any, **arms: list[Any]) -> Any:
    losses = {"rms": BASE, "ln": [b + d for b, d in zip(BASE, NOISE, strict=True)]} | arms
    return make_ablation({arm: {1e-3: row} for arm, row in losses.items()})


def test_the_plan_has_the_pairs_sd_and_the_fewest_seeds(make_ablation: Any) -> None:
    (plan,) = plan_seeds(read_results(grid(make_ablation)), margin=0.05)
    sd = float(np.std(NOISE, ddof=1))
    assert (plan.arm, plan.baseline, plan.n_pairs) == ("ln", "rms", 4)
    assert plan.sd == pytest.approx(sd)
    assert plan.sd_low < sd < plan.sd_high
    for power, same, nearly, different in zip(
        (0.8, 0.9), plan.same, plan.nearly_same, plan.different, strict=True
    ):
        assert None not in (same, nearly, different)
        assert equivalence_power(same - 1, sd, 0.05) < power <= equivalence_power(same, sd, 0.05)
        assert equivalence_power(nearly, sd, 0.05, 0.0125) >= power
        assert difference_power(different - 1, sd, 0.05) < power
        assert same <= nearly
    assert plan.seconds == pytest.approx(25.0)  # 12.5 s for each of the two cells, one worker


def test_a_pilot_of_simulated_noise_finds_the_number_that_the_truth_needs(
    make_ablation: Any,
) -> None:
    rng = np.random.default_rng(2)
    base = rng.normal(2, 0.1, 40)
    folder = make_ablation(
        {"a": {1e-3: base.tolist()}, "b": {1e-3: (base + rng.normal(0, 0.024, 40)).tolist()}},
        steps=20,
    )
    (plan,) = plan_seeds(read_results(folder), margin=0.02)
    assert plan.sd_low < 0.024 < plan.sd_high
    assert plan.same[0] is not None
    assert abs(plan.same[0] - 14) <= 5  # what 0.024 itself needs at 80 %: 14


def test_an_arm_with_one_pair_is_named_and_the_others_are_planned(make_ablation: Any) -> None:
    text = describe_seed_plan(
        read_results(grid(make_ablation, new=[2.0, "missing", "missing", "missing"]))
    )
    assert "ln − rms" in text
    assert "new − rms" not in text
    assert text.splitlines()[-1].startswith("too few pairs for new: at least two seeds")


def test_a_grid_without_pairs_is_one_line(make_ablation: Any) -> None:
    folder = make_ablation({"rms": {1e-3: [2.0]}, "ln": {1e-3: ["missing"]}})
    text = describe_seed_plan(read_results(folder))
    assert "\n" not in text
    assert text.startswith("too few pairs for ln")


def test_equal_losses_need_two_seeds(make_ablation: Any) -> None:
    (plan,) = plan_seeds(read_results(make_ablation({a: {1e-3: BASE} for a in ("rms", "ln")})))
    assert plan.sd == 0
    assert plan.same == (2, 2)


def test_power_on_the_command_line_trains_nothing(
    make_ablation: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = grid(make_ablation)
    before = sorted(path for path in folder.rglob("*"))
    command = ["ablate", str(folder / "ablation.yaml"), f"out_dir={folder}", "margin=0.05"]
    assert main([*command, "--power"]) == 0
    out = capsys.readouterr().out
    assert "margin ±0.05" in out
    assert "ln − rms" in out
    assert sorted(path for path in folder.rglob("*")) == before
    assert main([*command, "--power", "--dry-run"]) == 2
    assert main([*command[:2], "out_dir=nowhere", "--power"]) == 2
    assert "run the ablation first" in capsys.readouterr().err


def test_unknown_times_leave_only_the_seeds(make_ablation: Any) -> None:
    losses = {"rms": {1e-3: BASE}, "ln": {1e-3: [b + 0.01 * i for i, b in enumerate(BASE)]}}
    results = read_results(make_ablation(losses, seconds=None))
    (plan,) = plan_seeds(results)
    assert math.isnan(plan.seconds)
    assert " s)" not in describe_seed_plan(results)
