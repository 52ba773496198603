import logging
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from minillama.config import load_config
from minillama.data.prepare import prepare
from minillama.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    InterruptedRunError,
    RunFolderError,
)
from minillama.evaluation import evaluate
from minillama.model.kernels import IGNORED
from minillama.model.transformer import Transformer
from minillama.training.checkpoint import hash_tensors, load_checkpoint, read_checkpoint
from minillama.training.metrics import read_metrics
from minillama.training.run_folder import RunFolder
from minillama.training.trainer import Trainer, train

BUSY = {
    "train.eval_every": 3,
    "train.save_every": 2,
    "train.probe_every": 2,
    "train.sample_prompt": "the",
    "data.val_fraction": 0.02,
}
"""Everything that a run can do between updates, often."""


def run(config, **flags):
    return train(config, progress=False, **flags)


def metrics(config, *keys):
    """The metrics without what the clock decides, and only the lines that have one of ``keys``."""
    lines = read_metrics(Path(config.out_dir) / "metrics.jsonl")
    for line in lines:
        line.pop("tokens_per_s", None)
    return [line for line in lines if not keys or set(keys) & set(line)]


def final_state(config):
    """All that decides how a run goes on, as plain data and hashes."""
    resumed = read_checkpoint(Path(config.out_dir) / "checkpoints" / "last", for_resume=True)
    progress = resumed.state["progress"]
    counts = {k: v for k, v in progress.items() if "seconds" not in k}
    rng = resumed.state["rng"].tolist()
    return hash_tensors(resumed.weights), hash_tensors(resumed.state["optimizer"]), counts, rng


def result_of(config, summary):
    timed = {"tokens_per_s", "name", "command", "config_hash"} | {
        k for k in summary if "seconds" in k
    }
    reported = {key: value for key, value in summary.items() if key not in timed}
    return reported, metrics(config), final_state(config)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def build_trainer(config, tmp_path):
    prepared = prepare(config)
    return Trainer(config, Transformer(config.model), prepared, RunFolder(tmp_path))


# ------------------------------------------------------------------------------------- what is left


def test_a_run_leaves_its_folder_as_described(tiny):
    config = tiny(**{"train.eval_every": 4, "train.sample_prompt": "the no"})
    summary = run(config)
    folder = Path(config.out_dir)
    assert RunFolder(folder).read_summary() == summary
    assert load_config(folder) == config
    lines = read_metrics(folder / "metrics.jsonl")
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == list(range(1, 9))
    assert set(trained[0]) == {
        *("step", "loss", "lr", "grad_norm", "clipped", "tokens", "tokens_per_s")
    }
    assert [line["tokens"] for line in trained] == [64 * step for step in range(1, 9)]
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 4, 8]
    assert trained[1]["lr"] == config.optim.lr
    assert summary["fate"] == "undertrained"  # eight steps teach little
    assert summary["finished"]
    assert (summary["steps"], summary["tokens"], summary["seed"]) == (8, 512, 0)
    assert summary["train_loss"] == pytest.approx(sum(line["loss"] for line in trained) / 8)
    assert summary["val_loss"] == lines[-1]["val_loss"]
    assert summary["init_val_loss"] == lines[0]["val_loss"]
    assert summary["best_val_loss"] == min(
        line["val_loss"] for line in lines[1:] if "val_loss" in line
    )
    assert summary["sample"].startswith("the no")
    assert len(summary["sample"]) > 10


def test_a_checkpoint_of_the_run_gives_the_validation_loss_of_its_summary(tiny):
    config = tiny()
    summary = run(config)
    model, tokenizer, loaded_config = load_checkpoint(config.out_dir)
    prepared = prepare(loaded_config)
    again = evaluate(model, prepared.val, n_bytes=prepared.meta.n_val_bytes, seq_len=16)
    assert again["loss"] == pytest.approx(summary["val_loss"], abs=1e-6)
    assert again["bits_per_byte"] == pytest.approx(summary["val_bits_per_byte"], abs=1e-6)
    assert tokenizer.sha256 == prepared.meta.tokenizer_sha256


def test_a_model_learns(tiny):
    config = tiny(**{"train.steps": 250, "train.batch_size": 16, "optim.lr": 1e-2})
    summary = run(config)
    assert summary["fate"] == "ok"
    assert summary["val_loss"] < summary["unigram_entropy"] - 1


def test_lines_are_thinned_out_but_the_last_is_there(tiny):
    config = tiny(**{"train.log_every": 3, "train.eval_every": 0})
    run(config)
    assert [line["step"] for line in metrics(config, "loss")] == [3, 6, 8]
    assert [line["step"] for line in metrics(config, "val_loss")] == [0, 8]


def test_the_newest_checkpoints_and_the_best_stay(tiny, monkeypatch):
    losses = iter([5.5, 3.0, 4.0, 5.0])  # at steps 0, 5, 10, 12

    def measure(nats, n_tokens, n_bytes):
        return {"loss": next(losses), "perplexity": 1.0, "bits_per_byte": 1.0, "n_tokens": 1}

    monkeypatch.setattr("minillama.training.trainer.scores", measure)
    config = tiny(**{"train.save_every": 1, "train.eval_every": 5, "train.steps": 12})
    summary = run(config)
    assert (summary["best_step"], summary["best_val_loss"], summary["val_loss"]) == (5, 3.0, 5.0)
    checkpoints = Path(config.out_dir) / "checkpoints"
    left = {path.name for path in checkpoints.iterdir()}
    assert left == {"step-000005", "step-000011", "step-000012", "best", "last"}
    assert (checkpoints / "best").readlink().name == "step-000005"
    assert (checkpoints / "last").readlink().name == "step-000012"


# ---------------------------------------------------------------------------------------- the step


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("micro", [1, 2])
def test_micro_batches_add_up_to_the_large_batch(tiny, micro, z_loss):
    runs = []
    for size in (4, micro):
        config = tiny(
            out=f"micro-{size}", **{"train.micro_batch_size": size, "optim.z_loss": z_loss}
        )
        run(config)
        weights = read_checkpoint(
            Path(config.out_dir) / "checkpoints" / "last", for_resume=True
        ).weights
        runs.append((metrics(config, "loss"), weights))
    (lines, weights), (other_lines, other_weights) = runs
    for line, other in zip(lines, other_lines, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    for name in weights:
        torch.testing.assert_close(weights[name], other_weights[name], rtol=0, atol=2e-5)


def test_micro_batches_are_weighted_by_the_tokens_that_count(tiny, tmp_path):
    config = tiny(**{"train.micro_batch_size": 1, "optim.z_loss": 0.1})
    trainer = build_trainer(config, tmp_path)
    inputs, targets = trainer.batches.batch_at(0)
    targets[0, 1:] = IGNORED
    targets[2, 5:] = IGNORED
    count = int((targets != IGNORED).sum())
    loss = trainer._accumulate(inputs, targets, count)
    whole = Transformer(config.model)
    whole.loss(inputs, targets, z_loss=0.1).backward()
    assert loss == pytest.approx(whole.loss(inputs, targets).item(), abs=1e-6)
    for a, b in zip(trainer.model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-6)


def test_what_watches_a_run_changes_no_bit_of_it(tiny):
    quiet = {"train.eval_every": 0, "train.log_every": 1}
    watched = BUSY | {"train.eval_every": 1, "train.probe_every": 1, "train.save_every": 1}
    results = []
    for out, fields in (("quiet", quiet), ("watched", watched)):
        config = tiny(out=out, **{"data.val_fraction": 0.02} | fields)
        run(config)
        results.append((metrics(config, "loss"), final_state(config)[:2]))
    assert results[0] == results[1]


def test_runs_that_differ_in_their_norms_see_the_same_weights_and_batches(tiny, caplog):
    summaries = []
    for kind in ("rmsnorm", "layernorm"):
        with caplog.at_level(logging.INFO, "minillama"):
            summaries.append(run(tiny(out=kind, **{"model.norm.kind": kind, "train.steps": 2})))
    one, other = summaries
    assert one["weights_hash"] == other["weights_hash"]
    assert one["data_hash"] == other["data_hash"]
    assert one["n_norm_params"] * 2 == other["n_norm_params"]
    assert one["weights_hash"][:12] in caplog.text
    assert one["data_hash"][:12] in caplog.text
    third = run(tiny(out="third", **{"train.seed": 1, "train.steps": 2}))
    assert third["weights_hash"] != one["weights_hash"]
    assert third["data_hash"] != one["data_hash"]


def test_bfloat16_trains_and_keeps_float32_weights(tiny):
    config = tiny(**{"train.dtype": "bfloat16", "train.steps": 30, "optim.lr": 1e-2})
    summary = run(config)
    assert summary["val_loss"] < summary["init_val_loss"] - 1
    assert load_checkpoint(config.out_dir)[0].embed.weight.dtype == torch.float32


def test_a_compiled_run_saves_clean_names(tiny, monkeypatch):
    graphs = []

    def backend(graph, inputs):  # inductor without what it takes long for: making the code
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    config = tiny(**{"train.compile": True, "train.probe_every": 2})
    run(config)
    assert graphs
    model, _, _ = load_checkpoint(config.out_dir)
    assert not any("_orig_mod" in name for name in model.state_dict())
    plain = tiny(out="plain")
    run(plain)
    compiled_losses = [line["loss"] for line in metrics(config, "loss")]
    losses = [line["loss"] for line in metrics(plain, "loss")]
    assert compiled_losses == pytest.approx(losses, abs=1e-5)


def test_tensorboard_is_one_line_of_config(tiny):
    pytest.importorskip("tensorboard")
    config = tiny(loggers=["tensorboard"], **{"train.steps": 2})
    run(config)
    assert list((Path(config.out_dir) / "tensorboard").iterdir())


def test_a_bar_is_shown_on_stderr_only_if_asked_for(tiny, capfd):
    run(tiny(**{"train.steps": 2}))
    assert capfd.readouterr() == ("", "")
    train(tiny(out="shown", **{"train.steps": 2}), progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    for part in ("2/2", "loss ", "lr 3.0e-03", "tokens/s"):
        assert part in shown.err


# ----------------------------------------------------------------------------------- stop, resume


@pytest.mark.parametrize("step", [1, 4, 6, 8])
def test_a_stopped_run_goes_on_to_the_bit(tiny, before_step, step):
    whole, parts = (tiny(out=out, **BUSY) for out in ("whole", "parts"))
    expected = run(whole)
    before_step(step, interrupt)
    with pytest.raises(InterruptedRunError, match=f"stopped after step {step} of 8 and saved") as e:
        run(parts)
    assert f"minillama train {parts.out_dir}/config.yaml --resume" in str(e.value)
    stopped = RunFolder(Path(parts.out_dir)).read_summary()
    assert (stopped["finished"], stopped["fate"], stopped["steps"]) == (False, None, step)
    before_step(None, None)
    summary = run(parts, resume=True)
    expected_summary, *expected_rest = result_of(whole, expected)
    reported, *rest = result_of(parts, summary)
    assert reported == expected_summary
    if step == 8:  # this checkpoint was written before its validation, and is not written twice
        for (_, _, counts, _), when in ((rest[1], 6), (expected_rest[1], 8)):
            assert counts["evaluated_step"] == when
            counts.clear()
    assert rest == expected_rest


@pytest.mark.parametrize("kind", ["muon", "sgd", "lion"])
def test_every_optimizer_goes_on_to_the_bit(tiny, before_step, kind):
    fields = BUSY | {"optim.kind": kind, "optim.groups": {"embed": {"lr_factor": 0.5}}}
    whole, parts = (tiny(out=out, **fields) for out in ("whole", "parts"))
    expected = result_of(whole, run(whole))
    before_step(4, interrupt)
    with pytest.raises(InterruptedRunError):
        run(parts)
    before_step(None, None)
    assert result_of(parts, run(parts, resume=True)) == expected


def test_a_signal_during_validation_does_not_wait_for_it(tiny, monkeypatch):
    whole, parts = (tiny(out=out, **BUSY) for out in ("whole", "parts"))
    expected = result_of(whole, run(whole))
    original, calls = Transformer.loss_sums, []

    def loss_sums(self, *args):
        if torch.is_inference_mode_enabled():
            calls.append(len(calls))
            if len(calls) == 5:
                interrupt()
                raise AssertionError("the validation went on")
        return original(self, *args)

    monkeypatch.setattr(Transformer, "loss_sums", loss_sums)
    with pytest.raises(InterruptedRunError):
        run(parts)
    monkeypatch.undo()
    assert result_of(parts, run(parts, resume=True)) == expected


def test_a_killed_run_repeats_what_came_after_its_last_checkpoint(tiny, before_step):
    whole, parts = (tiny(out=out, **BUSY) for out in ("whole", "parts"))
    expected = result_of(whole, run(whole))

    def die():
        raise MemoryError

    before_step(6, die)  # the newest checkpoint is that of step 4
    with pytest.raises(MemoryError):
        run(parts)
    assert [line["step"] for line in metrics(parts, "loss")] == [1, 2, 3, 4, 5]
    with (Path(parts.out_dir) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    before_step(None, None)
    assert result_of(parts, run(parts, resume=True)) == expected


def test_a_validation_made_after_its_checkpoint_is_logged_once(tiny, before_step):
    whole, parts = (tiny(out=out, **BUSY) for out in ("whole", "parts"))
    expected = result_of(whole, run(whole))
    before_step(6, interrupt)  # saves, and leaves step 6's validation to the resume
    with pytest.raises(InterruptedRunError):
        run(parts)
    before_step(7, lambda: 1 / 0)  # after the validation, before the next checkpoint
    with pytest.raises(ZeroDivisionError):
        run(parts, resume=True)
    assert [line["step"] for line in metrics(parts, "val_loss")] == [0, 3, 6]
    before_step(None, None)
    assert result_of(parts, run(parts, resume=True)) == expected


def test_a_longer_constant_run_equals_one_that_was_as_long_from_the_start(tiny):
    constant = {"optim.schedule": "constant", "data.val_fraction": 0.02}
    long = tiny(out="long", **constant)
    run(long)
    run(tiny(out="short", **constant | {"train.steps": 4}))
    extended = tiny(out="short", **constant)
    assert run(extended, resume=True)["steps"] == 8
    assert metrics(extended, "loss") == metrics(long, "loss")
    assert final_state(extended)[:2] == final_state(long)[:2]
    assert load_config(extended.out_dir).train.steps == 8


def test_a_finished_run_is_not_run_again(tiny, before_step):
    config = tiny()
    summary = run(config)
    before_step(8, lambda: 1 / 0)
    assert run(config, resume=True) == summary


def test_a_resume_without_a_checkpoint_starts_the_run(tiny, before_step, caplog):
    config = tiny()
    before_step(1, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(config)
    assert [line["step"] for line in metrics(config)] == [0]
    before_step(None, None)
    with caplog.at_level(logging.INFO, "minillama"):
        run(config, resume=True)
    assert "no checkpoint to resume from; starting the run" in caplog.text
    assert [line["step"] for line in metrics(config, "val_loss")] == [0, 8]


def test_a_resume_with_another_config_or_another_text_is_refused(tiny, text_file, tmp_path):
    own_text = shutil.copy(text_file, tmp_path / "own.txt")
    fields = {"data.source.files": [str(own_text)]}
    run(tiny(**fields))
    longer = fields | {"train.steps": 9}
    with pytest.raises(ConfigError, match=r"optim\.lr = 1\.0: the run began with 0\.003"):
        run(tiny(**longer | {"optim.lr": 1.0}), resume=True)
    Path(own_text).write_text(text_file.read_text()[::-1])
    with pytest.raises(ConfigError, match="no longer gives the text"):
        run(tiny(**longer), resume=True)


def test_a_damaged_checkpoint_is_refused_and_its_removal_is_the_way_out(tiny):
    whole, config = (tiny(out=out, **BUSY) for out in ("whole", "parts"))
    expected = result_of(whole, run(whole))
    run(config)
    newest = Path(config.out_dir) / "checkpoints" / "step-000008"
    (newest / "trainer_state.pt").write_bytes(b"")
    (Path(config.out_dir) / "summary.json").unlink()
    with pytest.raises(CheckpointError, match=r"trainer_state\.pt is damaged.*step-000006"):
        run(config, resume=True)
    shutil.rmtree(newest)
    assert result_of(config, run(config, resume=True)) == expected


def test_overwriting_needs_its_flag_and_restarts(tiny):
    config = tiny()
    run(config)
    other = tiny(**{"train.seed": 5})
    with pytest.raises(ConfigError, match="already contains a finished run"):
        run(other)
    assert load_config(config.out_dir) == config
    run(other, overwrite=True)
    assert load_config(config.out_dir) == other
    assert len(metrics(other, "loss")) == 8


def test_an_overwrite_that_cannot_begin_keeps_the_run_before(tiny):
    config = tiny()
    summary = run(config)
    with pytest.raises(Exception, match=r"missing\.txt"):
        run(tiny(**{"data.source.files": ["missing.txt"]}), overwrite=True)
    assert RunFolder(Path(config.out_dir)).read_summary() == summary


SCRIPT = """
import sys
from minillama.config import load_config
from minillama.errors import MinillamaError
from minillama.training.trainer import train
try:
    train(load_config(sys.argv[1]), progress=False, resume="--resume" in sys.argv)
except MinillamaError as error:
    print(error)
    sys.exit(error.exit_status)
"""


def start(config, *flags):
    """Run in a process of its own, by the config file of the run's folder."""
    command = [sys.executable, "-c", SCRIPT, config.out_dir, *flags]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # as here; sums differ in the last bit
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_thread)


def kill_when(process, config, n_lines, number):
    path = Path(config.out_dir) / "metrics.jsonl"
    while process.poll() is None and path.read_bytes().count(b"\n") < n_lines:
        time.sleep(0.01)
    process.send_signal(number)
    return process.communicate(timeout=300)[0]


def test_a_process_that_is_terminated_and_then_killed_goes_on_to_the_bit(tiny, before_step):
    fields = BUSY | {"train.steps": 40, "train.save_every": 1, "train.keep_last": 1}
    whole, parts = (tiny(out=out, **fields) for out in ("whole", "parts"))
    expected = result_of(whole, run(whole))
    before_step(2, interrupt)
    with pytest.raises(InterruptedRunError):
        run(parts)
    before_step(None, None)

    process = start(parts, "--resume")
    assert "continue with" in kill_when(process, parts, 20, signal.SIGTERM)
    assert process.returncode == 130
    process = start(parts, "--resume")
    kill_when(process, parts, 50, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert result_of(parts, run(parts, resume=True)) == expected


# ------------------------------------------------------------------------------- numbers, the disk


def test_a_loss_that_is_not_finite_stops_before_the_update(tiny):
    config = tiny(**{"optim.lr": 1e25, "optim.warmup_steps": 0, "train.save_every": 1})
    with pytest.raises(DivergedError) as caught:
        run(config)
    assert "of step 2 is not finite" in str(caught.value)
    assert "checkpoints/step-000001" in str(caught.value)
    assert "lower optim.lr (now 1e+25)" in str(caught.value)
    last = read_metrics(Path(config.out_dir) / "metrics.jsonl")[-1]
    assert last["step"] == 2
    assert not math.isfinite(last["loss"] + last["grad_norm"])
    summary = RunFolder(Path(config.out_dir)).read_summary()
    assert (summary["fate"], summary["finished"], summary["steps"]) == ("diverged", True, 1)
    assert summary["val_loss"] is None
    model, _, _ = load_checkpoint(config.out_dir)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    with pytest.raises(DivergedError, match="and would again"):
        run(config, resume=True)


def test_a_gradient_that_is_not_finite_stops_before_the_update(tiny, tmp_path):
    trainer = build_trainer(tiny(), tmp_path)
    trainer.parameters[0].register_hook(lambda gradient: gradient * float("inf"))
    before = hash_tensors(trainer.model.state_dict())
    with pytest.raises(DivergedError, match=r"gradient norm of step 1 is not finite.*none yet"):
        trainer._train_step()
    assert hash_tensors(trainer.model.state_dict()) == before


def test_weights_that_are_not_finite_are_never_saved(tiny):
    config = tiny(**{"optim.lr": 1e38, "optim.warmup_steps": 0, "train.save_every": 1})
    config = config.model_copy(
        update={"optim": config.optim.model_copy(update={"weight_decay": 10.0})}
    )
    with pytest.raises(DivergedError):
        run(config)
    for folder in (Path(config.out_dir) / "checkpoints").glob("step-*"):
        assert all(torch.isfinite(w).all() for w in read_checkpoint(folder).weights.values())


def test_a_disk_that_fills_up_leaves_the_checkpoint_before_whole(tiny, before_step):
    whole, config = (tiny(out=out, **BUSY) for out in ("whole", "parts"))
    expected = result_of(whole, run(whole))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before_step(6, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard)))
    try:
        with pytest.raises(RunFolderError, match=r"File too large; .*step-000004 is complete"):
            run(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    names = {p.name for p in (Path(config.out_dir) / "checkpoints").iterdir()}
    assert names == {"step-000003", "step-000004", "best", "last"}
    before_step(None, None)
    assert result_of(config, run(config, resume=True)) == expected


def test_a_folder_that_vanishes_is_an_error(tiny, before_step):
    config = tiny()
    before_step(3, lambda: shutil.rmtree(config.out_dir))
    with pytest.raises(RunFolderError, match="was removed, moved or replaced"):
        run(config)


def test_config_errors_come_before_any_work(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("minillama.training.trainer.prepare", lambda config: 1 / 0)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        run(tiny(out="file"))
    with pytest.raises(ConfigError, match="does not exist here"):
        run(tiny(**{"train.device": "cuda:63"}))
    with pytest.raises(RunFolderError, match="cannot be written"):
        run(tiny().model_copy(update={"out_dir": "/proc/run"}))


def test_the_last_line_of_progress_shows_the_last_validation(tiny, capsys):
    config = tiny(**{"train.eval_every": 2})
    train(config)
    shown = re.findall(r"step (\d+)/\1,.* val (\d\.\d+)", capsys.readouterr().err)
    last = metrics(config, "val_loss")[-1]
    assert shown == [(str(last["step"]), f"{last['val_loss']:.3f}")]
