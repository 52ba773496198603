"""A permutation of very many numbers, computed entry by entry, so that it takes no memory.

    i ─▶ (left, right), halves of its bits ─▶ 6 × (right, left ⊕ F(right, key)) ─▶ joined

A Feistel network permutes all numbers of an even count of bits, whatever F is (Luby and Rackoff,
1988).  A result that is not below n is sent through again until one is, which is a permutation of
the numbers below n (cycle walking: Black and Rogaway, 2002).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6


class FeistelPermutation:
    """A pseudo-random permutation of ``range(n)``; indexed by an array, it returns one.

    Args:
        n: how many numbers, at least 1.
        key: two numbers below 2**64; each pair has its own permutation.
    """

    def __init__(self, n: int, key: tuple[int, int]) -> None:
        self._n = n
        half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half)
        self._mask = np.uint64((1 << half) - 1)
        self._keys = np.random.Philox(key=np.array(key, np.uint64)).random_raw(_ROUNDS)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the entries at ``positions``, which are from 0 to n - 1."""
        found = self._permute(positions.astype(np.uint64))
        while (beyond := found >= self._n).any():
            found[beyond] = self._permute(found[beyond])
        return found.astype(np.int64)

    def _permute(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Make every bit depend on every bit: the finalizer of SplitMix64 (Steele and others, 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
