"""A model, a vocabulary and a length of training for a text and a time.

The largest shape of a short list is taken that the time, the memory and the text allow:

    tokens to train on = min(20·N, 8·D), N parameters, D tokens in the text

20 tokens per parameter are best for a given amount of compute (Hoffmann 2022, arXiv 2203.15556);
passes over the same text help less each time (Muennighoff 2023, arXiv 2305.16264: up to 4 nearly as
much as new text).  A text that is too short for a shape's 20·N may take it down to 3·N.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from minillama.config import RunConfig
from minillama.config.run import BYTE_VOCAB_SIZE, parse_run
from minillama.errors import DataError
from minillama.plan.compute import count_flops
from minillama.plan.memory import estimate_memory
from minillama.plan.parameters import count_parameters

TOKENS_PER_PARAMETER, FEWEST_PER_PARAMETER = 20, 3
PASSES = 8
LEAST_BYTES = 1000
"""Of a text; less leaves no window for validation."""

_BYTES_ONLY = 20_000  # of a text: below it a vocabulary of pieces is not worth its parameters
_STEPS = 1500  # about, if the text allows; large batches make better use of a machine
_FEWEST_STEPS = 200


class Vocabulary(NamedTuple):
    """How many ids, None for bytes alone, and how many bytes of the text a token stands for."""

    size: int | None
    bytes_per_token: float


class Shape(NamedTuple):
    """Width, layers and heads of a model."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int


SHAPES = (
    Shape(64, 2, 4, 2),
    Shape(96, 3, 4, 2),
    Shape(128, 4, 4, 2),
    Shape(192, 6, 6, 3),
    Shape(256, 6, 8, 4),
    Shape(384, 8, 8, 4),
    Shape(512, 8, 8, 4),
    Shape(768, 12, 12, 4),
    Shape(1024, 16, 16, 8),
    Shape(2048, 22, 32, 4),
)


def suggest(
    n_bytes: int,
    source: dict[str, Any],
    flops_per_s: float,
    *,
    seconds: float,
    memory: float = math.inf,
    vocabulary: Vocabulary | None = None,
    name: str = "run",
) -> RunConfig:
    """Return the config of a run on a text.

    Args:
        n_bytes: of the text.
        source: the ``data.source`` of the config.
        flops_per_s: that training reaches on this machine.
        seconds: that it may take.
        memory: bytes that it may take.
        vocabulary: as measured on the text; None: one that suits its size.
        name: of the run.

    Raises:
        DataError: the text is too short.
    """
    if n_bytes < LEAST_BYTES:
        raise DataError(
            f"the text has {n_bytes} bytes, and needs {LEAST_BYTES} for a window to train on and "
            "one to test on; 1 MB is a good beginning"
        )
    chosen = None
    for shape in SHAPES:
        config = _config(n_bytes, source, shape, vocabulary or _guess(n_bytes, shape), name)
        compute = count_flops(config)
        enough = FEWEST_PER_PARAMETER * count_parameters(config.model).total
        if chosen is not None and (
            compute.total > seconds * flops_per_s
            or compute.tokens < enough
            or estimate_memory(config, on_cpu=True).peak_on_cpu > memory
        ):
            break
        chosen = config
    assert chosen is not None
    return shorten(chosen, flops_per_s, seconds)


def shorten(config: RunConfig, flops_per_s: float, seconds: float) -> RunConfig:
    """Return ``config`` with fewer steps if it would take more than ``seconds``."""
    steps = config.train.steps
    affordable = int(steps * seconds * flops_per_s / count_flops(config).total)
    return _with_steps(config, min(steps, max(affordable, _FEWEST_STEPS)))


def _with_steps(config: RunConfig, steps: int) -> RunConfig:
    fields = config.model_dump(mode="json", exclude_unset=True)
    fields["train"] |= {"steps": steps, "eval_every": max(1, steps // 5)}
    fields["optim"] |= {"warmup_steps": min(100, steps // 10)}
    return parse_run(fields, config.name)


def _guess(n_bytes: int, shape: Shape) -> Vocabulary:
    """Return the vocabulary for a text: 512 ids at 100 kB, twice as many with each factor of ten.

    Its embedding is to be no larger than the blocks, of 12·d² parameters each.
    """
    if n_bytes < _BYTES_ONLY:
        return Vocabulary(None, 1.0)
    bits = min(15, 9 + round(math.log10(n_bytes / 1e5)))
    bits = max(9, min(bits, int(math.log2(12 * shape.dim * shape.n_layers))))
    return Vocabulary(1 << bits, 0.35 * bits - 0.9)  # about what English text gives


def _config(
    n_bytes: int, source: dict[str, Any], shape: Shape, vocabulary: Vocabulary, name: str
) -> RunConfig:
    size, bytes_per_token = vocabulary
    seq_len = 64 if n_bytes < _BYTES_ONLY else 128 if n_bytes < 5e6 else 256
    model = {**shape._asdict(), "max_seq_len": 2 * seq_len, "vocab_size": size or BYTE_VOCAB_SIZE}
    config = {
        "name": name,
        "model": model,
        "tokenizer": {"kind": "byte"} if size is None else {"kind": "bpe", "vocab_size": size},
        "data": {
            "source": source,
            "seq_len": seq_len,
            # Half a megabyte gives a loss to about 0.01 nats; small texts give a tenth.
            "val_fraction": float(f"{min(0.1, max(5e5 / n_bytes, 1e-4)):.2g}"),
        },
        "optim": {
            "lr": float(f"{3e-3 * min(1, 128 / shape.dim):.2g}")
        },  # ∝ 1/d: µP (arXiv 2203.03466)
        "train": {},
    }
    n_params = count_parameters(parse_run(config, name).model).total
    tokens = min(TOKENS_PER_PARAMETER * n_params, PASSES * n_bytes / bytes_per_token)
    batch = next(b for b in (64, 32, 16, 8, 4) if b == 4 or tokens / (b * seq_len) >= _STEPS)
    config["train"] = {"batch_size": batch}
    hundreds = int(tokens / (batch * seq_len)) // 100
    return _with_steps(parse_run(config, name), max(_FEWEST_STEPS, 100 * hundreds))
