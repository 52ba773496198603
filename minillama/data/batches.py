"""Batches as a pure function of the step.

    tokens  0 1 2 3 4 5 6 7 8 9 ...            seq_len = 3
    window 0: inputs 0 1 2, targets 1 2 3      every token but the first is a target once
    window 1:        inputs 3 4 5, targets 4 5 6

Each epoch has its own order of windows; the next epoch follows without a gap, even
inside a batch.  A remainder shorter than a window is left out.

The order of up to 2**22 windows is drawn and kept; that of more is computed where it is needed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from minillama.data.permutation import FeistelPermutation
from minillama.data.shards import Tokens, TokenShards
from minillama.errors import DataError

_HASHED_AT_ONCE = 1 << 20  # tokens
_MOST_DRAWN = 1 << 22  # windows whose order is kept in memory, 8 bytes each
_EPOCHS_KEPT = 2  # a batch touches more than two epochs only where the text is tiny


class Batches:
    """The batches of a stream of tokens; ``batch_at(step)`` depends on nothing that came before.

    Args:
        tokens: one-dimensional ids, an array, a memory map or shards.
        seq_len: tokens in a window.
        batch_size: windows in a batch.
        seed: of the order of windows.

    Raises:
        DataError: the tokens do not fill one window of ``seq_len + 1``.
    """

    def __init__(
        self, tokens: Tokens | Sequence[int], seq_len: int, batch_size: int, seed: int
    ) -> None:
        self.tokens: Tokens = tokens if isinstance(tokens, TokenShards) else np.asarray(tokens)
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.n_windows = max(0, (len(self.tokens) - 1) // seq_len)
        self._orders: OrderedDict[int, NDArray[np.int64] | FeistelPermutation] = OrderedDict()
        if not self.n_windows:
            raise DataError(
                f"{len(self.tokens)} tokens do not fill one window of {seq_len} + 1; "
                "add text, or lower data.seq_len"
            )

    def batch_at(self, step: int, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of ``step``, counted from 0: two (B, T) int64 tensors.

        With ``rows``, such as those of :func:`rows_of_rank`, only these are read and returned.
        """
        first = step * self.batch_size
        samples = range(first, first + self.batch_size)[rows]
        starts_B = self._windows(samples) * self.seq_len
        windows_BT1 = np.empty((len(samples), self.seq_len + 1), np.int64)
        for row, start in zip(windows_BT1, starts_B.tolist(), strict=True):
            row[:] = self.tokens[start : start + self.seq_len + 1]
        return (
            torch.from_numpy(windows_BT1[:, :-1].copy()),
            torch.from_numpy(windows_BT1[:, 1:].copy()),
        )

    @cached_property
    def hash(self) -> str:
        """The sha256 (hex) of everything that decides what ``batch_at`` returns.

        Reads every token of an array; of shards it uses the hashes recorded when they were written.
        """
        digest = hashlib.sha256(f"{self.seq_len} {self.batch_size} {self.seed}".encode())
        if isinstance(self.tokens, TokenShards):
            digest.update(self.tokens.sha256.encode())
            return digest.hexdigest()
        for start in range(0, len(self.tokens), _HASHED_AT_ONCE):
            digest.update(self.tokens[start : start + _HASHED_AT_ONCE].astype("<i8").tobytes())
        return digest.hexdigest()

    def _windows(self, samples: range) -> NDArray[np.int64]:
        """Return the windows of ``samples``, which are counted from the first of epoch 0."""
        epochs, positions = np.divmod(np.array(samples, np.int64), self.n_windows)
        windows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            at = epochs == epoch
            windows[at] = self._order(int(epoch))[positions[at]]
        return windows

    def _order(self, epoch: int) -> NDArray[np.int64] | FeistelPermutation:
        if epoch not in self._orders:
            # One Philox key for each (seed, epoch); the sum of the two would collide.
            key = (self.seed % 2**64, epoch)
            self._orders[epoch] = (
                _draw(self.n_windows, key)
                if self.n_windows <= _MOST_DRAWN
                else FeistelPermutation(self.n_windows, key)
            )
            while len(self._orders) > _EPOCHS_KEPT:
                self._orders.popitem(last=False)
        return self._orders[epoch]


def rows_of_rank(batch_size: int, rank: int, n_ranks: int) -> slice:
    """Return the rows of a batch that belong to ``rank``: the ranks share all of them."""
    return slice(batch_size * rank // n_ranks, batch_size * (rank + 1) // n_ranks)


def _draw(n: int, key: tuple[int, int]) -> NDArray[np.int64]:
    bits = np.random.Philox(key=np.array(key, dtype=np.uint64))
    return np.random.Generator(bits).permutation(n)
