import json
import math

import pytest

from minillama.training.summary import Progress, fate, hash_config, summarise

FACTS = {"n_params": 7, "n_norm_params": 1, "unigram_entropy": 3.0, "device": "cpu"}


@pytest.mark.parametrize(
    ("final", "expected"),
    [
        (2.0, "ok"),
        (2.9 - 1e-9, "ok"),
        (2.9, "collapsed"),
        (4.9, "collapsed"),
        (5.0, "diverged"),
        (math.nan, "diverged"),
        (math.inf, "diverged"),
    ],
)
def test_fate_by_the_final_loss(final, expected):
    assert fate(final, 5.0, 3.0) == expected


def test_a_loss_still_falling_above_the_line_is_undertrained():
    assert fate(2.9, 5.0, 3.0, still_falling=True) == "undertrained"
    assert fate(2.89, 5.0, 3.0, still_falling=True) == "ok"
    assert fate(5.0, 5.0, 3.0, still_falling=True) == "diverged"


def test_a_summary_holds_the_distance_to_the_line(tiny):
    config = tiny(**{"train.steps": 20})
    progress = Progress(step=20, evaluated_step=20, init_val_loss=5.0, val_loss=3.2)
    ended = summarise(config, progress, FACTS, fate="collapsed")
    assert ended["distance_to_collapse"] == pytest.approx(0.3)
    assert ended["still_falling"] is False
    unfinished = summarise(config, progress, FACTS, fate=None)
    assert (unfinished["distance_to_collapse"], unfinished["still_falling"]) == (None, None)


def test_a_loss_at_init_below_the_unigram_entropy_is_divergence_first():
    assert fate(2.95, 2.5, 3.0) == "diverged"


def result(loss):
    return {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss * 2}


def test_the_best_is_never_the_model_at_init():
    progress = Progress()
    assert not progress.add_validation(result(1.0))
    best = []
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.0), (4, 2.5)):
        progress.step = step
        best.append(progress.add_validation(result(loss)))
    assert best == [True, True, False, False]
    assert (progress.init_val_loss, progress.best_val_loss, progress.best_step) == (1.0, 2.0, 2)
    assert (progress.val_loss, progress.evaluated_step) == (2.5, 4)


def test_the_training_loss_is_the_mean_of_the_last_ten_logged(tiny):
    progress = Progress()
    for loss in range(15):
        progress.add_loss(float(loss))
    assert summarise(tiny(), progress, FACTS, fate=None)["train_loss"] == 9.5


def test_a_summary_is_valid_json_whatever_happened(tiny):
    progress = Progress(step=3, tokens=12, training_seconds=2.0, init_val_loss=math.inf)
    progress.add_loss(math.nan)
    summary = summarise(tiny(), progress, FACTS, fate="diverged")
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["finished"]
    assert summary["tokens_per_s"] == 6.0
    assert [summary[key] for key in ("train_loss", "val_loss", "init_val_loss")] == [None] * 3


def test_the_hash_of_a_config_covers_what_decides_the_numbers(tiny):
    same = tiny(out="elsewhere", name="other", loggers=["tensorboard"])
    assert hash_config(tiny()) == hash_config(same)
    assert hash_config(tiny()) != hash_config(tiny(**{"train.seed": 1}))
    assert hash_config(tiny()) != hash_config(tiny(**{"model.norm.kind": "layernorm"}))
