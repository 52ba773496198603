"""Any config and overrides on the command line: two steps are trained, or one clear line refuses.

Cases are drawn from a seed each, so that a failure can be run again by its number.
"""

import logging
import random
import resource
import shutil
import signal
import sys
from contextlib import contextmanager

import pytest
import torch

from minillama.cli import main
from minillama.config import RunConfig
from minillama.config import loading as reading
from minillama.config.loading import dump_yaml

MIB = 1 << 20
SECONDS = 30  # the longest that one case may take; nearly all take a tenth of one

PATHS = sorted({path for path, _ in reading.fields_of(RunConfig)} - {"plugins", "out_dir"})

NUMBERS = ["0", "1", "2", "3", "4", "8", "16", "17", "-1", "0.5", "1e-3", "1e30", "1e-40", "9" * 25]
NUMBERS += [".nan", ".inf", "-.inf", str(10**9), str(10**12), str(2**63)]
WORDS = ["", "null", "true", "false", "x", "no", "[]", "{}", "[1, 2]", "{a: 1}", "[0.9, 0.95]", "~"]
SOUND = {
    "model.dim": ["8", "16", "24", "48"],
    "model.n_layers": ["1", "2", "5"],
    "model.n_heads": ["1", "2", "4"],
    "model.n_kv_heads": ["1", "2"],
    "model.head_dim": ["2", "6", "16"],
    "model.ffn_dim": ["1", "7", "32"],
    "model.max_seq_len": ["16", "40"],
    "model.vocab_size": ["259", "300", "5000"],
    "model.embed_scale": ["none", "fixed", "learned"],
    "model.logit_softcap": ["0", "0.1", "30"],
    "model.tie_embeddings": ["true", "false"],
    "model.init": ["normal", "fan_in"],
    "model.rope_scaling": ["null", "{kind: linear, factor: 2}", "{kind: llama3}"],
    "model.norm.kind": ["rmsnorm", "layernorm", "scalenorm", "l2norm", "dyt", "derf", "none"],
    "model.norm.placement": [
        *("pre", "post", "peri", "reordered", "deepnorm"),
        *("rezero", "mix", "hybrid", "scaled"),
    ],
    "model.norm.qk_norm": ["none", "head", "full"],
    "model.norm.eps": ["0", "1e-6", "1"],
    "model.norm.embed_norm": ["true", "false"],
    "model.norm.final_norm": ["true", "false", "null"],
    "model.norm.options": ["{affine: false}", "{bias: false}", "{partial: 0.3}", "{alpha: 2}"],
    "tokenizer.kind": ["byte", "bpe", "json", "none"],
    "tokenizer.vocab_size": ["259", "280", "300"],
    "data.seq_len": ["1", "8", "16"],
    "data.val_fraction": ["0.1", "0.5"],
    "data.split_seed": ["0", "1"],
    "data.source.kind": ["files"],
    "data.source.format": ["text", "json", "csv", "parquet"],
    "optim.lr": ["1e-3", "1e-8", "10"],
    "optim.warmup_steps": ["0", "1", "2"],
    "optim.schedule": ["cosine", "linear", "constant", "wsd"],
    "optim.grad_clip": ["0", "1", "1e-9"],
    "optim.z_loss": ["0", "1e-4", "1"],
    "optim.weight_decay": ["0", "0.1", "9"],
    "train.batch_size": ["1", "4", "6"],
    "train.micro_batch_size": ["1", "2"],
    "train.dtype": ["float32", "bfloat16", "float16"],
    "train.on_nonfinite": ["stop", "skip", "run_on"],
    "train.max_skips": ["0", "1", "10"],
    "train.probe_every": ["0", "1"],
    "train.save_every": ["0", "1"],
    "train.eval_every": ["0", "1"],
    "train.sample_prompt": ["null", "the", "''"],
    "train.device": ["cpu", "auto", "cuda:7"],
    "loggers": ["[]", "tensorboard", "[x]"],
}
"""Values with a meaning, so that a good part of the cases is accepted."""


class TookTooLongError(BaseException):
    """Passes through everything that catches errors."""


@contextmanager
def time_limit():
    def stop(number, frame):
        raise TookTooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def work(tmp_path):
    """A folder with a text and a run to begin from; torch on one thread, logging put back."""
    threads, logger = torch.get_num_threads(), logging.getLogger("minillama")
    level = logger.level
    torch.set_num_threads(1)
    words = ["norm", "stream", "depth", "grows", "is", "tamed", "residual", "unless", "the"]
    text = " ".join(random.Random(0).choices(words, k=1500))
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "rows.csv").write_text("text\n" + "\n".join(text.split(" the ")))
    yield tmp_path
    torch.set_num_threads(threads)
    logger.setLevel(level)


def base_of(work):
    return {
        "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 16, "max_seq_len": 16},
        "tokenizer": {"kind": "byte"},
        "data": {"source": {"kind": "files", "files": [str(work / "text.txt")]}, "seq_len": 16},
        "train": {"batch_size": 2, "device": "cpu"},
    }


def draw_case(seed, work, parent):
    """Return the arguments of one case: some overrides, mostly with a meaning, some with none."""
    draw = random.Random(seed)
    overrides = []
    for _ in range(draw.choice([1, 1, 2, 2, 3, 4, 6])):
        path = draw.choice(sorted(SOUND) if draw.random() < 0.6 else PATHS)
        if path == "data.source.kind" or path.startswith("data.source"):
            values = SOUND.get(path, ["x", "null", "3"])
        elif path in SOUND and draw.random() < 0.75:
            values = SOUND[path]
        elif path == "init_from":
            values = [str(parent), str(work), "nowhere", "3"]
        else:
            values = draw.choice([NUMBERS, WORDS])
        overrides.append(f"{path}={draw.choice(values)}")
    if draw.random() < 0.1:  # a name that is none
        overrides.append(
            draw.choice(["modle.dim=3", "train=3", "x", "=", "a..b=1", "model.dim.x=1"])
        )
    fixed = ["train.steps=2", "train.compile=false", f"out_dir={work / 'run'}"]
    return overrides + fixed


def run_cases(work, capsys, seeds):
    """Run each case and count how it ended: trained, diverged or refused."""
    (work / "config.yaml").write_text(dump_yaml(base_of(work)))
    parent = work / "parent"
    first = ["train", str(work / "config.yaml"), "-q", f"out_dir={parent}", "train.steps=1"]
    assert main(first) == 0
    counts = {0: 0, 2: 0, 3: 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        overrides = draw_case(seed, work, parent)
        capsys.readouterr()
        try:
            with time_limit():
                status = main(["train", str(work / "config.yaml"), "--quiet", *overrides])
        except BaseException as error:
            raise AssertionError(f"case {seed}, {overrides}: {error!r}") from error
        said = capsys.readouterr().err
        assert status in counts, f"case {seed}, {overrides}: status {status}, {said}"
        counts[status] += 1
        if status == 0:
            assert (work / "run" / "summary.json").exists()
        else:
            last = [line for line in said.splitlines() if line.startswith("minillama: ")]
            assert last, f"case {seed}, {overrides}: {said}"
            assert len(said) < 4000
            assert "Traceback" not in said
        shutil.rmtree(work / "run", ignore_errors=True)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        grown *= 1 if sys.platform == "darwin" else 1024
        assert grown < 1500 * MIB, f"case {seed}, {overrides}: {grown / MIB:.0f} MiB"
    return counts


def test_any_command_line_trains_two_steps_or_is_refused(work, capsys):
    counts = run_cases(work, capsys, range(200))
    assert counts[0] >= 40, counts
    assert counts[2] >= 40, counts


@pytest.mark.slow
def test_thousands_of_command_lines_train_two_steps_or_are_refused(work, capsys):
    counts = run_cases(work, capsys, range(1000, 4000))
    with capsys.disabled():
        print(f"trained {counts[0]}, refused {counts[2]}, diverged {counts[3]}")
    assert min(counts[0], counts[2]) >= 600, counts
