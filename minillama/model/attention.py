"""Causal self-attention with grouped queries (Ainslie 2023, arXiv 2305.13245).

Query head i reads key/value head i // (n_heads / n_kv_heads).

Shapes: B batch, T positions, S positions that are read, D width, H query heads, G key/value heads,
K features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillama.arguments import check_flag, check_type, whole_number
from minillama.config import ModelConfig
from minillama.config.placement import PLACEMENTS
from minillama.errors import ConfigError
from minillama.model.kernels import attend, causal_attention
from minillama.model.kv_cache import KVCache
from minillama.model.ngpt import LearnedScale
from minillama.model.norms import L2Norm, RMSNorm, build_norm
from minillama.model.projection import packed_linear
from minillama.model.rope import Rotation, rotate


class Attention(nn.Module):
    """softmax(q·kᵀ / √K)·v, each position attending to itself and those before it, then o_proj.

    ``qk_norm`` puts an RMSNorm on queries and keys before RoPE: over each head's features
    (``head``, Qwen 3), or over the whole projection (``full``, OLMo 2).  It is always an
    RMSNorm, so that another kind of norm in the model changes nothing here.  ``qkv_norm`` norms
    each head's queries, keys and values with the model's kind of norm (HybridNorm).  ``v_norm`` is
    an RMSNorm of each head's values, without a gain (Gemma 3n).

    ``attention_gate`` multiplies what o_proj reads by σ(g_proj(x)), x being the input of q_proj,
    k_proj and v_proj, one factor for each head or for each feature (Qiu 2025, arXiv 2505.06708,
    gate G1; ``element`` in Qwen3-Next).

    In an nGPT queries and keys have length 1, then learned lengths (:mod:`minillama.model.ngpt`).

    Raises:
        ConfigError: both are asked for, or ``layer`` is below 0.
    """

    q_norm: nn.Module
    k_norm: nn.Module
    v_norm: nn.Module
    g_proj: nn.Linear | None
    qk_scale: LearnedScale | None

    def __init__(self, config: ModelConfig, layer: int = 0, *, qkv_norm: bool = False) -> None:
        super().__init__()
        check_type("config", config, ModelConfig)
        check_flag("qkv_norm", qkv_norm)
        self.layer = whole_number("layer", layer, 0)
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.head_dim = config.head_dim
        q_dim, kv_dim = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.dim, q_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, config.dim, bias=False)
        self.qk_norm = config.norm.qk_norm
        self.qkv_norm = qkv_norm
        if qkv_norm and self.qk_norm != "none":
            raise ConfigError(
                f"model.norm.qk_norm = {self.qk_norm!r}: the placement {config.norm.placement} "
                "norms q, k and v itself; leave this at none"
            )
        norm = config.norm
        self.q_norm, self.k_norm, self.v_norm = (nn.Identity() for _ in range(3))
        if qkv_norm:
            self.q_norm, self.k_norm, self.v_norm = (
                build_norm(norm, self.head_dim, "attention") for _ in range(3)
            )
        elif self.qk_norm != "none":
            whole, offset = self.qk_norm == "full", norm.qk_unit_offset
            self.q_norm = RMSNorm(q_dim if whole else self.head_dim, norm.eps, unit_offset=offset)
            self.k_norm = RMSNorm(kv_dim if whole else self.head_dim, norm.eps, unit_offset=offset)
        self.qk_scale = None
        if PLACEMENTS.get(norm.placement).unit_weights:
            self.q_norm, self.k_norm = (L2Norm(self.head_dim, norm.eps) for _ in range(2))
            self.qk_scale = LearnedScale(kv_dim, start=1.0, stored=config.dim**-0.5)
        if norm.v_norm:
            self.v_norm = RMSNorm(self.head_dim, norm.eps, affine=False)
        self.g_proj = None
        if config.attention_gate != "none":
            by_head = config.attention_gate == "head"
            self.g_proj = nn.Linear(config.dim, self.n_heads if by_head else q_dim, bias=False)

    def heads(self, x_BTD: Tensor) -> Tensor:
        """Return all heads of queries, keys and values, normed, (B, T, H + 2G, K)."""
        qkv = packed_linear(x_BTD, self.q_proj, self.k_proj, self.v_proj)
        if all(type(norm) is nn.Identity for norm in (self.q_norm, self.k_norm, self.v_norm)):
            return torch.unflatten(qkv, -1, (-1, self.head_dim))
        q_dim, kv_dim = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        q, k, v = torch.split(qkv, [q_dim, kv_dim, kv_dim], dim=-1)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (torch.unflatten(y, -1, (-1, self.head_dim)) for y in (q, k, v))
        if self.qk_norm != "full":
            q, k = self.q_norm(q), self.k_norm(k)
        return torch.cat((q, k, self.v_norm(v)), dim=2)

    def qkv(self, x_BTD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, T, K), keys and values (B, G, T, K), normed and rotated."""
        parts = [self.n_heads, self.n_kv_heads, self.n_kv_heads]
        q, k, v = torch.split(self.heads(x_BTD).transpose(1, 2), parts, dim=1)
        q, k = rotate(q, rotation), rotate(k, rotation)
        if self.qk_scale is not None:
            s_GK = torch.unflatten(self.qk_scale(), 0, (self.n_kv_heads, self.head_dim))
            s_HK = s_GK.repeat_interleave(self.n_heads // self.n_kv_heads, dim=0)
            # Attention divides by √K, and nGPT multiplies by it.
            q, k = self.head_dim * s_HK[:, None] * q, s_GK[:, None] * k
        return q, k, v

    def forward(
        self,
        x_BTD: Tensor,
        rotation: Rotation,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend, with a ``cache`` also to the positions in it.

        ``mask`` is True where a key may be seen; None is causal (T = S), or a single query.

        Raises:
            ValueError: ``x`` is not (B, T, D), or the rotation is not that of T positions.
        """
        check_type("x", x_BTD, Tensor)
        if x_BTD.ndim != 3:
            raise ValueError(f"x of shape {tuple(x_BTD.shape)}: must be (batch, positions, dim)")
        is_plain = self.qk_scale is None
        if cache is None and mask is None and is_plain:
            heads = self.heads(x_BTD)
            y_BTHK = causal_attention(heads, rotation, self.n_heads, self.n_kv_heads)
        elif cache is not None and x_BTD.shape[1] == 1 and is_plain:
            y_BTHK = cache.attend(self.layer, self.heads(x_BTD), rotation)
        else:
            q_BHTK, k_BGSK, v_BGSK = self.qkv(x_BTD, rotation)
            if cache is not None:
                k_BGSK, v_BGSK = cache.append(self.layer, k_BGSK, v_BGSK)
            causal = mask is None and q_BHTK.shape[2] > 1
            y_BTHK = attend(q_BHTK, k_BGSK, v_BGSK, mask, is_causal=causal).transpose(1, 2)
        if self.g_proj is not None:
            gate = torch.sigmoid(packed_linear(x_BTD, self.g_proj))
            y_BTHK = y_BTHK * torch.unflatten(gate, -1, (self.n_heads, -1))
        return packed_linear(y_BTHK.flatten(2), self.o_proj)
