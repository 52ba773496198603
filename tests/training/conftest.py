import pytest

from minillama.config.loading import override
from minillama.config.run import parse_run
from minillama.data.batches import Batches

BASE = {
    "tokenizer": {"kind": "byte"},
    "model": {"dim": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 16},
    "data": {"seq_len": 16, "val_fraction": 0.05},
    "optim": {"lr": 3e-3, "warmup_steps": 2},
    "train": {"steps": 8, "batch_size": 4, "device": "cpu"},
}


@pytest.fixture(scope="session", autouse=True)
def _small_machine(one_thread):
    """Train on one thread."""


@pytest.fixture
def tiny(text_file, tmp_path):
    """Return a function from dotted overrides to a resolved config of a run in ``tmp_path``."""

    def build(out="run", **overrides):
        source = {"kind": "files", "files": [str(text_file)]}
        raw = override(BASE, {"data.source": source, "out_dir": str(tmp_path / out)}, {})
        return parse_run(override(raw, overrides, {}), "test")

    return build


@pytest.fixture
def before_step(monkeypatch):
    """Return a function that calls ``action`` just before one ``step``; None: never."""
    original, plan = Batches.batch_at, {}

    def batch_at(self, index, rows):
        if index + 1 in plan:
            plan[index + 1]()
        return original(self, index, rows)

    def arrange(step, action):
        plan.clear()
        if step is not None:
            plan[step] = action

    monkeypatch.setattr(Batches, "batch_at", batch_at)
    return arrange
