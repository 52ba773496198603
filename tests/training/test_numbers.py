"""NaN, inf and spikes at a chosen step: in the loss, a gradient, the data, the weights, float16."""

import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minillama.config.run import parse_run
from minillama.data.batches import Batches
from minillama.data.prepare import prepare
from minillama.errors import CheckpointError, DataError, DivergedError, InterruptedRunError
from minillama.model.transformer import Transformer
from minillama.training.checkpoint import load_checkpoint, read_checkpoint
from minillama.training.metrics import read_metrics
from minillama.training.run_folder import RunFolder
from minillama.training.trainer import train

INF, NAN = math.inf, math.nan
SKIP = {"train.on_nonfinite": "skip", "train.eval_every": 0}


def run(config, **flags):
    return train(config, progress=False, **flags)


def lines_of(config):
    lines = read_metrics(Path(config.out_dir) / "metrics.jsonl")
    return {line["step"]: line for line in lines if "loss" in line}


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def last(config):
    return read_checkpoint(Path(config.out_dir) / "checkpoints" / "last", for_resume=True)


@pytest.fixture
def poison(monkeypatch):
    """Return a function that spoils a training loss, or its gradient, at some steps.

    A step is known by its batch, not by a count of calls, so that a resumed run meets it again.
    """
    original, plan, at = Transformer.loss_sums, {}, {"step": 0}

    def loss_sums(self, *args):
        sums = original(self, *args)
        if torch.is_inference_mode_enabled() or at["step"] not in plan:
            return sums
        where, value = plan[at["step"]]
        if where == "loss":
            return sums._replace(
                objective=sums.objective * value, cross_entropy=sums.cross_entropy * value
            )
        weight = self.blocks[0].mlp.up_proj.weight
        handle = weight.register_hook(lambda g: (handle.remove(), g * value)[1])
        return sums

    monkeypatch.setattr(Transformer, "loss_sums", loss_sums)

    batch_at = Batches.batch_at

    def counted(self, index, rows):
        at["step"] = index + 1
        return batch_at(self, index, rows)

    monkeypatch.setattr(Batches, "batch_at", counted)
    return plan


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_the_run_stops_before_the_update_with_advice(tiny, poison, where, value):
    poison[5] = (where, value)
    config = tiny(**{"train.save_every": 4, "train.eval_every": 0})
    with pytest.raises(DivergedError, match=f"the {where}.* of step 5 is not finite") as caught:
        run(config)
    said = str(caught.value)
    assert "step-000004" in said
    assert "try a lower optim.lr" in said
    assert "optim.z_loss" in said
    assert caught.value.exit_status == 3
    summary = RunFolder(Path(config.out_dir)).read_summary()
    assert (summary["fate"], summary["steps"], summary["skipped"]) == ("diverged", 4, 0)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_an_update_is_skipped_counted_and_changes_nothing(tiny, poison, where, value):
    poison.update({3: (where, value), 4: (where, value), 7: (where, value)})
    config = tiny(**SKIP, **{"train.save_every": 1, "train.keep_last": 9, "train.log_every": 5})
    summary = run(config)
    assert (summary["skipped"], summary["steps"], summary["finished"]) == (3, 8, True)
    lines = lines_of(config)
    assert {step: line.get("skipped") for step, line in lines.items()} == {
        3: 1,
        4: 2,
        7: 3,  # each is logged, whether a line is due or not
        5: None,
        8: None,
    }
    weights = {
        step: read_checkpoint(
            Path(config.out_dir) / "checkpoints" / f"step-{step:06d}", for_resume=True
        ).weights
        for step in (2, 3, 4, 5)
    }
    for name in weights[2]:
        assert torch.equal(weights[2][name], weights[4][name])
    assert any(not torch.equal(weights[4][name], weights[5][name]) for name in weights[4])
    assert math.isfinite(summary["train_loss"])
    moments = last(config).state["optimizer"]
    assert moments["embed.weight.step"] == 5  # Adam counts the updates that were made


def test_the_steps_after_a_skip_see_the_batches_they_would_have_seen(tiny, poison, before_step):
    seen = []
    for out, bad in (("good", {}), ("bad", {4: ("loss", NAN)})):
        poison.clear()
        poison.update(bad)
        config = tiny(out, **SKIP)
        run(config)
        seen.append({step: (line["lr"], line["tokens"]) for step, line in lines_of(config).items()})
    assert seen[0] == seen[1]


def test_one_skip_too_many_in_a_row_stops_the_run(tiny, poison):
    poison.update(dict.fromkeys((2, 3, 5, 6, 7), ("gradient", NAN)))
    config = tiny(**SKIP, **{"train.max_skips": 2, "train.save_every": 1})
    with pytest.raises(DivergedError, match=r"of step 7 is not finite.*nor were the 2 before it"):
        run(config)
    summary = RunFolder(Path(config.out_dir)).read_summary()
    assert (summary["skipped"], summary["fate"], summary["steps"]) == (4, "diverged", 6)
    assert summary["val_loss"] is None


def test_skips_go_on_counting_through_a_resume_to_the_bit(tiny, poison, before_step, monkeypatch):
    poison.update(dict.fromkeys((3, 5, 6, 8), ("loss", NAN)))
    fields = SKIP | {"train.max_skips": 2, "train.steps": 9}
    whole, parts = tiny("whole", **fields), tiny("parts", **fields)
    expected = run(whole)
    before_step(6, interrupt)  # in the middle of two skips
    with pytest.raises(InterruptedRunError):
        run(parts)
    stopped = RunFolder(Path(parts.out_dir)).read_summary()
    assert stopped["skipped"] == 3
    before_step(None, None)
    summary = run(parts, resume=True)
    assert summary["skipped"] == expected["skipped"] == 4
    for name, weight in last(whole).weights.items():
        assert torch.equal(weight, last(parts).weights[name])
    same = {s: line["loss"] for s, line in lines_of(whole).items() if s not in poison}
    assert same == {s: line["loss"] for s, line in lines_of(parts).items() if s not in poison}


def test_a_run_that_was_stopped_goes_on_by_skipping(tiny, poison):
    poison[5] = ("loss", NAN)
    with pytest.raises(DivergedError):
        run(tiny(**{"train.save_every": 2}))
    with pytest.raises(DivergedError, match=r"continue with train\.on_nonfinite=skip"):
        run(tiny(**{"train.save_every": 2}), resume=True)
    summary = run(tiny(**{"train.save_every": 2, "train.on_nonfinite": "skip"}), resume=True)
    assert (summary["skipped"], summary["steps"]) == (1, 8)


# ------------------------------------------------------------------------------------ weights, data


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("rule", ["stop", "skip"])
def test_a_nonfinite_weight_stops_the_run_whatever_the_rule(
    tiny, before_step, monkeypatch, value, rule
):
    models = []
    original = Transformer.__init__

    def remember(self, *args, **kwargs):
        original(self, *args, **kwargs)
        models.append(self)

    monkeypatch.setattr(Transformer, "__init__", remember)

    def spoil():
        models[0].blocks[1].mlp.up_proj.weight.data[0, 0] = value

    before_step(4, spoil)
    config = tiny(**{"train.on_nonfinite": rule, "train.save_every": 2, "train.eval_every": 0})
    with pytest.raises(DivergedError, match=r"step 4 .*nor is blocks\.1\.mlp\.up_proj") as caught:
        run(config)
    assert "step-000002" in str(caught.value)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_checkpoint_with_lost_weights_is_neither_loaded_nor_begun_from(tiny, value):
    config = tiny()
    run(config)
    for folder in (Path(config.out_dir) / "checkpoints").glob("step-*"):
        weights = load_file(folder / "model.safetensors")
        weights["blocks.0.mlp.up_proj.weight"][0, 0] = value
        save_file(weights, folder / "model.safetensors")  # a stranger's: without checksums
    said = r"model\.safetensors contains NaN or inf in blocks\.0\.mlp\.up_proj\.weight"
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(config.out_dir)
    child = tiny("child").model_dump(exclude={"model", "tokenizer"})
    with pytest.raises(CheckpointError, match=said):
        run(parse_run(child | {"init_from": config.out_dir, "out_dir": child["out_dir"]}, "child"))


def test_ids_beyond_the_vocabulary_are_a_data_error(tiny):
    config = tiny(**{"data.split_seed": 77})  # a cache entry of this test's own
    folder = prepare(config).folder
    tokens = np.memmap(folder / "train-00000-00000.bin", np.uint16, "r+")
    tokens[100] = 259
    tokens.flush()
    with pytest.raises(DataError, match=r"contains token 259, but the model has 259 ids.*delete"):
        run(tiny(**{"data.split_seed": 77, "train.steps": 200}))


def test_a_spike_is_logged_and_the_run_goes_on(tiny, poison):
    poison[40] = ("loss", 1e6)
    config = tiny(**{"train.steps": 44, "train.log_every": 25, "train.eval_every": 0})
    summary = run(config)
    assert (summary["spikes"], summary["skipped"], summary["steps"]) == (1, 0, 44)
    lines = lines_of(config)
    assert sorted(lines) == [25, 40, 44]
    assert lines[40]["spike"] is True
    assert lines[40]["loss"] > 1e6
    assert "spike" not in lines[44]


# ----------------------------------------------------------------------------------------- float16


def scale_of(config):
    return last(config).state["scaler"]["scale"]


def test_float16_trains_scales_its_loss_and_keeps_float32_weights(tiny):
    config = tiny(**{"train.dtype": "float16", "train.steps": 30, "optim.lr": 1e-2})
    summary = run(config)
    assert summary["val_loss"] < summary["init_val_loss"] - 1
    assert summary["skipped"] == 0
    assert load_checkpoint(config.out_dir)[0].embed.weight.dtype == torch.float32
    assert scale_of(config) == 2**16
    plain = tiny("plain", **{"train.steps": 30, "optim.lr": 1e-2})
    run(plain)
    ours, theirs = lines_of(config), lines_of(plain)
    for step in (1, 2, 5):
        assert ours[step]["loss"] == pytest.approx(theirs[step]["loss"], rel=1e-3)
        assert ours[step]["grad_norm"] == pytest.approx(theirs[step]["grad_norm"], rel=2e-2)


def test_overflow_in_float16_skips_and_is_resumed_to_the_bit(tiny, poison, before_step):
    fields = {"train.dtype": "float16", "train.eval_every": 0}
    whole, parts = tiny("whole", **fields), tiny("parts", **fields)
    poison.update(dict.fromkeys((3, 6), ("gradient", INF)))
    expected = run(whole)
    assert (expected["skipped"], scale_of(whole)) == (2, 2**14)
    assert lines_of(whole)[3]["skipped"] == 1
    before_step(4, interrupt)
    with pytest.raises(InterruptedRunError):
        run(parts)
    assert scale_of(parts) == 2**15
    before_step(None, None)
    assert run(parts, resume=True)["skipped"] == 2
    assert scale_of(parts) == 2**14
    for name, weight in last(whole).weights.items():
        assert torch.equal(weight, last(parts).weights[name])


def test_overflow_in_float16_without_end_stops_the_run(tiny, poison):
    poison.update(dict.fromkeys(range(1, 9), ("gradient", INF)))
    config = tiny(**{"train.dtype": "float16", "train.max_skips": 3, "train.eval_every": 0})
    with pytest.raises(DivergedError, match=r"nor were the 3 before it.*train\.dtype=bfloat16"):
        run(config)


def test_a_loss_beyond_float16_overflows_for_real(tiny):
    """Nothing planted: logits beyond 65,504 are inf in float16, and the loss is not finite."""
    config = tiny(**{"train.dtype": "float16", "optim.lr": 1e3, "optim.grad_clip": 0})
    with pytest.raises(DivergedError, match="not finite"):
        run(config)
