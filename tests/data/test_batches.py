import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillama.data import batches as batches_module
from minillama.data.batches import Batches
from minillama.data.permutation import FeistelPermutation
from minillama.errors import DataError

sizes = st.tuples(
    st.integers(2, 200), st.integers(1, 12), st.integers(1, 9), st.integers(0, 2**70)
).filter(lambda s: s[0] > s[1])


def first_tokens(batches: Batches, samples: range) -> list[int]:
    """Where the windows of ``samples`` start, for tokens 0, 1, 2, ..."""
    size = batches.batch_size
    steps = range(samples.start // size, (samples.stop - 1) // size + 1)
    starts = torch.cat([batches.batch_at(step)[0][:, 0] for step in steps])
    offset = steps.start * size
    return starts[samples.start - offset : samples.stop - offset].tolist()


@given(sizes)
def test_each_window_comes_once_an_epoch(drawn):
    n_tokens, seq_len, batch_size, seed = drawn
    batches = Batches(np.arange(n_tokens), seq_len, batch_size, seed)
    n = batches.n_windows
    assert n == (n_tokens - 1) // seq_len
    for epoch in range(3):
        starts = first_tokens(batches, range(epoch * n, (epoch + 1) * n))
        assert sorted(starts) == [seq_len * i for i in range(n)]


@given(sizes, st.integers(0, 30))
def test_a_batch_is_windows_of_int64_with_targets_one_ahead(drawn, step):
    n_tokens, seq_len, batch_size, seed = drawn
    inputs, targets = Batches(np.arange(n_tokens), seq_len, batch_size, seed).batch_at(step)
    assert inputs.shape == targets.shape == (batch_size, seq_len)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs - inputs[:, :1], torch.arange(seq_len).expand_as(inputs))


@given(sizes, st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_a_batch_does_not_depend_on_earlier_ones(drawn, steps):
    n_tokens, seq_len, batch_size, seed = drawn
    tokens = np.arange(n_tokens, dtype=np.uint16)
    used = Batches(tokens, seq_len, batch_size, seed)
    for step in steps:
        fresh = Batches(tokens, seq_len, batch_size, seed).batch_at(step)
        assert all(map(torch.equal, used.batch_at(step), fresh))


def test_the_order_does_not_depend_on_the_batch_size():
    tokens = np.arange(1001)
    small, large = Batches(tokens, 10, 2, 7), Batches(tokens, 10, 25, 7)
    assert first_tokens(small, range(200)) == first_tokens(large, range(200))


def test_each_epoch_and_seed_has_another_order():
    tokens = np.arange(1001)
    orders = [
        tuple(first_tokens(Batches(tokens, 10, 10, seed), range(100 * epoch, 100 * epoch + 100)))
        for seed in (0, 1, 2, 2**32, 2**33)
        for epoch in range(4)
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(0, 1000, 10)) not in orders


def test_the_order_of_windows_is_the_same_everywhere():
    # Written down, so that a change of the order, which would break --resume, is seen.
    order = first_tokens(Batches(np.arange(9), 1, 4, 3), range(16))
    assert order == [4, 1, 6, 7, 0, 5, 2, 3, 0, 7, 6, 1, 5, 3, 2, 4]


def test_an_epoch_follows_the_last_without_a_gap_even_inside_a_batch():
    batches = Batches(np.arange(101), 10, 4, 0)
    assert batches.n_windows == 10
    starts = torch.cat([batches.batch_at(step)[0][:, 0] for step in range(5)]).tolist()
    assert sorted(starts[:10]) == sorted(starts[10:]) == list(range(0, 100, 10))


def test_the_hash_follows_content_and_order_alone():
    tokens = np.arange(100, dtype=np.uint16)
    base = Batches(tokens, 8, 4, 0).hash
    assert base == Batches(tokens.astype(np.uint32), 8, 4, 0).hash
    changed = tokens.copy()
    changed[-1] = 0
    others = [
        Batches(changed, 8, 4, 0),
        Batches(tokens[:-1], 8, 4, 0),
        Batches(tokens, 7, 4, 0),
        Batches(tokens, 8, 5, 0),
        Batches(tokens, 8, 4, 1),
    ]
    assert len({base, *(batches.hash for batches in others)}) == 6


def test_tokens_may_be_a_memory_map(tmp_path):
    np.arange(50, dtype="<u2").tofile(tmp_path / "train.bin")
    mapped = Batches(np.memmap(tmp_path / "train.bin", "<u2", "r"), 4, 3, 1)
    inputs, _ = mapped.batch_at(5)
    assert torch.equal(inputs, Batches(np.arange(50), 4, 3, 1).batch_at(5)[0])
    inputs.zero_()  # a batch is the caller's own
    assert mapped.tokens[4] == 4
    assert torch.equal(pickle.loads(pickle.dumps(mapped)).batch_at(0)[0], mapped.batch_at(0)[0])


@pytest.mark.parametrize("n_tokens", [0, 1, 8])
def test_fewer_tokens_than_a_window_are_refused_with_their_count(n_tokens):
    with pytest.raises(DataError, match=rf"^{n_tokens} tokens do not fill one window of 8 \+ 1"):
        Batches(np.arange(n_tokens), 8, 1, 0)
    assert Batches(np.arange(9), 8, 1, 0).n_windows == 1


def test_the_order_of_very_many_windows_is_computed(monkeypatch):
    monkeypatch.setattr(batches_module, "_MOST_DRAWN", 100)
    tokens = np.arange(1011)
    drawn, computed = Batches(tokens[:1001], 10, 10, 7), Batches(tokens, 10, 10, 7)
    assert (drawn.n_windows, computed.n_windows) == (100, 101)
    orders = [first_tokens(computed, range(101 * epoch, 101 * epoch + 101)) for epoch in range(3)]
    assert all(sorted(order) == list(range(0, 1010, 10)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert all(isinstance(order, FeistelPermutation) for order in computed._orders.values())
    drawn.batch_at(0)
    assert isinstance(drawn._orders[0], np.ndarray)
