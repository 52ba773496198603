"""Sampling text: prefill once, then one token at a time against the KV cache.

One loop serves all: ``generate`` collects it, ``stream`` passes it on, ``generate_batch`` runs it
on several prompts of unequal length, each of which gets what it would get alone.

Past ``max_seq_len`` the context slides: its newer half is read again, and sampling continues.

Shapes: B prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from minillama.arguments import finite_number, whole_ids, whole_number
from minillama.config import ModelConfig
from minillama.errors import ConfigError, MinillamaError
from minillama.model.decoding import Decoder
from minillama.model.kv_cache import KVCache
from minillama.model.transformer import Transformer


class SamplingOptions(TypedDict, total=False):
    """How ids are drawn; :func:`generate` documents each option and its default."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None


def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """Continue a prompt; return the new ids, without the stop id that ended them.

    Args:
        model: the model to sample from.
        prompt_ids: at least one id (an empty text is its bos alone).
        max_new_tokens: how many ids to return at most.
        temperature: divides the logits; 0 takes the likeliest id each time.
        top_k: sample among the k likeliest; None or 0, or k above the vocabulary: among all.
        top_p: sample among the likeliest whose probabilities add up to p (Holtzman 2019).
        seed: of the sampling; None: another one each time.
        stop_ids: ids that end the text, such as the tokenizer's ``eos_id``.

    Raises:
        ConfigError: an argument is out of its range, or the prompt is empty or holds ids that the
            model does not know.
        TypeError: ``model`` is not a model, or ids are not whole numbers.
        MinillamaError: the model's logits are not finite.
    """
    options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return list(stream(model, prompt_ids, max_new_tokens, stop_ids=stop_ids, **options))


def stream(
    model: Transformer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    stop_ids: Collection[int] = (),
    **options: Unpack[SamplingOptions],
) -> Iterator[int]:
    """Yield the ids of :func:`generate` one by one, as they come; the call checks the arguments."""
    sampler = Sampler(1, **options)
    decoded = _decode(model, [prompt_ids], max_new_tokens, sampler, stop_ids)
    return (token for _, token in decoded)


def generate_batch(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    stop_ids: Collection[int] = (),
    **options: Unpack[SamplingOptions],
) -> list[list[int]]:
    """Continue several prompts at once; return the new ids of each, as :func:`generate` does.

    Row i draws from its own generator, seeded by ``seed + i``.
    """
    new_ids: list[list[int]] = [[] for _ in prompts]
    sampler = Sampler(len(prompts), **options)
    for row, token in _decode(model, prompts, max_new_tokens, sampler, stop_ids):
        new_ids[row].append(token)
    return new_ids


class Sampler:
    """Draws the next id of each row from its logits."""

    def __init__(
        self,
        rows: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.temperature = finite_number("temperature", temperature, "must be 0 (greedy) or above")
        self.top_k, self.top_p = None, None
        if top_k is not None:
            self.top_k = whole_number("top_k", top_k, 0, "must be 0 (all) or above") or None
        if top_p is not None:
            rule = "must be above 0 and at most 1"
            self.top_p = finite_number("top_p", top_p, rule, positive=True)
            if self.top_p > 1:
                raise ConfigError(f"top_p = {top_p}: {rule}")
        seed = None if seed is None else whole_number("seed", seed)
        rows = whole_number("rows", rows, 0)
        self._generators = [torch.Generator() for _ in range(rows)]
        for row, generator in enumerate(self._generators):
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed((seed + row) % 2**64)

    def draw(self, logits_BV: Tensor, rows: Sequence[int]) -> list[int]:
        """Return one id for each of ``rows``, whose logits are in the same order."""
        # The sum is the faster check; it may overflow though each logit is finite.
        if not logits_BV.sum().isfinite() and not logits_BV.isfinite().all():
            raise MinillamaError("the model's logits are not finite; its weights are of no use")
        if self.temperature == 0:
            return logits_BV.argmax(-1).tolist()
        p_BV = self.probabilities(logits_BV)
        return [
            int(torch.multinomial(p_V, 1, generator=self._generators[row]))
            for p_V, row in zip(p_BV, rows, strict=True)
        ]

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """Return what is sampled from, after temperature, top-k and top-p, float32 on the CPU."""
        logits_BV = logits_BV.float().cpu()
        vocab_size = logits_BV.shape[-1]
        if self.top_k and self.top_k < vocab_size:
            kth = logits_BV.topk(self.top_k, dim=-1).values[..., -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < kth, -torch.inf)
        # No temperature may overflow, nor turn into 0 or infinity where it is rounded to float32.
        limits = torch.finfo(torch.float32)
        temperature = min(max(self.temperature, limits.tiny), limits.max)
        p_BV = ((logits_BV - logits_BV.amax(-1, keepdim=True)) / temperature).softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            # By logits, which differ where probabilities round to the same number.
            order = logits_BV.sort(dim=-1, descending=True, stable=True).indices
            sorted_p = p_BV.gather(-1, order)
            before = sorted_p.cumsum(-1) - sorted_p
            cut = torch.zeros_like(p_BV).scatter(-1, order, sorted_p * (before < self.top_p))
            p_BV = cut / cut.sum(-1, keepdim=True)
        return p_BV


def _decode(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampler: Sampler,
    stop_ids: Collection[int],
) -> Iterator[tuple[int, int]]:
    """Check the arguments; return an iterator over (row, new id)."""
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise TypeError(f"model must be a Transformer, not {type(model).__name__}")
    if model.embed.weight.is_meta:
        raise ConfigError("the model is on the meta device, without weights; load them first")
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens, 0, "must be 0 or above")
    contexts = [whole_ids(f"prompt {row}", ids) for row, ids in enumerate(prompts)]
    for row, ids in enumerate(contexts):
        if not ids:
            raise ConfigError(f"prompt {row} is empty; begin it with the tokenizer's bos id")
        _check_ids(ids, row, model.config.known_vocab_size)
    stop_ids = frozenset(whole_ids("stop_ids", stop_ids))
    return _new_ids(model, contexts, max_new_tokens, sampler, stop_ids)


def _new_ids(
    model: Transformer,
    contexts: list[list[int]],
    max_new_tokens: int,
    sampler: Sampler,
    stop_ids: Collection[int],
) -> Iterator[tuple[int, int]]:
    """Yield (row, new id) until every row has stopped or has all its tokens."""
    if not contexts or not max_new_tokens:
        return
    rows = list(range(len(contexts)))
    window = model.config.max_seq_len
    # A prompt longer than the window keeps its end.
    contexts = [ids[-window:] for ids in contexts]
    capacity = min(window, max(map(len, contexts)) + max_new_tokens)
    cache, logits_BV = _prefill(model, contexts, capacity)
    decoder = Decoder(model, cache)
    for produced in range(1, max_new_tokens + 1):
        tokens = sampler.draw(logits_BV, rows)
        alive = [place for place, token in enumerate(tokens) if token not in stop_ids]
        for place in alive:
            yield rows[place], tokens[place]
        if not alive or produced == max_new_tokens:
            return
        if len(alive) < len(rows):
            rows, contexts = [rows[i] for i in alive], [contexts[i] for i in alive]
            tokens = [tokens[i] for i in alive]
            cache.keep(alive)
            decoder = Decoder(model, cache)
        for ids, token in zip(contexts, tokens, strict=True):
            ids.append(token)
        if cache.length == cache.capacity:
            # The window is full.  Only rows that fill it slide, as they would alone.
            contexts = [
                ids if len(ids) <= window else ids[-(window + 1) // 2 :] for ids in contexts
            ]
            capacity = min(window, max(map(len, contexts)) + max_new_tokens - produced)
            cache, logits_BV = _prefill(model, contexts, capacity)
            decoder = Decoder(model, cache)
        else:
            logits_BV = decoder.read(tokens)


@torch.inference_mode()
def _prefill(
    model: Transformer, contexts: list[list[int]], capacity: int
) -> tuple[KVCache, Tensor]:
    """Read all contexts at once, right-aligned, into a new cache.

    Returns the cache and the logits (B, V) after the last token of each; no others are computed.
    """
    weight = model.embed.weight
    longest = max(map(len, contexts))
    pad_B = torch.tensor([longest - len(ids) for ids in contexts], device=weight.device)
    ids_BT = torch.tensor(
        [[0] * (longest - len(ids)) + ids for ids in contexts], device=weight.device
    )
    cache = KVCache(
        model.config, len(contexts), capacity, pad_B=pad_B, dtype=weight.dtype, device=weight.device
    )
    return cache, model.head(model.hidden(ids_BT, cache)[:, -1])


def _check_ids(ids: Sequence[int], row: int, vocab_size: int) -> None:
    for place, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"prompt {row} has id {token} at place {place}, outside the model's vocabulary of "
                f"{vocab_size}; encode it with the model's own tokenizer"
            )
