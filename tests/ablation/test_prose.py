"""The sentences claim no more than the numbers show."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from minillama.ablation.analysis import analyse_arms, compare_arms
from minillama.ablation.report.prose import (
    cautions,
    equal_start,
    findings,
    headline,
    join_some,
)
from minillama.ablation.report.wording import format_p_value
from minillama.ablation.results import read_results

BASE = [2.000, 2.010, 1.990, 2.005, 1.995, 2.002, 2.011]


def sentences(folder: Path) -> tuple[str, str, str]:
    results = read_results(folder)
    arms = analyse_arms(results)
    comparisons = compare_arms(arms, results.margin)
    return (
        headline(results, arms, comparisons),
        " ".join(findings(results, arms, comparisons)),
        " ".join(cautions(results, arms)),
    )


def two_arms(make_ablation: Any, deltas: list[float]) -> tuple[str, str, str]:
    other = [base + delta for base, delta in zip(BASE, deltas, strict=False)]
    return sentences(make_ablation({"rms": {1e-3: BASE[: len(deltas)]}, "ln": {1e-3: other}}))


def test_one_seed_is_never_a_finding(make_ablation: Any) -> None:
    said, found, against = two_arms(make_ablation, [0.4])
    assert said.startswith("One seed proves nothing")
    assert "another seed may reverse this" in found
    assert "p = " not in found.replace("\N{NO-BREAK SPACE}", " ")
    assert "1 seed: a sound comparison needs at least 3" in against


def test_noise_is_not_separable(make_ablation: Any) -> None:
    said, found, _ = two_arms(make_ablation, [0.05, -0.06, 0.04])
    assert said.startswith("Not separable")
    assert "cannot be distinguished" in found
    assert "nor shown equivalent" in found


def test_no_difference_found_is_not_called_the_same(make_ablation: Any) -> None:
    said, found, _ = two_arms(make_ablation, [0.02, -0.03, 0.02, -0.02])
    assert "As good" not in said
    assert "are equivalent" not in found


def test_equivalence_needs_its_own_test_and_names_its_margin(make_ablation: Any) -> None:
    said, found, _ = two_arms(make_ablation, [0.003, -0.002, 0.001, -0.001, 0.002])
    assert said == "As good as its baseline within ±0.02 nats per token: ln."
    assert "ln and rms are equivalent within ±0.02 nats per token" in found
    assert "90% interval" in found


def test_a_clear_difference_names_the_limit_of_the_sign_flip_test(
    make_ablation: Any,
) -> None:
    said, found, _ = two_arms(make_ablation, [0.2, 0.21, 0.19, 0.2])
    assert said.startswith("Higher loss than its baseline: ln")
    assert "ln ended 0.200 nats per token above rms" in found
    assert "cannot reach p < .05 with fewer than 6 pairs" in found


def test_enough_pairs_give_a_sign_flip_test(make_ablation: Any) -> None:
    said, found, _ = two_arms(make_ablation, [-0.2, -0.21, -0.19, -0.2, -0.2, -0.18, -0.22])
    assert said.startswith("Lower loss than its baseline: ln")
    assert "The sign-flip test gives p = .016" in found.replace("\N{NO-BREAK SPACE}", " ")


def test_a_difference_below_the_margin_is_reported_as_such(make_ablation: Any) -> None:
    _, found, _ = two_arms(make_ablation, [0.005, 0.0051, 0.0049, 0.005, 0.005])
    assert "ln ended 0.005 nats per token above rms" in found
    assert "Still, the two are equivalent within ±0.02" in found


def test_failures_are_in_the_headline_and_counted_by_fate(make_ablation: Any) -> None:
    said, found, _ = sentences(
        make_ablation(
            {
                "pre": {1e-3: [2.0, 2.1], 1e-2: [2.1, 2.3]},
                "post": {1e-3: [2.1, 2.1], 1e-2: [4.95, None]},
            }
        )
    )
    assert said.endswith("2 of 8 runs failed.")
    assert "Of 8 runs that ended, 1 diverged and 1 collapsed." in found
    # its loss, 4.95, is 0.05 above the line
    assert "2 with it 0.1 lower, 2 with it 0.05 lower" in found
    assert "1 with it 0.1 higher. Compare the losses" in found


def test_the_headline_counts_arms_that_are_too_many_to_name(make_ablation: Any) -> None:
    noise = [0.0, 0.001, -0.001]
    arms = {f"arm{n}": {1e-3: [2.0 + 0.1 * n + n * d for d in noise]} for n in range(7)}
    said, _, _ = sentences(make_ablation(arms))
    assert said.startswith("Higher loss than its baseline: 6 of 6 arms")
    assert "failed" not in said


def test_an_arm_far_behind_is_not_ranked_by_its_sensitivity(make_ablation: Any) -> None:
    good, flat = {1e-3: [2.0, 2.1], 1e-2: [2.6, 2.7]}, {1e-3: [3.2, 3.2], 1e-2: [3.2, 3.21]}
    _, found, _ = sentences(make_ablation({"good": good, "flat": flat}))
    assert "0.300 for good." in found
    assert "Not ranked by S, because their best loss is more than 0.1 nats" in found
    assert "best arm's: flat." in found
    assert "interval of its difference" not in found


def test_few_seeds_at_the_best_rate_are_a_caution(make_ablation: Any) -> None:
    three = {"a": {1e-3: [2.0, 2.1, 2.2]}, "b": {1e-3: [2.0, 2.1, 2.2]}}
    assert (
        "As few as 3 seeds at the best learning rate (a and b)"
        in sentences(make_ablation(three))[2]
    )
    five = {arm: {1e-3: [2.0, 2.1, 2.2, 2.3, 2.4]} for arm in "ab"}
    assert "As few as" not in sentences(make_ablation(five, name="five"))[2]


def test_arms_at_other_values_of_an_axis_may_start_from_other_weights(make_ablation: Any) -> None:
    folder = make_ablation({"rms": {1e-3: [2.0]}, "ln": {1e-3: [2.1]}})
    ablation = yaml.safe_load((folder / "ablation.yaml").read_text())
    ablation["axes"] = {"model.n_layers": [2, 4]}
    (folder / "ablation.yaml").write_text(yaml.safe_dump(ablation))
    for layers in (2, 4):
        for arm in ("rms", "ln"):
            cell = folder / f"cells/{arm}+n_layers={layers}"
            shutil.copytree(folder / "cells" / arm, cell)
            path = cell / "lr-0.001/seed-0/summary.json"
            entries = {"weights_hash": f"w{layers}", "tokens": 100 * layers}
            path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    assert "hashes differ" not in sentences(folder)[2]
    assert "number of tokens" not in sentences(folder)[2]
    assert "as its baseline (hashes equal)" in equal_start(read_results(folder))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weights_hash": "w2"}))
    assert "the hashes differ for seed 0" in sentences(folder)[2]


def test_a_best_rate_on_the_edge_asks_for_a_longer_grid(make_ablation: Any) -> None:
    _, _, against = sentences(
        make_ablation(
            {
                "rms": {1e-3: [2.0], 3e-3: [1.9], 1e-2: [2.0]},
                "ln": {1e-3: [2.0], 3e-3: [1.9], 1e-2: [1.8]},
            }
        )
    )
    assert "ln's best learning rate, 0.01, is the highest of the grid" in against
    assert "rms's best" not in against
    assert "3 learning rates: a sound comparison needs at least 6" in against


def test_gaps_and_crashes_are_listed(make_ablation: Any) -> None:
    folder = make_ablation({"rms": {1e-3: [2.0, 2.0]}, "ln": {1e-3: ["missing", 2.0]}})
    (folder / "cells/rms/lr-0.001/seed-1/summary.json").unlink()
    (folder / "cells.csv").write_text(
        "arm,lr,seed,fate,error\nrms,0.001,1,crashed,the worker was ended by SIGKILL\n"
    )
    _, _, against = sentences(folder)
    assert "1 cell not run yet" in against
    assert "rms at 0.001, seed 1, crashed" in against
    assert "SIGKILL" in against


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("weights_hash", "other", "the same initial weights"),
        ("data_hash", "other", "the same batches"),
        ("tokens", 7, "the same number of tokens"),
        ("threads", 9, "different thread counts"),
        ("versions", {"torch": "1"}, "different versions"),
    ],
)
def test_unequal_conditions_are_a_caution(
    make_ablation: Any, key: str, value: Any, expected: str
) -> None:
    folder = make_ablation({"rms": {1e-3: [2.0]}, "ln": {1e-3: [2.1]}})
    assert expected not in sentences(folder)[2]
    assert "had the same batches" in equal_start(read_results(folder))
    path = folder / "cells/ln/lr-0.001/seed-0/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert expected in sentences(folder)[2]
    if key.endswith("hash"):
        assert equal_start(read_results(folder)) == ""


def test_a_single_run_compares_nothing(make_run: Any) -> None:
    said, found, against = sentences(make_run(2.0))
    assert "Validation loss 2.000 nats per token after 200 steps, from 6.200" in said
    assert "A single run compares nothing" in said
    assert (found, against) == ("", "")


def test_a_run_that_has_not_finished_says_so(make_run: Any) -> None:
    folder = make_run(2.0)
    (folder / "summary.json").unlink()
    assert "has not finished (200 training steps" in sentences(folder)[0]


def test_an_ablation_with_nothing_finished_has_no_verdict(make_ablation: Any) -> None:
    folder = make_ablation({"rms": {1e-3: ["missing"]}, "ln": {1e-3: ["missing"]}})
    assert sentences(folder)[0] == "No run has ended yet: there is nothing to report."


def test_p_values_and_lists_of_arms_as_text() -> None:
    assert format_p_value(0.0312).replace("\N{NO-BREAK SPACE}", " ") == "p = .031"
    assert format_p_value(1e-5).replace("\N{NO-BREAK SPACE}", " ") == "p < .001"
    assert join_some(["a", "b"], 2) == "a and b"
    assert join_some(["a, 1", "b, 1"], 2) == "a, 1; and b, 1"
    assert join_some([*"abcdef"], 9) == "6 of 9 arms"


def test_an_unadjusted_interval_that_excludes_zero_is_not_left_alone(make_ablation: Any) -> None:
    deltas = [0.030, 0.005, 0.022, 0.040, 0.004, 0.012, 0.001]  # p .02 alone
    noise = [0.05, -0.06, 0.04, -0.02, 0.03, -0.05, 0.01]
    losses = {"rms": {1e-3: BASE}, "ln": {1e-3: [b + d for b, d in zip(BASE, deltas, strict=True)]}}
    alone = sentences(make_ablation(losses, name="alone"))[1]
    assert "ln ended 0.016 nats per token above rms" in alone
    for i, arm in enumerate(("a", "b", "c")):
        shifted = noise[i:] + noise[:i]
        losses[arm] = {1e-3: [b + d for b, d in zip(BASE, shifted, strict=True)]}
    beside = sentences(make_ablation(losses, name="beside"))[1]
    assert "ln and rms cannot be distinguished" in beside
    assert "This interval alone excludes zero; with 4 comparisons that is not enough" in beside


def test_a_difference_of_s_is_adjusted_for_the_arms(make_ablation: Any) -> None:
    high = [2.4, 2.5, 2.45, 2.55, 2.42]
    gaps = [0.02, 0.10, 0.06, 0.01, 0.09]  # p .03 alone
    arms = {"rms": {1e-3: BASE[:5], 3e-3: high}}
    arms["ln"] = {1e-3: BASE[:5], 3e-3: [h + g for h, g in zip(high, gaps, strict=True)]}
    alone = sentences(make_ablation(arms, name="alone"))[1]
    assert "Its difference to the baseline is shown for ln 0.0" in alone
    for i in range(3):
        arms[f"arm{i}"] = {1e-3: BASE[:5], 3e-3: high[i:] + high[:i]}
    beside = sentences(make_ablation(arms, name="beside"))[1]
    assert "No difference of S is shown between an arm and its baseline" in beside
