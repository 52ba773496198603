import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minillama.data.permutation import FeistelPermutation

keys = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))


@given(st.integers(1, 3000), keys)
def test_each_number_comes_once(n, key):
    order = FeistelPermutation(n, key)
    assert len(order) == n
    assert sorted(order[np.arange(n)].tolist()) == list(range(n))


@given(st.integers(1, 2**50), keys, st.data())
def test_an_entry_does_not_depend_on_the_others(n, key, data):
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=9)))
    order = FeistelPermutation(n, key)
    found = order[positions]
    assert ((found >= 0) & (found < n)).all()
    assert [int(order[positions[i : i + 1]][0]) for i in range(len(positions))] == found.tolist()


def test_each_key_has_an_order_that_looks_drawn():
    n = 5000
    orders = [
        FeistelPermutation(n, key)[np.arange(n)] for key in ((0, 0), (0, 1), (1, 0), (2**63, 0))
    ]
    for one in range(len(orders)):
        for other in (np.arange(n), *orders[:one]):
            # Both are about 1 / sqrt(n) = 0.014 for orders that have nothing to do with each other.
            assert abs(np.corrcoef(orders[one], other)[0, 1]) < 0.06
            assert (orders[one] == other).sum() < 10
        steps = np.diff(orders[one])
        assert abs(np.corrcoef(steps[1:], steps[:-1])[0, 1] + 0.5) < 0.06
        halves = orders[one][: n // 2] < n // 2
        assert abs(halves.mean() - 0.5) < 0.04


def test_the_order_is_the_same_everywhere():
    # Written down, so that a change of the order, which would break --resume, is seen.
    assert FeistelPermutation(10, (3, 0))[np.arange(10)].tolist() == [9, 8, 1, 4, 3, 7, 6, 2, 5, 0]
