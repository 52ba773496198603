"""Fixtures that tests of ablations share: tiny ones to run, and fresh seeds for those by hand."""

import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from minillama.ablation.grid import Cell
from minillama.ablation.pool import Ended
from minillama.ablation.stage_plan import make_plan, write_plan
from minillama.config.ablation import AblationConfig, load_ablation
from minillama.training.trainer import train

PLUGIN = '''
import os, signal

import torch

from minillama.model.norms import register_norm


@register_norm("killer")
def killer(dim: int):
    """Ends the process that builds it, as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


@register_norm("faulty")
def faulty(dim: int):
    """Raises."""
    print("about to fail")
    raise ArithmeticError("this norm cannot be built")
'''


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One file for all tests here: a kind is registered once in a process."""
    path = tmp_path_factory.mktemp("plugin") / "plugin.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.fixture
def ablation(tmp_path: Path, plugin: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the config of a tiny ablation."""
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("Norms keep a stream of numbers within its banks. " * 40)

    def make(**fields: Any) -> AblationConfig:
        base = {
            "plugins": [plugin],
            "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 16, "ffn_dim": 16},
            "tokenizer": {"kind": "byte"},
            "data": {
                "source": {"kind": "files", "files": [str(tmp_path / "text.txt")]},
                "seq_len": 16,
                "val_fraction": 0.1,
            },
            "train": {"steps": 4, "batch_size": 2, "device": "cpu", "eval_every": 0},
        }
        default: dict[str, Any] = {
            "name": "test",
            "out_dir": str(tmp_path / "out"),
            "base": base,
            "arms": {"rms": {}, "ln": {"model.norm.kind": "layernorm"}},
            "baseline": "rms",
            "lr": [1e-3],
            "runner": {"workers": 2, "threads": 1},
        }
        return AblationConfig(**default | fields)

    return make


class PoolHere:
    """Trains the cells one by one in this process, which spares the start of workers."""

    def __init__(self, cells: Sequence[Cell], workers: int, threads: int) -> None:
        self.events: queue.SimpleQueue[Cell | Ended] = queue.SimpleQueue()
        self._cells = cells
        self.busy = False

    def __enter__(self) -> Self:
        for cell in self._cells:
            self.events.put(cell)
            try:
                train(cell.config, resume=True, progress=False)
            except ArithmeticError as error:
                self.events.put(Ended(cell, "crashed", str(error)))
            else:
                self.events.put(Ended(cell, "ended"))
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def stop(self) -> None:
        pass


@pytest.fixture
def pool_here() -> type[PoolHere]:
    """Return what ``run`` takes as ``make_pool`` to train in this process."""
    return PoolHere


AddFreshSeeds = Callable[..., Path]


@pytest.fixture
def add_fresh_seeds(write_run: Callable[..., Path]) -> AddFreshSeeds:
    """Return a function that gives a folder of ``make_ablation`` a second stage.

    It takes the losses as ``{arm: {lr: [loss by seed]}}`` with each arm's chosen rate first, and
    the fields of the stage; a loss of "missing" was not run.
    """

    def add(folder: Path, losses: dict[str, dict[float, list[Any]]], **stage: Any) -> Path:
        path = folder / "ablation.yaml"
        raw = yaml.safe_load(path.read_text())
        n_seeds = max(len(row) for by_lr in losses.values() for row in by_lr.values())
        two = [{"seeds": raw["seeds"]}, stage or {"seeds": n_seeds}]
        path.write_text(yaml.safe_dump(raw | {"stages": two}, sort_keys=False))
        chosen = {arm: next(iter(by_lr)) for arm, by_lr in losses.items()}
        plan = make_plan(load_ablation(path), chosen, "2026-01-01T00:00:00+00:00")
        write_plan(folder, plan)
        for arm, by_lr in losses.items():
            for lr, row in by_lr.items():
                for seed, loss in zip(plan.seeds, row, strict=False):
                    cell = folder / "cells" / arm / f"lr-{lr:g}" / f"seed-{seed}"
                    if loss != "missing":
                        write_run(cell, loss, seed=seed, lr=lr)
        return folder

    return add
