"""The model's hot functions, each as a plain formula to read and a fast version that equals it.

    rms_norm              rms_norm.py       rms_norm_reference
    causal_attention      attention.py      causal_attention_reference
    decode_attention      attention.py      decode_attention_reference
    swiglu                mlp.py            swiglu_reference
    gated_mlp             mlp.py            gated_mlp_reference
    residual_mlp          mlp.py            x + gated_mlp_reference(rms_norm_reference(x))
    residual_attention    attention_sub_layer.py  residual_attention_reference
    linear_cross_entropy  cross_entropy.py  linear_cross_entropy_reference
    linear                linear.py         F.linear
    weight_gradient       linear.py         dyᵀ·x
    FusedDecoder          decoder.py        all of them, for one token of each row

On a CPU the fast ones are C (library.py) where frame.py finds plain memory; else PyTorch.
README.md says how to change one, add one and time it.
"""

from minillama.model.kernels.attention import (
    attend,
    causal_attention,
    causal_attention_reference,
    decode_attention,
    decode_attention_reference,
)
from minillama.model.kernels.attention_sub_layer import (
    residual_attention,
    residual_attention_reference,
)
from minillama.model.kernels.cross_entropy import (
    IGNORED,
    LossOptions,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    logits_cross_entropy,
)
from minillama.model.kernels.decoder import FusedDecoder, Layer
from minillama.model.kernels.linear import linear, weight_gradient
from minillama.model.kernels.mlp import (
    gated_mlp,
    gated_mlp_reference,
    residual_mlp,
    swiglu,
    swiglu_reference,
)
from minillama.model.kernels.rms_norm import rms_norm, rms_norm_reference

__all__ = [
    "IGNORED",
    "FusedDecoder",
    "Layer",
    "LossOptions",
    "attend",
    "causal_attention",
    "causal_attention_reference",
    "decode_attention",
    "decode_attention_reference",
    "gated_mlp",
    "gated_mlp_reference",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "logits_cross_entropy",
    "residual_attention",
    "residual_attention_reference",
    "residual_mlp",
    "rms_norm",
    "rms_norm_reference",
    "swiglu",
    "swiglu_reference",
    "weight_gradient",
]
