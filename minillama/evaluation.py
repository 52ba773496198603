"""How well a model predicts a text: loss, perplexity and bits per byte.

Shapes: N tokens of the text, B windows at once, T positions of a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minillama.data.shards import Tokens, TokenShards
from minillama.errors import ConfigError, DataError
from minillama.model.kernels import IGNORED
from minillama.model.transformer import Transformer


@torch.inference_mode()
def evaluate(
    model: Transformer,
    tokens: npt.ArrayLike | Tensor | TokenShards,
    *,
    n_bytes: int | None = None,
    seq_len: int | None = None,
    batch_size: int = 16,
    part: tuple[int, int] = (0, 1),
    add: Callable[[float], float] = float,
) -> dict[str, Any]:
    """Measure how well ``model`` predicts ``tokens``, each but the first exactly once.

    The text is read in windows of ``seq_len`` that do not overlap, so the result does not depend on
    ``batch_size`` (beyond rounding).  The sum is kept in float64.

    Args:
        model: in whatever mode it is; it has no dropout.
        tokens: ids, 1-D of shape (N,), N at least 2; an array, a memory map, shards or a tensor.
        n_bytes: UTF-8 bytes of the text that the ids stand for.
        seq_len: positions in a window; default: the model's ``max_seq_len``.
        batch_size: windows read at once.
        part: ``(k, n)``: read only every n-th batch from the k-th on, one of n processes that do
            this together; each makes as many forward passes, the last of them perhaps of nothing.
        add: called with the sum of each batch, in nats; returns that over all processes.

    Returns:
        ``loss`` (nats per token), ``perplexity`` (its exponential), ``bits_per_byte`` (None without
        ``n_bytes``) and ``n_tokens``, the number predicted.

    Raises:
        DataError: fewer than two tokens, or ids that the model does not know.
        ConfigError: ``seq_len`` is longer than the model's context, or a size is not positive.
    """
    seq_len = model.config.max_seq_len if seq_len is None else seq_len
    for name, size in (("seq_len", seq_len), ("batch_size", batch_size), ("n_bytes", n_bytes)):
        if size is not None and size < 1:
            raise ConfigError(f"{name} = {size}: must be at least 1")
    if seq_len > model.config.max_seq_len:
        raise ConfigError(
            f"seq_len = {seq_len} is above the model's max_seq_len = {model.config.max_seq_len}"
        )
    ids_N: Tokens
    if isinstance(tokens, TokenShards):
        ids_N = tokens
    else:
        ids_N = tokens.numpy(force=True) if isinstance(tokens, Tensor) else np.asanyarray(tokens)
    if ids_N.ndim != 1 or len(ids_N) < 2 or ids_N.dtype.kind not in "iu":
        raise DataError(
            f"nothing to predict in {ids_N.dtype} tokens of shape {ids_N.shape}; give two ids or "
            "more in one row"
        )
    vocab_size = model.embed.num_embeddings
    device = model.embed.weight.device
    total = 0.0
    for inputs_BT, targets_BT in _windows(ids_N, seq_len, batch_size, vocab_size, part):
        sums = model.loss_sums(inputs_BT.to(device), targets_BT.to(device))
        total += add(float(sums.cross_entropy))
    loss = total / (len(ids_N) - 1)
    return {
        "loss": loss,
        "perplexity": math.inf if loss > 700 else math.exp(loss),
        "bits_per_byte": total / math.log(2) / n_bytes if n_bytes is not None else None,
        "n_tokens": len(ids_N) - 1,
    }


def _windows(
    ids_N: Tokens,
    seq_len: int,
    batch_size: int,
    vocab_size: int,
    part: tuple[int, int],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets), (B, T) each; all parts predict every id but the first once."""
    span = seq_len * batch_size
    index, n_parts = part
    for round_start in range(0, len(ids_N) - 1, span * n_parts):
        start = round_start + span * index
        if start >= len(ids_N) - 1:
            nothing = torch.zeros(1, seq_len, dtype=torch.int64)
            yield nothing, torch.full_like(nothing, IGNORED)
            continue
        ids = torch.from_numpy(ids_N[start : start + span + 1].astype(np.int64))
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise DataError(
                f"an id of tokens {start} to {start + len(ids) - 1} is outside the model's "
                f"vocabulary of {vocab_size}; encode the text with the model's own tokenizer"
            )
        inputs, targets = ids[:-1], ids[1:]
        rows = -(-len(inputs) // seq_len)
        missing = rows * seq_len - len(inputs)
        # The last window is filled up: what is added is not counted, and causality hides it.
        inputs = torch.nn.functional.pad(inputs, (0, missing))
        targets = torch.nn.functional.pad(targets, (0, missing), value=IGNORED)
        yield inputs.view(rows, seq_len), targets.view(rows, seq_len)
