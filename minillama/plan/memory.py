"""The memory that a training run takes, part by part, by arithmetic.

    weights     4 bytes a parameter: float32, also under bfloat16 autocast
    gradients   4 bytes a parameter
    optimizer   8 bytes a parameter: AdamW's two means (optim.py)
    copies      of weights that backward reads again: what autocast casts, 2 bytes a parameter, and
                what is put side by side for one product (model/projection.py)
    activations what the forward pass keeps for the backward pass, :func:`activations_per_token`
    loss        what the loss takes at its peak, :func:`loss_bytes`
    gathered    FSDP alone: the layers that are whole at a time
    other       the batch, the table of rotations, weights a probe remembers, Python's own objects

Backward makes gradients as it lets activations go, so the peak in use is less than the sum:
:attr:`Memory.peak`; what a CPU's process then holds is more: :attr:`Memory.peak_on_cpu`.  Sizes are
of one rank.  Not in it: the token files, whose pages the system takes back when it needs them, and
what the process takes before it trains (:data:`PROCESS`).

:func:`activations_per_token`, :func:`copies_bytes` and :func:`loss_bytes` say what the code of
model/ keeps, tensor by tensor; a test compares them with what autograd saves.  They change where it
does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from minillama.config import ModelConfig, RunConfig
from minillama.config.run import TrainConfig
from minillama.model.kernels.cross_entropy import CHUNK_NUMBERS, CHUNK_ROWS
from minillama.model.kernels.mlp import is_one_kernel
from minillama.plan.parameters import Layout, block_matrices, count_parameters

Parallel = Literal["none", "ddp", "fsdp"]

PROCESS = 330_000_000
"""Bytes of a process that has imported torch and minillama and done nothing yet (Linux, CPU)."""

BUFFERS = 35_000_000
"""Bytes that BLAS, the tokenizer and the first use of many a module take (measured)."""

GAPS, GAPS_OF_ACCUMULATION = 0.25, 0.75
GAPS_OF_OTHER_CODE, GAPS_OF_ITS_ACCUMULATION = 0.55, 0.25
GAPS_OF_RECOMPUTING = 3.0
GAPS_OF_GRADIENTS = 0.2
"""Shares of the activations, and of the gradients, that gaps of the heap take beside them:
with the C kernels, and more where gradients add up; the same without the kernels; with
train.recompute, what its backward pass needs for a moment included (measured)."""

BLOCK_OBJECTS = 60_000
"""Bytes of Python objects of a block, which count where blocks are many and small (measured)."""

FLOAT32, BFLOAT16, INT64 = 4, 2, 8

NORM_KEEPS = {"rmsnorm": 0, "layernorm": 0, "l2norm": 0, "scalenorm": 1, "dyt": 1, "derf": 2}
"""What a kind keeps besides its input, in tensors as large as that."""

_UNKNOWN_NORM_KEEPS = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part; see the module's list."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    loss: int
    gathered: int
    other: int
    embedding_gradients: int
    """Two more gradients of a tied embedding, for a moment."""
    gaps: float
    """Share of the activations that the heap of a CPU's process loses besides."""
    accumulates: bool
    """Gradients of before are there while a pass runs: micro-batches', or DDP's."""

    @property
    def state(self) -> int:
        """What is there all the time."""
        return self.weights + self.optimizer + self.other

    @property
    def peak(self) -> int:
        """The most that is in use at once, in one pass forward and backward."""
        passing = self.activations + self.loss + self.copies
        # At the end of backward a tied embedding's gradient is a sum of two.
        gradients = self.gradients + self.embedding_gradients
        both = passing + self.gradients if self.accumulates else passing
        return self.state + self.gathered + max(both, gradients)

    @property
    def peak_on_cpu(self) -> int:
        """The most that the process holds on a CPU, beyond :data:`PROCESS`.

        Tensors of less than 32 MiB come from the heap of the C library, which gives nothing back
        and fills its gaps as well as it can: best where the same sizes come in the same order,
        worse where gradients stay among them, worst where blocks are run anew.  The shares were
        measured (glibc 2.36) and are not exact: the order of calls decides.
        """
        held_back = self.gaps * self.activations + GAPS_OF_GRADIENTS * self.gradients
        return self.peak + round(held_back) + BUFFERS


@dataclass(frozen=True)
class Execution:
    """How the model runs: which of its code's ways it goes."""

    autocast: bool = False
    """Matrix products are in bfloat16; the residual stream stays float32."""
    kernels: bool = False
    """By the C kernels, which are for float32 on a CPU."""
    compiled: bool = False
    """By torch.compile, for which the loss is written with all logits at once."""
    recompute: bool = False
    """Blocks keep their input alone; one at a time is run anew in the backward pass."""

    @classmethod
    def of(cls, train: TrainConfig, *, on_cpu: bool) -> Execution:
        """Return how a run goes on a CPU, or on another device."""
        autocast = train.dtype != "float32"
        forbidden = os.environ.get("MINILLAMA_KERNELS") == "0"
        kernels = on_cpu and not (autocast or train.compile or forbidden)
        return cls(autocast, kernels, train.compile, train.recompute)

    @property
    def product(self) -> int:
        """Bytes of a number that a matrix product gives."""
        return BFLOAT16 if self.autocast else FLOAT32


def activations_per_token(config: ModelConfig, how: Execution) -> dict[str, int]:
    """Return the bytes a token that forward keeps for backward, by what keeps them.

    Args:
        config: resolved.
        how: it runs.
    """
    layout, dim, product = Layout.of(config), config.dim, how.product
    n_layers, size = config.n_layers, config.head_dim
    q_dim, kv_dim = config.n_heads * size, config.n_kv_heads * size
    keeps = NORM_KEEPS.get(config.norm.kind, _UNKNOWN_NORM_KEEPS)
    if config.norm.kind == "rmsnorm" and config.norm.options["partial"] < 1:
        keeps += 1  # the kernel takes no part of a row
    norms = 0
    for site, count in layout.norms.items():
        if site.rms or config.norm.kind != "none":
            own = product if site.of_product else FLOAT32
            own += 0 if site.rms else keeps * FLOAT32
            norms += count * site.heads * (site.width * own + FLOAT32)
    together = q_dim + 2 * kv_dim  # queries, keys and values come from one product
    if how.kernels:  # which turn, share and weigh them on the way, and lay heads side by side
        heads, attended = together, q_dim
        mlp = (2 if is_one_kernel(dim, config.ffn_dim) else 3) * config.ffn_dim
    else:
        repeated = config.n_heads > config.n_kv_heads  # keys and values, for each query
        heads = 3 * q_dim if repeated else 2 * q_dim + together
        attended, mlp = 2 * q_dim, 4 * config.ffn_dim
    kept = {
        "norms": norms,
        "inputs of projections": n_layers * 2 * dim * product,
        "queries, keys, values": n_layers * heads * product,
        "attention": n_layers * (attended * product + config.n_heads * FLOAT32),
        "mlp": n_layers * mlp * product,
        "gates": layout.gates * 2 * dim * product,
    }
    if how.recompute:
        kept = {name: -(-size // n_layers) for name, size in kept.items()}
        kept["inputs of blocks"] = n_layers * dim * FLOAT32
    return kept | {"head": dim * (product + FLOAT32 * (config.embed_scale == "learned"))}


def copies_bytes(config: ModelConfig, how: Execution) -> int:
    """Return the bytes of copies of weights that the backward pass reads."""
    matrices, n_blocks = sum(block_matrices(config)), 1 if how.recompute else config.n_layers
    if how.autocast:
        return BFLOAT16 * (n_blocks * matrices + config.known_vocab_size * config.dim)
    # q, k and v in one matrix, gate and up in another; o_proj and down_proj are read as they are,
    # and so is the whole MLP where it is one kernel.
    one_kernel = how.kernels and is_one_kernel(config.dim, config.ffn_dim)
    of_mlp = (3 if one_kernel else 1) * config.ffn_dim * config.dim
    kept_apart = config.n_heads * config.head_dim * config.dim + of_mlp
    return FLOAT32 * n_blocks * (matrices - kept_apart)


def loss_bytes(config: ModelConfig, n_tokens: int, how: Execution, *, z_loss: bool) -> int:
    """Return the bytes that the loss of ``n_tokens`` takes at its peak.

    In chunks (model/kernels/cross_entropy.py) these are a chunk's logits, and the gradients for the
    head, made ahead and once more as it is scaled, and for what the head reads.  With all logits at
    once: the logarithm of the softmax, its gradient and that of the logits, all float32; a soft cap
    keeps its tanh, the z-loss the logits themselves.
    """
    more = (config.logit_softcap > 0) + z_loss
    if how.compiled:
        return (3 + more) * config.known_vocab_size * n_tokens * FLOAT32
    rows = min(n_tokens, max(CHUNK_ROWS, CHUNK_NUMBERS // config.known_vocab_size))
    head = 2 * config.known_vocab_size * config.dim
    return FLOAT32 * ((1 + more) * rows * config.known_vocab_size + head + n_tokens * config.dim)


def micro_batch(config: RunConfig, n_ranks: int = 1) -> int:
    """Return the windows in a forward pass of one rank."""
    share = max(1, config.train.batch_size // n_ranks)
    return min(share, config.train.micro_batch_size or share)


def estimate_memory(
    config: RunConfig, parallel: Parallel = "none", n_ranks: int = 1, *, on_cpu: bool
) -> Memory:
    """Estimate what one of ``n_ranks`` needs to train ``config`` (resolved).

    Raises:
        UnknownNameError: the norm or the placement is not registered.
    """
    model, train, seq_len = config.model, config.train, config.data.seq_len
    how = Execution.of(train, on_cpu=on_cpu)
    count = count_parameters(model)
    rows = micro_batch(config, n_ranks)
    n_tokens = rows * seq_len
    shards = n_ranks if parallel == "fsdp" else 1
    share = -(-count.total // shards)
    gathered = 0
    if parallel == "fsdp":
        root = count.embedding + count.head
        # Whole at a time: embedding and head, the block that runs and the one fetched ahead, and
        # the gradient of the block that was left last.
        gathered = (root + 3 * sum(block_matrices(model))) * how.product
    # int64 inputs and targets, and the copies on the way to them
    batch = 5 * train.batch_size * (seq_len + 1) * INT64
    rotations = 3 * model.max_seq_len * model.head_dim * FLOAT32
    probe = FLOAT32 * share if train.probe_every else 0
    # DDP's gradients are views of the buckets that it sends them in, which stay.
    accumulates = parallel == "ddp" or rows * n_ranks < train.batch_size
    gaps = GAPS if how.kernels else GAPS_OF_OTHER_CODE
    gaps = GAPS_OF_RECOMPUTING if how.recompute else gaps
    if accumulates:
        gaps += GAPS_OF_ACCUMULATION if how.kernels else GAPS_OF_ITS_ACCUMULATION
    return Memory(
        weights=FLOAT32 * share,
        gradients=FLOAT32 * share,
        optimizer=2 * FLOAT32 * share,
        copies=0 if parallel == "fsdp" and how.autocast else copies_bytes(model, how),
        activations=n_tokens * sum(activations_per_token(model, how).values()),
        loss=loss_bytes(model, n_tokens, how, z_loss=config.optim.z_loss > 0),
        gathered=gathered,
        other=batch + rotations + probe + BLOCK_OBJECTS * model.n_layers,
        embedding_gradients=2 * FLOAT32 * count.embedding // shards if model.tie_embeddings else 0,
        gaps=gaps,
        accumulates=accumulates,
    )
