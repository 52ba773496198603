import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillama.config import ModelConfig
from minillama.data import shards as shards_module
from minillama.data.batches import Batches, rows_of_rank
from minillama.data.shards import ShardFile, TokenShards, are_complete
from minillama.errors import DataError
from minillama.evaluation import evaluate
from minillama.model.transformer import Transformer


def write(folder: Path, *lengths: int, dtype: str = "uint16", below: int = 1 << 16) -> TokenShards:
    """Shards of random ids; the whole is ``np.asarray`` of them."""
    ids = np.random.default_rng(0).integers(0, below, sum(lengths)).astype(dtype)
    files = []
    for number, part in enumerate(np.split(ids, np.cumsum(lengths)[:-1])):
        name = f"train-{number:05}.bin"
        part.astype(np.dtype(dtype).newbyteorder("<")).tofile(folder / name)
        files.append(ShardFile(file=name, tokens=len(part), bytes=0, sha256=f"{number}"))
    tokens = TokenShards(folder, files, dtype)
    assert np.array_equal(np.asarray(tokens), ids)
    return tokens


@pytest.fixture(scope="module")
def some(tmp_path_factory) -> TokenShards:
    return write(tmp_path_factory.mktemp("shards"), 7, 1, 50, 3)


@given(st.integers(-70, 70) | st.none(), st.integers(-70, 70) | st.none())
def test_a_slice_is_that_of_the_whole_array(some, start, stop):
    whole = np.asarray(some)
    part = some[start:stop]
    assert part.dtype == np.uint16
    assert np.array_equal(part, whole[start:stop])
    part[:] = 0  # the caller's own
    assert np.array_equal(np.asarray(some), whole)


def test_it_looks_like_an_array(some):
    whole = np.asarray(some)
    assert (len(some), some.shape, some.ndim, some.dtype) == (61, (61,), 1, np.uint16)
    assert [some[i] for i in range(-61, 61)] == [*whole, *whole]
    with pytest.raises(IndexError):
        some[61]
    with pytest.raises(IndexError, match="step 1, not 2"):
        some[::2]
    assert np.asarray(some, np.int64).dtype == np.int64
    with pytest.raises(ValueError, match="a copy is needed"):
        np.asarray(some, copy=False)
    empty = TokenShards(Path(), (), "uint32")
    assert (len(empty), empty[:].tolist(), empty[:].dtype) == (0, [], np.uint32)
    assert np.array_equal(np.asarray(pickle.loads(pickle.dumps(some))), whole)


def test_wide_ids(tmp_path):
    assert np.asarray(write(tmp_path, 5, 4, dtype="uint32", below=1 << 32)).max() > 1 << 16


@pytest.mark.parametrize("seq_len", [1, 6, 20])
def test_batches_of_shards_are_those_of_one_file(some, seq_len):
    split, whole = (Batches(tokens, seq_len, 4, 3) for tokens in (some, np.asarray(some)))
    for step in (0, 1, 2, 7, 1000):
        assert all(map(torch.equal, split.batch_at(step), whole.batch_at(step)))


def test_the_hash_of_batches_follows_that_of_the_files(some, tmp_path):
    files = list(some.files)
    other = TokenShards(
        some.folder, [*files[:-1], files[-1].model_copy(update={"sha256": "x"})], "uint16"
    )
    assert Batches(some, 4, 2, 0).hash != Batches(other, 4, 2, 0).hash
    assert Batches(some, 4, 2, 0).hash != Batches(some, 4, 2, 1).hash
    again = pickle.loads(pickle.dumps(some))
    assert Batches(some, 4, 2, 0).hash == Batches(again, 4, 2, 0).hash


def test_evaluate_reads_shards(tmp_path):
    tokens = write(tmp_path, 40, 9, 60, below=17)
    config = ModelConfig(vocab_size=17, dim=16, n_layers=1, n_heads=2, max_seq_len=8)
    model = Transformer(config)
    assert evaluate(model, tokens, batch_size=3) == evaluate(
        model, np.asarray(tokens), batch_size=3
    )


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 9))
def test_ranks_share_a_batch(some, batch_size, n_ranks, step):
    batches = Batches(some, 5, batch_size, 0)
    parts = [
        batches.batch_at(step, rows_of_rank(batch_size, rank, n_ranks)) for rank in range(n_ranks)
    ]
    for whole, *shares in zip(batches.batch_at(step), *parts, strict=True):
        assert torch.equal(torch.cat(shares), whole)
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1


def test_only_the_rows_asked_for_are_read(some):
    class Spy(TokenShards):
        seen = 0

        def __getitem__(self, where):
            found = super().__getitem__(where)
            self.seen += found.size
            return found

    spy = Spy(some.folder, some.files, "uint16")
    Batches(spy, 5, 8, 0).batch_at(3, slice(2, 5))
    assert spy.seen == 3 * 6


def test_files_are_unmapped_again(tmp_path, monkeypatch):
    tokens = write(tmp_path, *[1000] * 50)
    monkeypatch.setattr(shards_module, "_MOST_MAPPED", 10 * shards_module._COST_OF_A_MAP)
    whole = np.asarray(tokens)
    for start in np.random.default_rng(1).integers(0, 49_000, 300):
        assert np.array_equal(tokens[start : start + 500], whole[start : start + 500])
        assert len(tokens._maps) <= 12


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_file_is_named_with_the_fix(tmp_path, damage):
    tokens = write(tmp_path, 10, 10)
    file = tmp_path / "train-00001.bin"
    assert are_complete(tmp_path, tokens.files, "uint16")
    file.write_bytes(file.read_bytes()[:-2]) if damage == "cut" else file.unlink()
    assert not are_complete(tmp_path, tokens.files, "uint16")
    again = TokenShards(tmp_path, tokens.files, "uint16")
    again[:10]
    with pytest.raises(
        DataError, match=r"shard .*train-00001\.bin: .* data prepare writes it again"
    ):
        again[9:11]
