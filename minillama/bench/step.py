"""A training step against its own matrix products, and against others' Llama.

Contenders, of one shape and on one batch: our step as the trainer makes it (zero, loss, backward,
clip, AdamW), the same of transformers' ``LlamaForCausalLM``, eager and compiled, and of
x-transformers, and the model's matrix products alone.

Shapes: B windows, T positions, N = B·T tokens, D width, F inner width, V vocabulary, H heads, K
features of a head, L layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minillama.bench.peers import hf_llama, hf_step, x_step, x_transformer
from minillama.bench.shapes import SHAPES, Shape, training_step
from minillama.bench.timing import (
    alternate,
    load_average,
    machine,
    ratios,
    show_quartiles,
    table,
    torch_threads,
)
from minillama.model.kernels import linear, weight_gradient
from minillama.model.transformer import Transformer

OURS, PRODUCTS = "minillama", "its products"
EAGER, COMPILED, X_TRANSFORMERS = "HF eager", "HF compiled", "x-transformers"


def bench(
    threads: Sequence[int] = (1,),
    shapes: Sequence[Shape] = SHAPES,
    rounds: int = 15,
    seconds: float = 20.0,
    *,
    compiled: bool = True,
) -> dict[str, Any]:
    """Time one step of each contender in turns, on each number of threads.

    Returns:
        ``rows``, one for each threads × shape: median times in ms, ``over_products``, our time over
        that of our matrix products, ``speedup``, tokens/s over each peer's, all with quartiles;
        ``machine``.
    """
    load_before, rows = load_average(), []
    for n_threads in threads:
        with torch_threads(n_threads):
            for shape in shapes:
                times = alternate(_contenders(shape, compiled=compiled), rounds, seconds=seconds)
                rows.append(_row(n_threads, shape, times))
    return {
        "benchmark": "step",
        "dtype": "float32",
        "rows": rows,
        "machine": machine(load_before),
    }


def _row(n_threads: int, shape: Shape, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    peers = [name for name in times if name not in (OURS, PRODUCTS)]
    return {
        "threads": n_threads,
        "shape": shape._asdict(),
        "model": str(shape),
        "rounds": len(times[OURS]),
        "time_ms": {name: 1e3 * statistics.median(t) for name, t in times.items()},
        "over_products": ratios(times[OURS], times[PRODUCTS]),
        "speedup": {name: ratios(times[name], times[OURS]) for name in peers},
    }


def show(result: Mapping[str, Any]) -> str:
    """Return the result of :func:`bench` as a text table."""
    peers = list(result["rows"][0]["speedup"])
    lines = [
        ["threads", "model (V, B×T)", "rounds", "ms", "step / products"]
        + [f"tokens/s over {peer}" for peer in peers]
    ]
    for row in result["rows"]:
        lines.append(
            [
                str(row["threads"]),
                row["model"],
                str(row["rounds"]),
                f"{row['time_ms'][OURS]:.1f}",
                show_quartiles(row["over_products"]),
                *(show_quartiles(row["speedup"][peer]) for peer in peers),
            ]
        )
    return table(
        "training step, float32", "medians of each round's ratio (quartiles)", result, lines
    )


# ------------------------------------------------------------------------------------ contenders


def _contenders(shape: Shape, *, compiled: bool) -> dict[str, Callable[[], object]]:
    ours, tokens = Transformer(shape.config()), shape.tokens()
    theirs = hf_llama(ours.config)
    contenders = {
        OURS: training_step(ours, tokens),
        PRODUCTS: products(ours, shape),
        EAGER: hf_step(theirs, theirs, tokens),
        X_TRANSFORMERS: x_step(x_transformer(ours.config), tokens),
    }
    if compiled:
        contenders[COMPILED] = hf_step(theirs, torch.compile(theirs), tokens)
    return contenders


def products(model: Transformer, shape: Shape) -> Callable[[], object]:
    """Return what makes a step's matrix products and nothing else.

    Each linear layer three times (forward, for its input, for its weight), by the same calls and as
    joined as in the model; attention's two forward and four backward, over all T × T.
    """
    config, n = model.config, shape.batch * shape.length
    heads = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    in_block = [
        (heads, config.dim),
        (config.dim, config.n_heads * config.head_dim),
        (2 * config.ffn_dim, config.dim),
        (config.dim, config.ffn_dim),
    ]
    weights = [torch.randn(size) for size in in_block]
    head = torch.randn(config.known_vocab_size, config.dim)
    inputs = {w.shape: torch.randn(n, w.shape[1]) for w in (*weights, head)}
    grads = {w.shape: torch.randn(n, w.shape[0]) for w in (*weights, head)}
    q, k, v, dy = torch.randn(4, shape.batch, config.n_heads, shape.length, config.head_dim)
    p = torch.randn(shape.batch, config.n_heads, shape.length, shape.length)

    def of_weight(weight: Tensor) -> None:
        x, grad = inputs[weight.shape], grads[weight.shape]
        linear(x, weight)
        linear(grad, weight.t())
        weight_gradient(grad, x)

    @torch.no_grad()
    def call() -> None:
        for _ in range(config.n_layers):
            for weight in weights:
                of_weight(weight)
            q @ k.mT, p @ v
            dy @ v.mT, p.mT @ dy, p @ k, p.mT @ q
        of_weight(head)

    return call
