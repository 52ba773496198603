"""The processes that train one model: this one alone, or all that torchrun has started.

             batch of a step, split evenly over the ranks
    rank 0   rows ─▶ micro-batches: loss, backward ─┐                 ┌─▶ clip ─▶ update
    rank 1   rows ─▶ micro-batches: loss, backward ─┴─ sum gradients ─┴─▶ clip ─▶ update

A *rank* is one of these processes; rank 0 is the main one and writes whatever is written once.
``ddp`` (Li 2020, arXiv 2006.15704): each rank has the whole model.  ``fsdp`` (Zhao 2023, arXiv
2304.11277): each rank has a part of every matrix (:mod:`minillama.training.fsdp`).

Gradients are summed, not averaged, over the ranks: the trainer divides by the tokens of the whole
step.  Whatever decides what comes next (a loss, a signal, an error) goes through a collective, so
that all ranks decide the same; collectives of single numbers run on the CPU, over gloo.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from minillama import launch
from minillama.config import RunConfig
from minillama.config.run import TrainConfig
from minillama.errors import (
    ConfigError,
    FieldError,
    MinillamaError,
    OtherRankError,
    RankLostError,
)
from minillama.model.transformer import LossSums, Transformer
from minillama.training.device import pick_device

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others before it gives up."""

_log = logging.getLogger("minillama")


# ------------------------------------------------------------------------------------- collectives


class Ranks:
    """The ranks that train together: here this process alone.

    Args:
        device: that this process computes on.
    """

    rank, world_size = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def sync_errors(self) -> AbstractContextManager[None]:
        """Leave the body only when every rank has; if one of them raises, all do.

        Raises:
            OtherRankError: this rank has not raised, but another has.
        """
        return nullcontext()

    def broadcast(self, value: T) -> T:
        """Return the main rank's ``value``, which must be picklable."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of every rank, which must be picklable, in their order."""
        return [value]

    def sum(self, value: float) -> float:
        """Return the sum over all ranks, the same to the bit on each."""
        return value

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is set on any rank."""
        return flag


class _ProcessGroup(Ranks):
    """All processes that torchrun has started."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @contextmanager
    def sync_errors(self) -> Iterator[None]:
        try:
            yield
        except (OtherRankError, RankLostError):
            raise  # every rank knows
        except Exception as error:
            if not _is_lost(error):
                self._exchange(error=error)
            raise
        self._exchange()

    def broadcast(self, value: T) -> T:
        main: T = self._exchange(value if self.is_main else None)[0]
        return main

    def gather(self, value: T) -> list[T]:
        return self._exchange(value)

    def _exchange(self, value: Any = None, error: Exception | None = None) -> list[Any]:
        """Wait for all ranks and return their values, unless one of them has an ``error``.

        The first rank with an error returns, to raise its own.
        """
        status = error.exit_status if isinstance(error, MinillamaError) else 1
        failure = None if error is None else (str(error) or type(error).__name__, status)
        received: list[Any] = [None] * self.world_size
        dist.all_gather_object(received, (value, failure))
        for rank, (_, failure) in enumerate(received):
            if failure is not None and rank == self.rank:
                break
            if failure is not None:
                raise OtherRankError(f"rank {rank}: {failure[0]}", failure[1]) from error
        return [value for value, _ in received]

    def sum(self, value: float) -> float:
        # Not a reduction, whose order may differ from rank to rank, and with it the last bit.
        own = torch.tensor([value], dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own)
        return sum(part.item() for part in parts)

    def any(self, flag: bool) -> bool:
        return self.sum(flag) > 0


# ------------------------------------------------------------------------------------------ joining


@contextmanager
def join(config: RunConfig) -> Iterator[Ranks]:
    """Yield the ranks that train as ``config`` says, this process among them.

    Raises:
        ConfigError: ``train.parallel`` does not fit the number of processes, or that does not fit
            the batch or the machine.
        RankLostError: a process has died, or has not answered for :data:`TIMEOUT`.
    """
    train = config.train
    if train.parallel == "none":
        if launch.world_size() > 1:
            rule = (
                f"torchrun has started {launch.world_size()} processes, and each would train the "
                "whole model; set train.parallel=ddp or fsdp, or start one without torchrun"
            )
            raise launch.on_first_rank(ConfigError(f"train.parallel = none: {rule}"))
        yield Ranks(pick_device(train.device))
        return
    if not launch.by_torchrun():
        raise ConfigError(
            f"train.parallel = {train.parallel}: this is one process alone; start N of them with "
            f"`torchrun --nproc-per-node N -m minillama train ...`, or set train.parallel=none"
        )
    _check_world_size(train, launch.world_size())
    device = _device_of_rank(train.device)
    level = _log.level
    if launch.rank():
        _log.setLevel(logging.ERROR)  # the main rank logs
    try:
        _init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        yield _ProcessGroup(device)
        dist.destroy_process_group()
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        message = str(error).splitlines()[0]
        raise RankLostError(
            f"rank {launch.rank()}: another process of this run has died or does not answer: its "
            "own error, or torchrun's report, says why; continue with --resume "
            f"({message:.120})"
        ) from error
    finally:
        _log.setLevel(level)


def _check_world_size(train: TrainConfig, n: int) -> None:
    errors = []
    micro = train.micro_batch_size
    if train.batch_size % n:
        rule = f"is not divisible by the {n} processes"
        errors.append(FieldError("train.batch_size", train.batch_size, rule))
    elif micro not in (None, train.batch_size) and (train.batch_size // n) % micro:
        rule = (
            f"does not divide each process's share, {train.batch_size // n} of "
            f"train.batch_size = {train.batch_size}"
        )
        errors.append(FieldError("train.micro_batch_size", micro, rule))
    if train.dtype == "float16":
        rule = "needs a loss scale that all processes share; set bfloat16"
        errors.append(FieldError("train.dtype", train.dtype, rule))
    if errors:
        raise launch.on_first_rank(ConfigError.of(f"train.parallel = {train.parallel}", errors))


def _device_of_rank(name: str) -> torch.device:
    n_gpus, n_local = torch.cuda.device_count(), launch.local_world_size()
    rule = None
    if name not in ("auto", "cpu", "cuda"):
        rule = "each process uses its own GPU, or all use the CPU; set auto, cpu or cuda"
    elif name == "cpu" or (name == "auto" and not n_gpus):
        return torch.device("cpu")
    elif n_local > n_gpus:
        rule = (
            f"{n_local} processes, but {n_gpus} GPUs on this machine; lower --nproc-per-node, "
            "or set train.device=cpu"
        )
    if rule is not None:
        raise launch.on_first_rank(ConfigError(f"train.device = {name}: {rule}"))
    device = torch.device("cuda", launch.local_rank())
    torch.cuda.set_device(device)
    return device


def _init_process_group(backend: str) -> None:
    # torchrun's store outlives a restart, and keeps the addresses of the processes that died.
    store, rank, world_size = next(rendezvous("env://", timeout=TIMEOUT))
    store = PrefixStore(f"attempt-{launch.restarts()}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)


def _is_lost(error: BaseException) -> bool:
    """Return whether ``error`` is from a collective that another rank did not take part in."""
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("gloo", "NCCL", "Connection closed by peer")
    )


# ---------------------------------------------------------------------------------- the model


class LocalModel:
    """How the model is trained: here by this process alone.

    Args:
        model: moved to ``device``.
        device: that this rank computes on.
        train: the part of the config that it depends on.
    """

    loss_sums: Callable[[Tensor, Tensor, float], LossSums]
    """The model's ``loss_sums``, for a forward pass with a backward one."""

    def __init__(self, model: Transformer, device: torch.device, train: TrainConfig) -> None:
        model.to(device)
        self.loss_sums = torch.compile(model.loss_sums) if train.compile else model.loss_sums

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Surround the forward and backward pass of a micro-batch; ``last``: of the step."""
        return nullcontext()

    def sum_gradients(self) -> None:
        """Make sure that gradients are summed over the micro-batches of all ranks."""

    def write_shards(
        self, tensors: Mapping[str, Tensor], folder: Path | None, ranks: Ranks
    ) -> dict[str, str]:
        """Write sharded ``tensors`` into the main rank's ``folder``; here there are none.

        Returns the SHA-256 of each file by its name.
        """
        return {}


class DdpModel(LocalModel):
    """Each rank has the whole model; gradients are summed while they are computed."""

    def __init__(self, model: Transformer, device: torch.device, train: TrainConfig) -> None:
        self._ddp = DistributedDataParallel(
            _Forward(model.to(device)),
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(None, lambda state, bucket: _all_reduce(bucket.buffer()))
        self.loss_sums = torch.compile(self._ddp) if train.compile else self._ddp

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Sum gradients over the ranks only after the last micro-batch."""
        return nullcontext() if last else self._ddp.no_sync()


class _Forward(nn.Module):
    """Calls ``loss_sums`` as ``forward``, the only method that DDP synchronizes."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, z_loss: float) -> LossSums:
        return self.model.loss_sums(tokens_BT, targets_BT, z_loss)


def _all_reduce(gradients: Tensor) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return reduced
