"""The model's hot places, each as a plain function to read and a fast one that equals it.

    rms_norm              fused.py          rms_norm_reference
    causal_attention      attention.py      causal_attention_reference
    decode_attention      decode.py         decode_attention_reference
    swiglu                swiglu.py         swiglu_reference
    gated_mlp             mlp.py            gated_mlp_reference
    linear_cross_entropy  cross_entropy.py  linear_cross_entropy_reference
    linear                linear.py         F.linear
    weight_gradient       matmul.py         dyᵀ·x
    Stack                 stack.py          all of them, for one token of each row

On a CPU the fast ones are C (compiled.py), where dispatch.py finds plain memory; else PyTorch.
"""

from minillama.model.kernels.attention import attend, causal_attention, causal_attention_reference
from minillama.model.kernels.cross_entropy import (
    IGNORED,
    Options,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from minillama.model.kernels.decode import decode_attention, decode_attention_reference
from minillama.model.kernels.fused import rms_norm
from minillama.model.kernels.linear import linear
from minillama.model.kernels.matmul import weight_gradient
from minillama.model.kernels.mlp import gated_mlp, gated_mlp_reference
from minillama.model.kernels.reference import rms_norm_reference
from minillama.model.kernels.stack import Layer, Stack
from minillama.model.kernels.swiglu import swiglu, swiglu_reference

__all__ = [
    "IGNORED",
    "Layer",
    "Options",
    "Stack",
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
    "rms_norm",
    "rms_norm_reference",
    "swiglu",
    "swiglu_reference",
    "weight_gradient",
]
