import pytest

from minillama import train
from minillama.config.loading import override
from minillama.config.run import parse_run

BASE = {
    "tokenizer": {"kind": "byte"},
    "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 32},
    "data": {"seq_len": 16, "val_fraction": 0.1},
    "optim": {"lr": 3e-3},
    "train": {"steps": 4, "batch_size": 2, "device": "cpu"},
}


@pytest.fixture(scope="session", autouse=True)
def _small_machine(one_thread):
    """Train on one thread."""


@pytest.fixture(scope="session")
def configured(text_file):
    """Return a function from a run folder and dotted overrides to the config of a tiny run."""

    def build(out_dir, **overrides):
        source = {"kind": "files", "files": [str(text_file)]}
        here = {"data.source": source, "out_dir": str(out_dir), "name": out_dir.name}
        return parse_run(override(override(BASE, here, {}), overrides, {}), "test")

    return build


@pytest.fixture(scope="session")
def trained(configured):
    """Return a function that trains such a run and returns its folder."""

    def build(out_dir, **overrides):
        train(configured(out_dir, **overrides), progress=False)
        return out_dir

    return build
