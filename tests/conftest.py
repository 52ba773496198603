"""Fixtures that tests of several folders share.

The folders of finished runs are made by hand, in the formats that the trainer and the runner write.
"""

import json
import math
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

# A shell that starts the tests in the background has them, and their processes, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests out of the user's cache, and let them share one: pydocs takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLAMA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Let torch use one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some words in random order."""
    words = ["norm", "stream", "depth", "grows", "is", "tamed", "residual", "unless", "the", "it"]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(words, k=2000)), encoding="utf-8")
    return path


# ------------------------------------------------------------------------ folders of finished runs

INIT_LOSS, UNIGRAM = 6.2, 5.0

MakeRun = Callable[..., Path]
MakeAblation = Callable[..., Path]


def _write_run(
    folder: Path,
    loss: float | None,
    *,
    seed: int = 0,
    steps: int = 200,
    lr: float = 1e-3,
    probes: bool = False,
    name: str = "run",
    **summary: Any,
) -> Path:
    """Write a run that fell from ``INIT_LOSS`` to ``loss``; None: it diverged half way."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    config = {"name": name, "optim": {"lr": lr, "grad_clip": 1.0}, "train": {"seed": seed}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    end = 3.0 if loss is None else loss
    done = steps if loss is not None else steps // 2
    lines: list[dict[str, Any]] = [{"step": 0, "val_loss": INIT_LOSS, "val_bits_per_byte": 3.0}]
    for step in range(1, done + 1):
        level = end + (INIT_LOSS - end) * math.exp(-6 * step / steps)
        norm = float(rng.lognormal(0, 0.3))
        train = {"step": step, "loss": level + float(rng.normal(0, 0.05)), "lr": lr}
        lines.append(train | {"grad_norm": norm, "clipped": norm > 1, "tokens": 2048 * step})
        if step % 50 == 0:
            lines.append({"step": step, "val_loss": level + 0.02, "val_bits_per_byte": 1.4})
        if probes and step % 100 == 0:
            layers = {
                f"layer_{i}": {"residual_rms": 2.0**i, "kurtosis": 1.5, "update_ratio": 1e-3}
                for i in range(4)
            }
            lines.append({"step": step, "probe": {**layers, "output": {"log_z_sq": 1.0}}})
    if loss is None:
        lines.append({"step": done + 1, "loss": "NaN", "grad_norm": "Infinity", "clipped": True})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fate = "diverged" if loss is None else "collapsed" if loss > UNIGRAM - 0.1 else "ok"
    whole = {
        "name": name,
        "fate": fate,
        "finished": True,
        "steps": done,
        "tokens": 2048 * done,
        "seconds": 12.5,
        "tokens_per_s": 30_000.0,
        "train_loss": end,
        "val_loss": loss,
        "val_bits_per_byte": None if loss is None else loss / 2.2,
        "best_val_loss": end,
        "best_step": done,
        "init_val_loss": INIT_LOSS,
        "unigram_entropy": UNIGRAM,
        "n_params": 900_000,
        "n_norm_params": 1_152,
        "seed": seed,
        "config_hash": f"c{lr}{seed}",
        "weights_hash": f"w{seed}",
        "data_hash": f"d{seed}",
        "versions": {"python": "3.11.2", "torch": "2.13.0", "minillama": "0.1.0"},
        "threads": 1,
        "machine": "a machine, 2 cores",
        "device": "cpu",
        "sample": None,
        "command": "minillama train …",
    }
    (folder / "summary.json").write_text(json.dumps(whole | summary))
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that writes one run's folder."""

    def make(loss: float | None = 2.0, **fields: Any) -> Path:
        return _write_run(tmp_path / "run", loss, **fields)

    return make


@pytest.fixture
def write_run() -> MakeRun:
    """Return the function that writes one run into a folder."""
    return _write_run


@pytest.fixture
def make_ablation(tmp_path: Path) -> MakeAblation:
    """Return a function that writes an ablation's folder from ``{arm: {lr: [loss by seed]}}``.

    A loss of None diverged; "missing" was not run.
    """

    def make(
        losses: dict[str, dict[float, list[Any]]], *, name: str = "test", **fields: Any
    ) -> Path:
        root = tmp_path / name
        first = next(iter(losses.values()))
        ablation = {
            "name": name,
            "base": {"tokenizer": {"kind": "byte"}},
            "arms": {arm: {} for arm in losses},
            "baseline": next(iter(losses)),
            "lr": list(first),
            "seeds": list(range(max(len(row) for row in first.values()))),
        }
        root.mkdir()
        (root / "ablation.yaml").write_text(yaml.safe_dump(ablation, sort_keys=False))
        for arm, by_lr in losses.items():
            for lr, row in by_lr.items():
                for seed, loss in enumerate(row):
                    cell = root / "cells" / arm / f"lr-{lr:g}" / f"seed-{seed}"
                    if loss != "missing":
                        _write_run(cell, loss, seed=seed, lr=lr, **fields)
        return root

    return make
