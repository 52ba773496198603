"""Several processes under torchrun, against one: its losses, its validation, its checkpoints."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from minillama import launch
from minillama.config import ModelConfig
from minillama.config.loading import override
from minillama.config.run import parse_run, to_yaml
from minillama.data.batches import Batches, rows_of_rank
from minillama.data.prepare import prepare
from minillama.errors import CheckpointError, ConfigError, OtherRankError
from minillama.evaluation import evaluate, windows
from minillama.model.transformer import Transformer
from minillama.sampling import generate
from minillama.training.checkpoint import load_checkpoint, read_checkpoint
from minillama.training.interrupt import StopSignal
from minillama.training.metrics import read_metrics
from minillama.training.parallel import Ranks, join
from minillama.training.run_folder import RunFolder
from minillama.training.trainer import sum_loss, train

STEPS = 50
RICH = {
    "tokenizer": {"kind": "byte"},
    "model": {"dim": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 16, "embed_scale": "learned"},
    "data": {"seq_len": 16, "val_fraction": 0.06},
    "optim": {"lr": 3e-3, "warmup_steps": 2, "grad_clip": 0.5, "z_loss": 1e-3},
    "train": {
        "steps": STEPS,
        "batch_size": 12,
        "micro_batch_size": 2,
        "device": "cpu",
        "eval_every": 20,
        "save_every": 10,
        "keep_last": 3,
        "probe_every": 25,
        "sample_prompt": "the",
    },
}
"""Everything that a run can do: micro-batches, clipping at every step, a scalar to learn, probes at
the last step, whose forward pass must not leave old weights to the validation after it."""

MAIN = """
from minillama.cli import entry_point
entry_point()
"""

WATCH = """
import json, os, pathlib
from minillama.data.batches import Batches
whole = Batches.batch_at
def batch_at(self, step, *rows):
    inputs, targets = whole(self, step, *rows)
    with pathlib.Path(__file__).with_name(f"rank-{os.environ['RANK']}.jsonl").open("a") as file:
        file.write(json.dumps([step, inputs.tolist()]) + "\\n")
    return inputs, targets
Batches.batch_at = batch_at
"""

DIE = """
import os, signal
from minillama.data.batches import Batches
from minillama.training import fsdp
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if (attempt, rank) == ("0", "1"):
    whole = Batches.batch_at
    def batch_at(self, step, *rows):
        if step == 14:
            raise RuntimeError("the memory of rank 1 is on fire")
        return whole(self, step, *rows)
    Batches.batch_at = batch_at
if (attempt, rank) == ("1", "1"):
    whole, saves = fsdp.sha256_of_file, []
    def sha256_of_file(file):
        saves.append(file)
        if len(saves) == 2:  # its shard is written, and the main rank waits for it
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(file)
    fsdp.sha256_of_file = sha256_of_file
"""


class Runs:
    """Starts runs of one config in a folder."""

    def __init__(self, folder, text_file):
        self.folder, source = folder, {"kind": "files", "files": [str(text_file)]}
        self.raw = override(RICH, {"data.source": source}, {})

    def config(self, name, **fields):
        out = {"out_dir": str(self.folder / name), "name": name}
        return parse_run(override(self.raw, out | fields, {}), "test")

    def alone(self, name, resume=False, **fields):
        config = self.config(name, **fields)
        train(config, progress=False, resume=resume)
        return Path(config.out_dir)

    def copy(self, name, new):
        return shutil.copytree(self.folder / name, self.folder / new, symlinks=True)

    def start(self, n, name, *flags, torchrun=(), patch="", **fields):
        """Let torchrun start ``n`` processes that do first what ``patch`` says."""
        config = self.config(name, **fields)
        file = self.folder / f"{name}.yaml"
        file.write_text(to_yaml(config), encoding="utf-8")
        program = ["-m", "minillama"]
        if patch:
            program = [str(self.folder / f"{name}.py")]
            Path(program[0]).write_text(patch + MAIN)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(n), *torchrun, *program, "train", str(file), *flags]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # as here; sums differ in the last bit
        )

    def together(self, n, name, *flags, status=0, **fields):
        process = self.start(n, name, *flags, **fields)
        said = finish(process)
        assert process.returncode == status, said
        return self.folder / name, said


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text_file):
    return Runs(tmp_path_factory.mktemp("parallel"), text_file)


@pytest.fixture(scope="module")
def alone(runs):
    return runs.alone("alone")


@pytest.fixture(scope="module")
def ddp(runs):
    return runs.together(2, "ddp", patch=WATCH, **{"train.parallel": "ddp"})


@pytest.fixture(scope="module")
def fsdp(runs):
    """A run of which a rank raises in the first attempt and is killed in a save of the second."""
    restarts = ["--max-restarts", "2"]
    return runs.together(2, "fsdp", torchrun=restarts, patch=DIE, **{"train.parallel": "fsdp"})


def finish(process):
    """Return what torchrun and all that it started have said; leave nothing running."""
    try:
        return process.communicate(timeout=500)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends those that it started
        said = process.communicate(timeout=300)[0]
        raise AssertionError(f"it hung: {said}") from None


def lines_with(folder, key):
    return [line for line in read_metrics(folder / "metrics.jsonl") if key in line]


def assert_same_numbers(folder, other):
    """All that a run logs agrees, and each line is there once."""
    for key, within in (("loss", 1e-5), ("val_loss", 1e-5)):
        ours, theirs = lines_with(folder, key), lines_with(other, key)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        assert [line[key] for line in ours] == pytest.approx([x[key] for x in theirs], abs=within)
    for line, expected in zip(lines_with(folder, "loss"), lines_with(other, "loss"), strict=True):
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        same = ("lr", "clipped", "tokens")
        assert [line[key] for key in same] == [expected[key] for key in same]
    ours, theirs = (RunFolder(path).read_summary() for path in (folder, other))
    for key in (
        "n_params",
        "n_norm_params",
        "weights_hash",
        "data_hash",
        "fate",
        "steps",
        "tokens",
    ):
        assert ours[key] == theirs[key]


def assert_same_weights(folder, other):
    ours, theirs = (
        read_checkpoint(path / "checkpoints" / "last").weights for path in (folder, other)
    )
    assert list(ours) == list(theirs)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=2e-5)


# ------------------------------------------------------------------------------- the same numbers


def test_ddp_on_two_processes_equals_one(ddp, alone):
    assert sum(line["clipped"] for line in lines_with(alone, "loss")) > STEPS / 2
    assert_same_numbers(ddp[0], alone)
    assert_same_weights(ddp[0], alone)


def test_fsdp_on_two_processes_equals_one_though_a_rank_died_twice(fsdp, alone):
    assert_same_numbers(fsdp[0], alone)
    assert_same_weights(fsdp[0], alone)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_probes_see_the_whole_model(kind, request, alone):
    folder, _ = request.getfixturevalue(kind)
    ours, theirs = lines_with(folder, "probe"), lines_with(alone, "probe")
    assert [line["step"] for line in ours] == [25, 50]
    for line, expected in zip(ours, theirs, strict=True):
        for layer, values in expected["probe"].items():
            assert line["probe"][layer] == pytest.approx(values, rel=1e-3)


def test_ranks_share_the_batch_without_overlap_or_gap(ddp, runs):
    prepared = prepare(runs.config("ddp"))
    batches = Batches(prepared.train, 16, 12, 0)
    files = [runs.folder / f"rank-{rank}.jsonl" for rank in (0, 1)]
    seen = [[eval(line) for line in file.read_text().splitlines()] for file in files]
    assert [step for step, _ in seen[0]] == [step for step, _ in seen[1]] == list(range(STEPS))
    for (step, first), (_, second) in zip(*seen, strict=True):
        assert len(first) == len(second) == 6
        assert first + second == batches.batch_at(step)[0].tolist()


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_the_rows_of_all_ranks_are_disjoint_and_all_there_are(n_ranks):
    batches = Batches(list(range(200)), 4, 12, seed=1)
    whole = batches.batch_at(3)[0]
    parts = [batches.batch_at(3, rows_of_rank(12, rank, n_ranks))[0] for rank in range(n_ranks)]
    assert {len(part) for part in parts} == {12 // n_ranks}
    assert torch.equal(torch.cat(parts), whole)


class Rank(Ranks):
    """One of several ranks, which get together what the sums of all were in another pass."""

    def __init__(self, rank, world_size, sums=None):
        super().__init__(torch.device("cpu"))
        self.rank, self.world_size, self.own, self.sums = rank, world_size, [], sums

    def sum(self, value):
        self.own.append(value)
        return value if self.sums is None else self.sums[len(self.own) - 1]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [2, 25, 44])
def test_ranks_validate_each_token_once_in_as_many_passes(n, n_ranks):
    model = Transformer(ModelConfig(vocab_size=29, dim=16, n_layers=1, n_heads=2, max_seq_len=8))
    ids = np.random.default_rng(0).integers(0, 29, n)

    def validate(ranks):
        with torch.inference_mode():
            return sum_loss(model, windows(ids, 8, 2, 29), ranks, StopSignal())

    ranks = [Rank(rank, n_ranks) for rank in range(n_ranks)]
    for rank in ranks:
        validate(rank)
    assert len({len(rank.own) for rank in ranks}) == 1
    sums = [sum(turn) for turn in zip(*(rank.own for rank in ranks), strict=True)]
    loss = validate(Rank(0, n_ranks, sums)) / (n - 1)
    assert loss == pytest.approx(evaluate(model, ids)["loss"], rel=1e-6)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_rank_0_alone_writes_and_logs(kind, request, alone):
    folder, said = request.getfixturevalue(kind)
    for once in ("matrices at init have", "validation loss", "run folder: "):
        attempts = 3 if (kind, once) == ("fsdp", "matrices at init have") else 1
        assert said.count(once) == attempts
    left = {path.name for path in folder.iterdir()}
    assert left == {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        ".lock",
        ".torchrun",
    }
    expected = RunFolder(alone).read_summary()
    summary = RunFolder(folder).read_summary()
    assert summary["sample"] == expected["sample"]
    assert summary["command"].startswith("torchrun --nproc-per-node 2 -m minillama train ")


# ------------------------------------------------------------------------------------ checkpoints


def test_a_sharded_checkpoint_is_used_as_any_other(fsdp, alone):
    folder, _ = fsdp
    last = folder / "checkpoints" / "last"
    assert {path.name for path in last.iterdir()} == {
        *("config.json", "model.safetensors", "trainer_state.pt", "optimizer")
    }
    assert len(list((last / "optimizer").iterdir())) == 2
    model, tokenizer, config = load_checkpoint(folder)
    expected, _, _ = load_checkpoint(alone)
    assert config.train.parallel == "fsdp"
    ids = tokenizer.encode("the no", bos=True)
    assert generate(model, ids, 20, temperature=0) == generate(expected, ids, 20, temperature=0)


def test_the_moments_of_a_matrix_are_in_the_shards_alone(fsdp):
    state = read_checkpoint(fsdp[0] / "checkpoints" / "last", for_resume=True).state
    assert {name.rpartition(".")[2] for name in state["sharded"]} == {"exp_avg", "exp_avg_sq"}
    assert max(value.ndim for value in state["optimizer"].values()) <= 1


@pytest.fixture
def one_rank(monkeypatch):
    """Return a function that lets this process be all that torchrun has started."""

    def become(world_size=1, rank=0, restarts=0):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        for name, value in {
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, str(value))

    return become


@pytest.mark.parametrize("kind", ["none", "ddp", "fsdp"])
@pytest.mark.parametrize("name", ["alone", "fsdp"])
def test_one_process_goes_on_from_a_checkpoint_of_any_kind(
    runs, alone, name, kind, request, one_rank
):
    request.getfixturevalue(name)
    folder = runs.copy(name, f"{name}-on-{kind}")
    for step in (40, 50):
        shutil.rmtree(folder / "checkpoints" / f"step-0000{step}")
    (folder / "summary.json").unlink()
    if kind != "none":
        one_rank()
    runs.alone(folder.name, resume=True, **{"train.parallel": kind})
    assert_same_numbers(folder, alone)
    assert_same_weights(folder, alone)


def test_a_shard_that_is_damaged_or_gone_is_refused_by_name(runs, fsdp):
    folder = runs.copy("fsdp", "damaged")
    shards = sorted((folder / "checkpoints" / "step-000050" / "optimizer").iterdir())
    data = bytearray(shards[0].read_bytes())
    data[-5] ^= 4
    shards[0].write_bytes(data)
    pattern = rf"optimizer/{shards[0].name} is damaged.*sound checkpoint beside it is .*step-000040"
    with pytest.raises(CheckpointError, match=pattern):
        read_checkpoint(shards[0].parent.parent, for_resume=True)
    shards[0].unlink()
    with pytest.raises(CheckpointError, match=rf"optimizer/{shards[0].name} is missing"):
        read_checkpoint(shards[0].parent.parent, for_resume=True)


# -------------------------------------------------------------------------------------- the end


def test_a_rank_that_dies_ends_all_and_the_restart_resumes(fsdp):
    folder, said = fsdp
    assert "RuntimeError: the memory of rank 1 is on fire" in said
    assert said.count("rank 0: another process of this run has died") == 2
    assert re.findall(r"resuming after step (\d+)", said) == ["10", "20"]
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"step-000030", "step-000040", "step-000050", "best", "last"}


def test_a_signal_stops_all_at_one_step_and_one_process_can_go_on(runs, alone):
    process = runs.start(2, "stopped", **{"train.parallel": "fsdp", "train.save_every": 0})
    metrics = runs.folder / "stopped" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 9):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said = finish(process)
    stopped = re.findall(r"stopped after step (\d+) of 50 and saved; continue with: (.*)", said)
    assert len(stopped) == 1, said
    assert stopped[0][1].startswith("torchrun --nproc-per-node 2 -m minillama train ")
    step = int(stopped[0][0])
    names = {path.name for path in (runs.folder / "stopped" / "checkpoints").iterdir()}
    assert names == {f"step-{step:06d}", "last"}
    assert RunFolder(runs.folder / "stopped").read_summary()["steps"] == step < STEPS
    folder = runs.alone("stopped", resume=True)
    assert_same_numbers(folder, alone)


def test_a_divergence_is_reported_once_and_ends_all_with_its_status(runs):
    folder, said = runs.together(
        2, "diverged", status=1, **{"train.parallel": "ddp", "optim.lr": 1e25}
    )
    assert said.count("\nminillama: training diverged: ") == 1
    # torchrun ends the slower of the two by a signal, should it look before that has left.
    root_cause = re.search(r"Root Cause.*?exitcode +: (-?\d+) ", said, re.DOTALL)
    assert root_cause
    assert root_cause[1] == "3"
    assert set(re.findall(r"exitcode +: (-?\d+) ", said)) <= {"3", "-15"}
    assert RunFolder(folder).read_summary()["fate"] == "diverged"


def test_what_does_not_fit_the_number_of_processes_is_refused(runs, one_rank):
    def refused(**fields):
        with pytest.raises(ConfigError) as caught, join(runs.config("x", **fields)):
            pass
        return str(caught.value)

    said = refused(**{"train.parallel": "ddp"})
    assert said.startswith("train.parallel = ddp: this is one process alone; start N of them with")
    one_rank(world_size=5)
    assert "torchrun has started 5 processes" in refused()
    assert "train.batch_size = 12: is not divisible by the 5 processes" in refused(
        **{"train.parallel": "fsdp"}
    )
    one_rank(world_size=4)
    assert "train.micro_batch_size = 2: does not divide each process's share, 3 of" in refused(
        **{"train.parallel": "fsdp"}
    )
    assert "each process uses its own GPU" in refused(
        **{"train.parallel": "ddp", "train.device": "cuda:1", "train.micro_batch_size": 1}
    )
    one_rank(world_size=5, rank=2)
    with pytest.raises(OtherRankError) as caught, join(runs.config("x")):
        pass
    assert caught.value.exit_status == 2


def test_a_restart_goes_on_only_with_a_run_of_its_own(runs, alone, one_rank):
    """Not with an older one that it was refused to mix with."""
    folder = runs.copy("alone", "older")
    one_rank(restarts=1)
    assert launch.restarts() == 1
    with pytest.raises(ConfigError, match="already contains a finished run"):
        runs.alone("older")
    (folder / ".torchrun").write_text(launch.job_id())
    runs.alone("older")


# ----------------------------------------------------------------------------- the long forms, slow


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["alone", "fsdp"])
def test_three_processes_resume_from_one_or_two_and_one_from_three(runs, alone, fsdp, name, kind):
    folder = runs.copy(name, f"{name}-on-three-{kind}")
    for step in (40, 50):
        shutil.rmtree(folder / "checkpoints" / f"step-0000{step}")
    (folder / "summary.json").unlink()
    runs.together(3, folder.name, "--resume", **{"train.parallel": kind})
    assert_same_numbers(folder, alone)
    assert_same_weights(folder, alone)
    last = folder / "checkpoints" / "step-000050"
    assert len(list(last.glob("optimizer/*"))) == (3 if kind == "fsdp" else 0)
    shutil.rmtree(last)
    (folder / "summary.json").unlink()
    runs.alone(folder.name, resume=True)
    assert_same_numbers(folder, alone)
    assert_same_weights(folder, alone)


@pytest.mark.slow
def test_ranks_that_are_killed_at_any_moment_change_nothing(runs, alone):
    draw = random.Random(0)
    process = runs.start(
        2,
        "killed",
        torchrun=["--max-restarts", "10"],
        **{"train.parallel": "fsdp", "train.save_every": 1, "train.keep_last": 2},
    )
    metrics, n_kills = runs.folder / "killed" / "metrics.jsonl", 0
    while process.poll() is None and n_kills < 8:
        before = metrics.stat().st_size if metrics.exists() else 0
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > before):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1))
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        if len(children) == 2:
            os.kill(int(draw.choice(children)), signal.SIGKILL)
            n_kills += 1
    said = finish(process)
    assert process.returncode == 0, said
    assert n_kills == 8
    assert_same_numbers(runs.folder / "killed", alone)
    assert_same_weights(runs.folder / "killed", alone)


FULL = """
import os, resource
from minillama.data.batches import Batches
whole = Batches.batch_at
def batch_at(self, step, *rows):
    if step == 15 and os.environ["RANK"] == "RANK_THAT_FILLS_UP":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return whole(self, step, *rows)
Batches.batch_at = batch_at
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_full_disk_is_reported_once_and_keeps_the_last_checkpoint(runs, rank):
    folder, said = runs.together(
        2,
        f"full-{rank}",
        status=1,
        patch=FULL.replace("RANK_THAT_FILLS_UP", rank),
        **{"train.parallel": "fsdp"},
    )
    errors = re.findall(r"\nminillama: (.*)", said)
    assert len(errors) == 1, said
    assert "cannot be written: File too large" in errors[0]
    assert "step-000010 is complete" in errors[0]
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"step-000010", "last"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", ["bfloat16", "compiled", "recomputed"])
def test_other_ways_to_compute_agree_as_well(runs, alone, kind, how):
    if how == "bfloat16":
        fields = {"train.dtype": "bfloat16"}
        other = runs.alone(f"{kind}-{how}-alone", **fields)
        within, patch = 2e-3, ""
    elif how == "recomputed":
        fields, other, within, patch = {"train.recompute": True}, alone, 1e-5, ""
    else:  # without what it takes long for: making the code
        fields, other, within = {"train.compile": True}, alone, 1e-5
        patch = "import functools, torch\n"
        patch += "torch.compile = functools.partial(torch.compile, backend='aot_eager')\n"
    folder, _ = runs.together(2, f"{kind}-{how}", patch=patch, **fields, **{"train.parallel": kind})
    ours, theirs = ([x["loss"] for x in lines_with(path, "loss")] for path in (folder, other))
    assert ours == pytest.approx(theirs, abs=within)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_weights_that_are_normalised_stay_so_on_several_processes(runs, kind):
    fields = {"model.norm.kind": "l2norm", "model.norm.placement": "ngpt"}
    fields |= {"model.attention_gate": "head", "model.embed_scale": "none"}
    other = runs.alone(f"{kind}-ngpt-alone", **fields)
    folder, _ = runs.together(2, f"{kind}-ngpt", **fields, **{"train.parallel": kind})
    ours, theirs = ([x["loss"] for x in lines_with(path, "loss")] for path in (folder, other))
    assert ours == pytest.approx(theirs, abs=1e-5)
