import math

import numpy as np
import pytest

from minillama.training.stability import (
    MIN_SPIKE_HISTORY,
    SPIKE_WINDOW,
    decide_update,
    is_spike,
    is_still_falling,
    remedies,
)
from minillama.training.summary import Progress

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("rule", "dtype", "loss", "norm", "in_a_row", "expected"),
    [
        ("stop", "float32", 1.0, 1.0, 0, "apply"),
        ("stop", "float32", NAN, 1.0, 0, "stop"),
        ("stop", "bfloat16", 1.0, INF, 0, "stop"),
        ("stop", "float16", 1.0, INF, 1, "skip"),
        ("stop", "float16", 1.0, INF, 2, "stop"),
        ("stop", "float16", NAN, NAN, 0, "stop"),
        ("skip", "float32", 1.0, 1.0, 2, "apply"),
        ("skip", "float32", INF, 1.0, 1, "skip"),
        ("skip", "float32", 1.0, NAN, 2, "stop"),
        ("skip", "float16", NAN, NAN, 1, "skip"),
        ("run_on", "float32", NAN, NAN, 9, "apply"),
        ("run_on", "float16", NAN, NAN, 9, "skip"),
    ],
)
def test_what_becomes_of_an_update(tiny, rule, dtype, loss, norm, in_a_row, expected):
    fields = {"train.on_nonfinite": rule, "train.dtype": dtype, "train.max_skips": 2}
    assert decide_update(tiny(**fields).train, loss, norm, in_a_row) == expected


def test_progress_counts_skips_and_keeps_a_bounded_window():
    progress = Progress()
    for loss in [3.0, 3.1] * 100:
        assert not progress.count_step(loss, 64, 1000, skipped=False)
    for skipped in (True, True, False, True):
        progress.count_step(NAN if skipped else 3.0, 64, 1000, skipped=skipped)
    assert (progress.skipped, progress.skipped_in_a_row) == (3, 1)
    assert (progress.step, progress.tokens) == (204, 204 * 64)
    assert progress.count_step(1e9, 64, 1000, skipped=False)
    assert progress.spikes == 1
    assert len(progress.losses_before) == SPIKE_WINDOW
    assert all(map(math.isfinite, progress.losses_before))


def test_the_advice_is_what_the_config_does_not_have_yet(tiny):
    bare = {"optim.warmup_steps": 0, "optim.grad_clip": 0, "train.dtype": "float16"}
    said = remedies(tiny(**bare))
    settings = [
        "a lower optim.lr (now 0.003)",
        "a warm-up (optim.warmup_steps=1)",
        "optim.grad_clip",
    ]
    settings += ["optim.z_loss", "model.norm.qk_norm=head", "train.dtype=bfloat16"]
    for setting in settings:
        assert setting in said
    assert "\n" not in said
    careful = {"optim.warmup_steps": 4, "optim.z_loss": 1e-4, "model.norm.qk_norm": "head"}
    said = remedies(tiny(**careful))
    assert said == "try a lower optim.lr (now 0.003) or a longer optim.warmup_steps (now 4)"
    assert "qk_norm" not in remedies(tiny(**{"model.norm.placement": "hybrid"}))


def test_a_spike_stands_out_from_the_losses_before_it():
    losses = np.random.default_rng(0).normal(3, 0.1, 300).tolist()
    assert is_spike(4.0, losses[:MIN_SPIKE_HISTORY])
    assert not is_spike(3.2, losses)
    assert not is_spike(4.0, losses[: MIN_SPIKE_HISTORY - 1])
    for value in (math.nan, math.inf):  # not a spike: something else becomes of it
        assert not is_spike(value, losses)


@pytest.mark.parametrize(
    ("quarters", "expected"),
    [
        ([5.0, 4.2, 3.9, 3.7], True),  # at a rate too low: falls all along
        ([3.6, 3.43, 3.38, 3.25], False),  # at a rate too high: falls as the rate decays
        ([3.4, 3.30, 3.31, 3.28], False),  # collapsed: flat
        ([6.6, 5.0, 3.6, 3.3], False),  # rose first
        ([5.0, 4.0, 3.6, 3.7], False),  # rises at the end
        ([5.0, 4.0, NAN, 3.0], False),
    ],
)
def test_a_loss_that_falls_all_along_is_still_falling(quarters, expected):
    assert is_still_falling(6.0, quarters) is expected


def test_progress_keeps_the_mean_loss_of_each_quarter():
    progress = Progress(init_val_loss=6.0)
    assert progress.still_falling  # too few steps show no plateau
    losses = [5.5, 5.5, 4.5, 4.5, 4.5, 4.5, NAN, NAN, 4.0, 4.0, 3.8, 3.8, 3.7, 3.7, 3.5, 3.5]
    for loss in losses:
        progress.count_step(loss, 64, len(losses), skipped=math.isnan(loss))
    assert progress.quarter_sums == pytest.approx([20.0, 9.0, 15.6, 14.4])
    assert progress.quarter_steps == [4, 2, 4, 4]
    assert progress.still_falling
    progress.init_val_loss = 4.9
    assert not progress.still_falling
