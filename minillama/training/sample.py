"""What a model writes at the end of its run."""

from __future__ import annotations

from minillama.data.tokenizer import Tokenizer
from minillama.generate import generate
from minillama.model.transformer import Transformer

SAMPLE_TOKENS, SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 200, 0.8, 50


def continue_text(model: Transformer, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    """Return ``prompt`` and what the model makes of it, the same for the same ``seed``."""
    ids = tokenizer.encode(prompt, bos=True)
    ids += generate(
        model,
        ids,
        SAMPLE_TOKENS,
        temperature=SAMPLE_TEMPERATURE,
        top_k=SAMPLE_TOP_K,
        seed=seed,
        stop_ids=(tokenizer.eos_id,),
    )
    return tokenizer.decode(i for i in ids if i < tokenizer.vocab_size)
