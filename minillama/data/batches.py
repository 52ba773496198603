"""Batches as a pure function of the step.

    tokens  0 1 2 3 4 5 6 7 8 9 ...            seq_len = 3
    window 0: inputs 0 1 2, targets 1 2 3      every token but the first is a target once
    window 1:        inputs 3 4 5, targets 4 5 6

The windows of an epoch come in an order of its own; the next epoch follows without a gap, even
inside a batch.  A remainder shorter than a window is left out.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from minillama.errors import DataError

_HASHED_AT_ONCE = 1 << 20  # tokens
_EPOCHS_KEPT = 2  # a batch touches more than two epochs only where the text is tiny


class Batches:
    """The batches of a stream of tokens; ``batch_at(step)`` depends on nothing that came before.

    Args:
        tokens: one-dimensional ids, an array or a memory map.
        seq_len: tokens in a window.
        batch_size: windows in a batch.
        seed: of the order of windows.

    Raises:
        DataError: the tokens do not fill one window of ``seq_len + 1``.
    """

    def __init__(
        self, tokens: NDArray[Any] | Sequence[int], seq_len: int, batch_size: int, seed: int
    ) -> None:
        self.tokens = np.asarray(tokens)
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.n_windows = max(0, (len(self.tokens) - 1) // seq_len)
        self._orders: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        if not self.n_windows:
            raise DataError(
                f"{len(self.tokens)} tokens do not fill one window of {seq_len} + 1; "
                "add text, or lower data.seq_len"
            )

    def batch_at(self, step: int, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of ``step``, counted from 0: two (B, T) int64 tensors.

        With ``rows``, such as :func:`rows_of_rank` gives, these rows of them; no other is read.
        """
        first = step * self.batch_size
        samples = range(first, first + self.batch_size)[rows]
        starts_B = np.array([self._window(sample) * self.seq_len for sample in samples])
        windows_BT1 = self.tokens[starts_B[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        return (
            torch.from_numpy(windows_BT1[:, :-1].copy()),
            torch.from_numpy(windows_BT1[:, 1:].copy()),
        )

    def epoch_of(self, step: int) -> int:
        """Return the epoch, counted from 0, that the first window of ``step`` belongs to."""
        return step * self.batch_size // self.n_windows

    @cached_property
    def hash(self) -> str:
        """The sha256 (hex) of all that decides what ``batch_at`` returns; reads every token."""
        digest = hashlib.sha256(f"{self.seq_len} {self.batch_size} {self.seed}".encode())
        for start in range(0, len(self.tokens), _HASHED_AT_ONCE):
            digest.update(self.tokens[start : start + _HASHED_AT_ONCE].astype("<i8").tobytes())
        return digest.hexdigest()

    def _window(self, sample: int) -> int:
        epoch, position = divmod(sample, self.n_windows)
        return int(self._order(epoch)[position])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            # A Philox key of its own for each (seed, epoch); a plain sum of the two would collide.
            key = np.array([self.seed % 2**64, epoch], dtype=np.uint64)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(self.n_windows)
            self._orders[epoch] = order
            while len(self._orders) > _EPOCHS_KEPT:
                self._orders.popitem(last=False)
        return self._orders[epoch]


def rows_of_rank(batch_size: int, rank: int, n_ranks: int) -> slice:
    """Return the rows of a batch that are rank's, counted from 0: disjoint, and together all."""
    return slice(batch_size * rank // n_ranks, batch_size * (rank + 1) // n_ranks)
