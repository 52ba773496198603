"""A model whose scales are folded into plain gains and the embedding, with the same logits.

    RMSNorm with 1 + w          γ = 1 + w
    RMSNorm without a gain      γ = 1
    placement scaled, s = 1/√ℓ  γ = s · γ of the norm before the sub-layer; placement pre
    embed_scale                 rows of the embedding times the scale; a tied head gets its own rows
    parametrization mup         attention's factor: q_proj, or the gain of q_norm; a sub-layer's
                                factor: its last matrix, or the gain behind it; the logits' factor:
                                the head, which gets its own rows

So that programs which know the plain forms alone can run it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minillama.config import ModelConfig
from minillama.config.model import MupConfig
from minillama.config.norms import NormConfig
from minillama.errors import ConfigError
from minillama.model.parametrization import attention_factor, width_ratio
from minillama.model.transformer import Block, Transformer

_INPUT_NORMS = ("attention_input_norm", "mlp_input_norm")


def _folded_config(config: ModelConfig) -> ModelConfig:
    norm, changed = config.norm, dict[str, object]()
    if norm.kind == "rmsnorm":
        has_shift = norm.options["bias"] and norm.options["affine"]
        options = {**norm.options, "affine": True, "unit_offset": False, "bias": has_shift}
        placement = "pre" if norm.placement == "scaled" else norm.placement
        changed |= {"options": options, "placement": placement}
    changed["qk_unit_offset"] = False
    scaled_and_tied = config.tie_embeddings and (
        config.embed_scale != "none" or width_ratio(config) != 1
    )
    return config.model_copy(
        update={
            "norm": NormConfig.model_validate({**norm.model_dump(), **changed}),
            "parametrization": "standard",
            "mup": MupConfig(),
            "embed_scale": "none",
            "tie_embeddings": config.tie_embeddings and not scaled_and_tied,
        }
    )


def _scaled_in_block(model: Transformer) -> dict[str, float]:
    """Return the factor of each module of a block that a parametrization's factors go into."""
    block, norm = model.blocks[0], model.config.norm
    assert isinstance(block, Block)
    query = "q_proj" if type(block.attention.q_norm) is nn.Identity else "q_norm"
    factors = {query: attention_factor(model.config)}
    for output_norm, matrix in (
        ("attention_output_norm", "o_proj"),
        ("mlp_output_norm", "down_proj"),
    ):
        has_norm = type(getattr(block, output_norm)) is not nn.Identity
        factors[output_norm if has_norm else matrix] = block.output_scale
    factors = {module: factor for module, factor in factors.items() if factor != 1}
    normed = [module for module in factors if module.endswith("_norm")]
    kept = norm.kind == "rmsnorm" or (norm.kind == "layernorm" and norm.options["affine"])
    if normed and not (kept or (normed == ["q_norm"] and norm.qk_norm != "none")):
        raise ConfigError(
            f"model.parametrization = mup cannot be folded into the norm {norm.kind!r}, which has "
            "no gain to take its factors; export a model with rmsnorm or layernorm"
        )
    return factors


@torch.no_grad()
def fold_scales(model: Transformer) -> Transformer:
    """Return a model with the same logits, to rounding, and as few kinds of scales as can be.

    ``model`` itself if there is nothing to fold.

    Raises:
        ConfigError: a factor has no place to go to.
    """
    config = _folded_config(model.config)
    if config == model.config:
        return model
    old, norm = model.state_dict(), model.config.norm
    folded = Transformer(config).to(model.embed.weight)
    unit_offset = norm.kind == "rmsnorm" and bool(norm.options["unit_offset"])
    scaled_in_block = _scaled_in_block(model)
    weights: dict[str, Tensor] = {}
    for name, start in folded.state_dict().items():
        weight = old.get(name, old["embed.weight"] if name == "lm_head.weight" else start)
        module = name.split(".")[-2]
        is_qk = module in ("q_norm", "k_norm") and norm.qk_norm != "none"
        has_offset = norm.qk_unit_offset if is_qk else unit_offset
        if has_offset and module.endswith("_norm") and name.endswith(".weight"):
            weight = 1 + weight
        if module in _INPUT_NORMS and config.norm.placement != norm.placement:
            weight = model.blocks[int(name.split(".")[1])].s * weight
        if name == "lm_head.weight":
            weight = weight * model.logit_factor
        if module in scaled_in_block and name.endswith((".weight", ".bias")):
            weight = weight * scaled_in_block[module]
        if name == "embed.weight":
            scale = 1.0 if model.embed_scale is None else model.embed_scale.item()
            weight = weight * (scale * model.fixed_embed_scale)
        weights[name] = weight.clone()
    folded.load_state_dict(weights)
    return folded.train(model.training)
