"""The memory that a training run takes, part by part.

    weights     4 bytes per parameter: float32, also under bfloat16 autocast
    gradients   4 bytes per parameter
    optimizer   8 bytes per parameter: AdamW's two means (optim.py); 4 where there is one momentum:
                Lion, SGD, and the matrices of the blocks under Muon
    copies      of weights that the backward pass reads again: cast by autocast, or packed so that
                one product does for several matrices
    activations what the forward pass keeps for the backward pass
    loss        what the loss takes at its peak, :func:`loss_bytes`
    gathered    FSDP only: the layers that are whole at a time
    other       the batch, the table of rotations, weights that a probe remembers, Python objects

Copies and activations are measured: one small real block of each kind in the model runs forward,
and what autograd saves there is added up and scaled to the widths, tokens and layers of the run.

The backward pass makes gradients as it frees activations, so the peak in use is less than the sum:
:attr:`Memory.peak`; a process on a CPU holds more than that: :attr:`Memory.peak_on_cpu`.  Sizes are
of one rank.  Not included: the token files, whose pages the system takes back when it needs them,
and what the process takes before it trains (:data:`PROCESS`).
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from minillama.config import ModelConfig, RunConfig
from minillama.config.run import TrainConfig
from minillama.model.kernels.cross_entropy import CHUNK_NUMBERS, CHUNK_ROWS
from minillama.model.rope import RotaryEmbedding
from minillama.model.transformer import Block, Transformer
from minillama.plan.parameters import Parameters, block_matrices, count_parameters, layer_kinds

Parallel = Literal["none", "ddp", "fsdp"]

PROCESS = 330_000_000
"""Bytes of a process that has imported torch and minillama and done nothing yet (Linux, CPU)."""

BUFFERS = 35_000_000
"""Bytes that BLAS, the tokenizer and the first use of many modules take (measured)."""

IMPORTS_OF_RECOMPUTING = 75_000_000
"""Bytes of the modules that torch.utils.checkpoint imports at its first use (measured)."""

GAPS, GAPS_OF_ACCUMULATION = 0.3, 0.85
"""Gaps of the heap as a share of what a pass takes, and the same where gradients stay among the
activations from pass to pass (measured with glibc 2.36)."""

BLOCK_OBJECTS = 60_000
"""Bytes of Python objects per block, which count where blocks are many and small (measured)."""

FLOAT32, BFLOAT16, INT64 = 4, 2, 8

_LARGEST_BLOCK = 1 << 23
"""Parameters of the largest block that is measured as it is.  Those that are scaled down keep more
than a quarter of this, beyond the sizes at which the small kernels of model/kernels/ end."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part; see the module's docstring."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    loss: int
    gathered: int
    other: int
    embedding_gradients: int
    """Two more gradients of a tied embedding, which exist briefly."""
    accumulates: bool
    """Earlier gradients exist while a pass runs: those of micro-batches, or DDP's."""
    recompute: bool

    @property
    def state(self) -> int:
        """What exists all the time."""
        return self.weights + self.optimizer + self.other

    @property
    def one_pass(self) -> int:
        """What forward and backward take beside state and gradients."""
        return self.activations + self.loss + self.copies

    @property
    def peak(self) -> int:
        """The most that is in use at once, in one pass forward and backward."""
        # At the end of the backward pass a tied embedding's gradient is a sum of two.
        gradients = self.gradients + self.embedding_gradients
        both = self.one_pass + self.gradients if self.accumulates else self.one_pass
        return self.state + self.gathered + max(both, gradients)

    @property
    def peak_on_cpu(self) -> int:
        """The most that the process holds on a CPU, beyond :data:`PROCESS`.

        Tensors of less than 32 MiB come from the heap of the C library, which returns nothing to
        the system, and whose gaps later tensors do not fill exactly.  With recomputation they are
        returned when they are freed (training/device.py).
        """
        if self.recompute:
            return self.peak + BUFFERS + IMPORTS_OF_RECOMPUTING
        gaps = GAPS_OF_ACCUMULATION if self.accumulates else GAPS
        return self.peak + round(gaps * self.one_pass) + BUFFERS


@dataclass(frozen=True)
class Execution:
    """How the model runs, in so far as it determines what is kept for the backward pass."""

    autocast: bool = False
    """Matrix products are in bfloat16; the residual stream stays float32."""
    on_cpu: bool = True
    """With the C kernels, where they are compiled and not switched off."""
    compiled: bool = False
    """By torch.compile, for which the loss is computed with all logits at once."""
    recompute: bool = False
    """Blocks keep only their input; each is run again in the backward pass."""

    @classmethod
    def of(cls, train: TrainConfig, *, on_cpu: bool) -> Execution:
        """Return how a run goes on a CPU, or on another device."""
        return cls(train.dtype != "float32", on_cpu, train.compile, train.recompute)

    @property
    def product(self) -> int:
        """Bytes of one number of a matrix product's result."""
        return BFLOAT16 if self.autocast else FLOAT32


# ------------------------------------------------------------------------------------ activations


class Kept(NamedTuple):
    """Bytes that forward keeps for backward: per token, and of copies of weights in any case."""

    per_token: float
    copies: float


def measure_kept(config: ModelConfig, how: Execution) -> Kept:
    """Measure what the forward pass of a model keeps for the backward pass, the loss aside.

    Widths are scaled down where a block is large: what is kept is linear in them, and copies of
    weights are quadratic.
    """
    divisor = 1
    while sum(block_matrices(_divided(config, divisor))) > _LARGEST_BLOCK:
        divisor *= 2
    small = _divided(config, divisor).model_dump_json()
    measured = [(_measure(small, k, how), times) for k, times in layer_kinds(config)]
    ends = _measure(small, None, how)
    if how.recompute:
        # The inputs of all blocks, and one block, the largest, at a time.
        block, _ = max(measured)
        per_token = divisor * block.per_token + config.n_layers * config.dim * FLOAT32
        copies = block.copies
    else:
        per_token = divisor * sum(times * block.per_token for block, times in measured)
        copies = sum(times * block.copies for block, times in measured)
    return Kept(per_token + divisor * ends.per_token, divisor**2 * copies)


def _divided(config: ModelConfig, divisor: int) -> ModelConfig:
    return config.model_copy(
        update={
            "dim": max(2, config.dim // divisor),
            "ffn_dim": max(2, config.ffn_dim // divisor),
            "head_dim": max(2, config.head_dim // divisor // 2 * 2)
            if divisor > 1
            else config.head_dim,
            "vocab_size": 2,
        }
    )


@functools.cache
def _measure(config_json: str, layer: int | None, how: Execution) -> Kept:
    """Measure the block of ``layer``, or what lies around all blocks (None)."""
    few, many = 64, 128
    config = ModelConfig.model_validate_json(config_json)
    config = config.model_copy(update={"max_seq_len": many})
    module: nn.Module
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        if layer is None:
            module = Transformer(config.model_copy(update={"n_layers": 1, "ffn_dim": 2}))
            module.blocks = nn.ModuleList()
        else:
            module = Block(config, layer)
        module.float()  # torch's default dtype may be another
    few_bytes, many_bytes = (_saved_bytes(module, config, how, n) for n in (few, many))
    per_token = (many_bytes - few_bytes) / (many - few)
    return Kept(per_token, few_bytes - few * per_token)


def _saved_bytes(module: nn.Module, config: ModelConfig, how: Execution, n_tokens: int) -> int:
    """Return the bytes that autograd saves in one forward pass, parameters aside."""
    with torch.device("cpu"):
        rotation = RotaryEmbedding(config.head_dim, n_tokens)(torch.arange(n_tokens), torch.float32)
        x_BTD = torch.zeros(1, n_tokens, config.dim, dtype=torch.float32, requires_grad=True)
        tokens_BT = torch.zeros(1, n_tokens, dtype=torch.int64)
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=how.autocast))
        if not how.on_cpu or how.compiled:
            stack.enter_context(_PlainFormulas())  # type: ignore[no-untyped-call]
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor))
        if isinstance(module, Transformer):
            y_BTD = module.hidden(tokens_BT)
        else:
            y_BTD = module(x_BTD, rotation)
    for tensor in (*module.parameters(), *rotation, y_BTD):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    # The output of a block is the input of the next, which counts it; the head's input counts here.
    head_input = y_BTD.untyped_storage().nbytes() if isinstance(module, Transformer) else 0
    return sum(storages.values()) + head_input


class _PlainFormulas(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the model compute with plain PyTorch, as it does on other devices than a CPU."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


def loss_bytes(config: ModelConfig, n_tokens: int, how: Execution, *, z_loss: bool) -> int:
    """Return the bytes that the loss of ``n_tokens`` takes at its peak.

    In chunks (model/kernels/cross_entropy.py) these are a chunk's logits, the gradient of the head,
    made in the forward pass and again as it is scaled, and that of the head's input.  With all
    logits at once: the logarithm of the softmax, its gradient and that of the logits, all float32;
    a soft cap keeps its tanh, the z-loss the logits themselves.
    """
    more = (config.logit_softcap > 0) + z_loss
    if how.compiled:
        return (3 + more) * config.known_vocab_size * n_tokens * FLOAT32
    rows = min(n_tokens, max(CHUNK_ROWS, CHUNK_NUMBERS // config.known_vocab_size))
    head = 2 * config.known_vocab_size * config.dim
    return FLOAT32 * ((1 + more) * rows * config.known_vocab_size + head + n_tokens * config.dim)


def _moments(config: RunConfig, count: Parameters) -> int:
    """Return how many numbers the optimizer keeps."""
    kind = config.optim.kind
    if kind == "sgd" and not config.optim.momentum:
        return 0
    if kind in ("sgd", "lion"):
        return count.total
    by_muon = count.attention + count.mlp if kind == "muon" else 0
    return 2 * count.total - by_muon


def micro_batch(config: RunConfig, n_ranks: int = 1) -> int:
    """Return the windows in a forward pass of one rank."""
    share = max(1, config.train.batch_size // n_ranks)
    return min(share, config.train.micro_batch_size or share)


def estimate_memory(
    config: RunConfig, parallel: Parallel = "none", n_ranks: int = 1, *, on_cpu: bool
) -> Memory:
    """Estimate what one of ``n_ranks`` needs to train ``config``.

    Raises:
        ConfigError: a size is beyond any tensor.
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
        # Whole at a time: embedding and head, the block that runs and the one prefetched, and the
        # gradient of the previous block.
        gathered = (root + 3 * sum(block_matrices(model))) * how.product
    # int64 inputs and targets, and the copies on the way to them
    batch = 5 * train.batch_size * (seq_len + 1) * INT64
    rotations = 3 * model.max_seq_len * model.head_dim * FLOAT32
    probe = FLOAT32 * share if train.probe_every else 0
    # DDP's gradients are views of the buckets that it sends them in, which stay.
    accumulates = parallel == "ddp" or rows * n_ranks < train.batch_size
    kept = measure_kept(model, how)
    copies = kept.copies
    if how.autocast:  # FSDP casts what it gathers, and frees it
        copies = 0 if parallel == "fsdp" else copies + BFLOAT16 * model.known_vocab_size * model.dim
    return Memory(
        weights=FLOAT32 * share,
        gradients=FLOAT32 * share,
        optimizer=FLOAT32 * -(-_moments(config, count) // shards),
        copies=round(copies),
        activations=round(n_tokens * kept.per_token),
        loss=loss_bytes(model, n_tokens, how, z_loss=config.optim.z_loss > 0),
        gathered=gathered,
        other=batch + rotations + probe + BLOCK_OBJECTS * model.n_layers,
        embedding_gradients=2 * FLOAT32 * count.embedding // shards if model.tie_embeddings else 0,
        accumulates=accumulates,
        recompute=train.recompute,
    )
