import random

import pytest
import torch

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
def _small_machine():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Some words in random order."""
    words = ["norm", "stream", "depth", "grows", "is", "tamed", "residual", "unless", "the", "it"]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(words, k=2000)), encoding="utf-8")
    return path


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
