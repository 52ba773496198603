"""Others' Llama of the shape of ours, and a training step of each: same batch, AdamW, clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from x_transformers import Decoder, TransformerWrapper

from minillama.config import ModelConfig
from minillama.config.run import OptimConfig

logger.disable("x_transformers")  # which has advice on the shape that it is given


def hf_llama(config: ModelConfig) -> LlamaForCausalLM:
    """Return transformers' Llama of the same shape."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.known_vocab_size,
            hidden_size=config.dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            intermediate_size=config.ffn_dim,
            max_position_embeddings=config.max_seq_len,
            tie_word_embeddings=config.tie_embeddings,
        )
    )


def hf_step(model: LlamaForCausalLM, call: Any, tokens: Tensor) -> Callable[[], object]:
    """Return what makes one update of ``model``; ``call`` is it, or what it was compiled to."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss() -> Tensor:
        # As many targets as ours: without shift_labels the last position would have none.
        output = call(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False)
        mean: Tensor = output.loss
        return mean

    return _update(model, loss)


def x_transformer(config: ModelConfig) -> TransformerWrapper:
    """Return x-transformers' decoder of the same shape; its gated MLP has a bias more."""
    layers = Decoder(
        dim=config.dim,
        depth=config.n_layers,
        heads=config.n_heads,
        attn_dim_head=config.head_dim,
        attn_kv_heads=config.n_kv_heads,
        attn_flash=True,
        rotary_pos_emb=True,
        rotary_emb_dim=config.head_dim,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=config.ffn_dim / config.dim,
    )
    return TransformerWrapper(
        num_tokens=config.vocab_size,
        max_seq_len=config.max_seq_len,
        attn_layers=layers,
        use_abs_pos_emb=False,
        tie_embedding=config.tie_embeddings,
    )


def x_step(model: TransformerWrapper, tokens: Tensor) -> Callable[[], object]:
    """Return what makes one update of ``model``."""
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    return _update(model, lambda: F.cross_entropy(model(inputs).flatten(0, 1), targets))


def _update(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], object]:
    optim, parameters = OptimConfig(), list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters,
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss())
        nn.utils.clip_grad_norm_(parameters, optim.grad_clip)
        optimizer.step()

    return step
