import json

import pytest

from minillama.data.prepare import prepare
from minillama.data.shards import TokenShards
from minillama.errors import ConfigError
from minillama.training.checkpoint import load_checkpoint
from minillama.training.summary import hash_config
from minillama.training.trainer import train

SHARDS = {"data.shard_tokens": 1000, "data.val_fraction": 0.3, "optim.schedule": "constant"}


@pytest.fixture
def sharded(tiny, tmp_path):
    """Return a function from overrides to the config of a run on shards."""
    words = ["norm", "stream", "depth", "grows", "is", "tamed", "residual", "unless", "the", "it"]
    rows = [{"text": " ".join(words[i % 7 : i % 10 + 1]) + f" {i}."} for i in range(400)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = {"data.source": {"kind": "files", "format": "json", "files": [str(path)]}}
    return lambda out="run", **overrides: tiny(out, **{**source, **SHARDS, **overrides})


def test_a_run_on_shards_trains_resumes_and_is_judged(sharded, tmp_path):
    whole = train(sharded("whole"), progress=False)
    prepared = prepare(sharded())
    assert isinstance(prepared.train, TokenShards)
    assert len(prepared.train.files) > 3
    assert whole["fate"] in ("ok", "undertrained", "collapsed")
    assert whole["val_loss"] < whole["init_val_loss"]
    assert whole["n_val_tokens"] == len(prepared.val)

    train(sharded(**{"train.steps": 4}), progress=False)
    # With other workers the data is the same, and so the run is.
    again = train(sharded(**{"data.workers": 2}), resume=True, progress=False)
    assert again["val_loss"] == whole["val_loss"]
    assert again["data_hash"] == whole["data_hash"]
    assert load_checkpoint(tmp_path / "run")[2].data.shard_tokens == 1000
    with pytest.raises(ConfigError, match=r"data\.shard_tokens = 2000: the run began with 1000"):
        train(sharded(**{"data.shard_tokens": 2000}), resume=True, progress=False)


def test_workers_do_not_decide_the_hash_of_a_config(sharded):
    assert hash_config(sharded()) == hash_config(sharded(**{"data.workers": 3}))
    assert hash_config(sharded()) != hash_config(sharded(**{"data.shard_tokens": 2000}))
