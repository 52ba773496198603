"""Decoding with a KV cache, against transformers' ``generate`` and llama.cpp on the exported file.

The model has the shape of stories15M (15 M parameters, 32,000 ids, tied head) and random weights:
time does not depend on them.  Greedy, float32, one prompt; and 16 prompts of unequal length at once
against one after another.  llama.cpp's figure is the one it reports itself, which excludes its
server.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from transformers import GenerationConfig

from minillama.bench.peers import hf_llama
from minillama.bench.timing import (
    load_average,
    machine,
    quartiles,
    ratios,
    show_quartiles,
    table,
    take_turns,
    torch_threads,
)
from minillama.config import RunConfig
from minillama.data.tokenizer import ByteTokenizer
from minillama.interop.gguf import export
from minillama.model.transformer import Transformer
from minillama.sampling import generate, generate_batch
from minillama.training.checkpoint import save_checkpoint

STORIES15M = {"dim": 288, "n_layers": 6, "n_heads": 6, "ffn_dim": 768, "vocab_size": 32000}
OURS, HF, LLAMA_CPP = "minillama", "transformers", "llama.cpp"
_PROMPT = [1, *range(100, 107)]


def bench(
    threads: Sequence[int] = (1,),
    rounds: int = 7,
    new_tokens: int = 256,
    model: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Generate ``new_tokens`` with each contender in alternation, on each number of threads.

    Returns:
        ``rows``, one for each number of threads: ``tokens_per_s`` of each contender, ``speedup``,
        ours over each, and ``batched``, the tokens/s of 16 prompts at once over one by one; ratios
        with quartiles; ``machine``.
    """
    load_before, rows = load_average(), []
    with tempfile.TemporaryDirectory(prefix="minillama-") as folder:
        ours, file = _build(dict(model or STORIES15M), Path(folder), len(_PROMPT) + new_tokens)
        for n_threads in threads:
            with torch_threads(n_threads):
                contenders = _contenders(ours, file, n_threads, new_tokens)
                take_turns(contenders, 1)  # not counted
                speeds = take_turns(contenders, rounds)
                batched = [_batched_over_single(ours, new_tokens // 4) for _ in range(3)]
            rows.append(
                {
                    "threads": n_threads,
                    "rounds": rounds,
                    "new_tokens": new_tokens,
                    "tokens_per_s": {n: statistics.median(s) for n, s in speeds.items()},
                    "speedup": {
                        name: ratios(speeds[OURS], s) for name, s in speeds.items() if name != OURS
                    },
                    "batched": quartiles(batched),
                }
            )
    return {
        "benchmark": "decode",
        "dtype": "float32",
        "rows": rows,
        "machine": machine(load_before),
    }


def show(result: Mapping[str, Any]) -> str:
    """Return the result of :func:`bench` as a text table."""
    lines = [["threads", "rounds", *(f"{n} tokens/s" for n in (OURS, HF, LLAMA_CPP))]]
    lines[0] += [f"ours over {HF}", f"ours over {LLAMA_CPP}", "16 prompts over one by one"]
    for row in result["rows"]:
        speeds, speedup = row["tokens_per_s"], row["speedup"]
        lines.append([str(row["threads"]), str(row["rounds"])])
        lines[-1] += [f"{speeds[name]:.0f}" for name in (OURS, HF, LLAMA_CPP)]
        lines[-1] += [
            show_quartiles(speedup[HF]),
            show_quartiles(speedup[LLAMA_CPP]),
            show_quartiles(row["batched"]),
        ]
    return table("decoding, float32", "medians of each round's ratio (quartiles)", result, lines)


def _build(model: dict[str, int], folder: Path, length: int) -> tuple[Transformer, Path]:
    config = RunConfig.model_validate(
        {
            "model": model | {"max_seq_len": max(512, length)},
            "tokenizer": {"kind": "byte"},
            "data": {"seq_len": 32},
        }
    )
    ours = Transformer(config.model).eval()
    save_checkpoint(folder / "checkpoint", ours, ByteTokenizer(), config)
    export(folder / "checkpoint", folder / "model.gguf", "f32")
    return ours, folder / "model.gguf"


def _contenders(
    ours: Transformer, file: Path, n_threads: int, new_tokens: int
) -> dict[str, Callable[[], float]]:
    """Return the functions that generate text and return their tokens/s."""
    theirs, server = hf_llama(ours.config).train(False), _serve(file, n_threads, new_tokens)
    prompt = torch.tensor([_PROMPT])
    build: Any = GenerationConfig  # not typed
    how = build(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
    )

    def clocked(call: Callable[[], object]) -> Callable[[], float]:
        def speed() -> float:
            start = time.perf_counter()
            call()
            return new_tokens / (time.perf_counter() - start)

        return speed

    return {
        OURS: clocked(lambda: generate(ours, _PROMPT, new_tokens, temperature=0)),
        HF: clocked(lambda: theirs.generate(prompt, generation_config=how)),
        LLAMA_CPP: lambda: _complete(server, new_tokens),
    }


def _batched_over_single(ours: Transformer, new_tokens: int) -> float:
    prompts = [[1, *range(100, 104 + 2 * row)] for row in range(16)]
    start = time.perf_counter()
    generate_batch(ours, prompts, new_tokens, temperature=0)
    middle = time.perf_counter()
    for prompt in prompts:
        generate(ours, prompt, new_tokens, temperature=0)
    return (time.perf_counter() - middle) / (middle - start)


def _serve(file: Path, n_threads: int, new_tokens: int) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel = max(512, new_tokens + 2 * len(_PROMPT)), 1
    params.n_gpu_layers, params.fit_params = 0, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = n_threads
    params.verbosity = -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def _complete(server: xllamacpp.Server, new_tokens: int) -> float:
    body = {
        "prompt": _PROMPT,
        "n_predict": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        server.listening_address + "/completion",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        timings = json.load(answer)["timings"]
    assert timings["predicted_n"] >= new_tokens - 1, timings
    speed: float = timings["predicted_per_second"]
    return speed
