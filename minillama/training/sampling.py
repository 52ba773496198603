"""What a model writes at the end of its run."""

from __future__ import annotations

from minillama.data.tokenizer import Tokenizer
from minillama.model.transformer import Transformer
from minillama.sampling import generate

TOKENS, TEMPERATURE, TOP_K = 200, 0.8, 50


def write_sample(model: Transformer, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    """Return ``prompt`` and what ``model`` makes of it."""
    ids = tokenizer.encode(prompt, bos=True)
    ids += generate(
        model,
        ids,
        TOKENS,
        temperature=TEMPERATURE,
        top_k=TOP_K,
        seed=seed,
        stop_ids=(tokenizer.eos_id,),
    )
    return tokenizer.decode(i for i in ids if i < tokenizer.vocab_size)
