"""How well a model predicts a text: loss, perplexity and bits per byte.

Shapes: N tokens of the text, B windows at once, T positions of a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minillama.arguments import whole_number
from minillama.config import ModelConfig
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
) -> dict[str, Any]:
    """Measure how well ``model`` predicts ``tokens``, each but the first exactly once.

    The text is read in windows of ``seq_len`` that do not overlap, so the result does not depend on
    ``batch_size`` (beyond rounding).  The sum is kept in float64.

    Args:
        model: in training or evaluation mode; it has no dropout.
        tokens: ids, 1-D of shape (N,), N at least 2; an array, a memory map, shards or a tensor.
        n_bytes: UTF-8 bytes of the text that the ids encode.
        seq_len: positions in a window; default: the model's ``max_seq_len``.
        batch_size: windows read at once.

    Returns:
        ``loss`` (nats per token), ``perplexity`` (its exponential), ``bits_per_byte`` (None without
        ``n_bytes``) and ``n_tokens``, the number predicted.

    Raises:
        DataError: fewer than two tokens, or ids that the model does not know.
        ConfigError: ``seq_len`` is longer than the model's context, or a size is not a positive
            whole number.
        TypeError: ``model`` is not a model.
    """
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise TypeError(f"model must be a Transformer, not {type(model).__name__}")
    seq_len = model.config.max_seq_len if seq_len is None else seq_len
    for name, size in (("seq_len", seq_len), ("batch_size", batch_size), ("n_bytes", n_bytes)):
        if size is not None or name == "batch_size":
            whole_number(name, size, 1)
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
    device = model.embed.weight.device
    nats = 0.0
    for inputs_BT, targets_BT in windows(ids_N, seq_len, batch_size, model.embed.num_embeddings):
        sums = model.loss_sums(inputs_BT.to(device), targets_BT.to(device))
        nats += float(sums.cross_entropy)
    return scores(nats, len(ids_N) - 1, n_bytes)


def scores(nats: float, n_tokens: int, n_bytes: int | None) -> dict[str, Any]:
    """Return what :func:`evaluate` returns, from the cross-entropy summed over ``n_tokens``."""
    loss = nats / n_tokens
    return {
        "loss": loss,
        "perplexity": math.inf if loss > 700 else math.exp(loss),
        "bits_per_byte": nats / math.log(2) / n_bytes if n_bytes is not None else None,
        "n_tokens": n_tokens,
    }


def windows(
    ids_N: Tokens, seq_len: int, batch_size: int, vocab_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets), (B, T) each, that predict every id but the first exactly once.

    Raises:
        DataError: an id is not in the vocabulary.
    """
    span = seq_len * batch_size
    for start in range(0, len(ids_N) - 1, span):
        ids = torch.from_numpy(ids_N[start : start + span + 1].astype(np.int64))
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise DataError(
                f"an id of tokens {start} to {start + len(ids) - 1} is outside the model's "
                f"vocabulary of {vocab_size}; encode the text with the model's own tokenizer"
            )
        inputs, targets = ids[:-1], ids[1:]
        rows = -(-len(inputs) // seq_len)
        missing = rows * seq_len - len(inputs)
        # The last window is padded: the padding is not counted, and causality hides it.
        inputs = torch.nn.functional.pad(inputs, (0, missing))
        targets = torch.nn.functional.pad(targets, (0, missing), value=IGNORED)
        yield inputs.view(rows, seq_len), targets.view(rows, seq_len)
