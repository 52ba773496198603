"""Several processes, started by torchrun, train one model: the same losses as of one process.

             batch of a step, cut into as many parts as there are ranks
    rank 0   part ─▶ micro-batches: loss, backward ─┐                 ┌─▶ clip ─▶ update
    rank 1   part ─▶ micro-batches: loss, backward ─┴─ sum gradients ─┴─▶ clip ─▶ update

``ddp`` (Li 2020, arXiv 2006.15704): each rank has the whole model.  ``fsdp`` (Zhao 2023, arXiv
2304.11277; torch's FSDP2): each rank has a part of every matrix, of its gradient and of its
moments, and gathers the matrices of a block when it computes with them.  Norms, gains and biases
stay whole and in float32: they are less than a hundredth of the model, and rounding a gain to
bfloat16 would hide its steps.

Gradients are summed, not averaged, over the ranks: the trainer divides by the tokens of the whole
step.  Whatever decides what comes next (a loss, a signal, an error) goes through a collective, so
that all ranks decide alike; those of single numbers are made on the CPU, over gloo.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from minillama import launch
from minillama.config.run import TrainConfig
from minillama.data.batches import Batches, rows_of_rank
from minillama.errors import (
    MinillamaError,
    OtherRankError,
    RankLostError,
)
from minillama.files import sha256_of_file
from minillama.model.transformer import LossSums, Transformer, is_norm_parameter
from minillama.training.checkpoint_folders import OPTIMIZER
from minillama.training.interrupt import AgreedStop, StopSignal
from minillama.training.ranks import Loss, Ranks

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others before it gives up."""

_log = logging.getLogger("minillama")


@contextmanager
def group(device: torch.device, train: TrainConfig) -> Iterator[Ranks]:
    """Yield the ranks of all processes that torchrun has started.

    Raises:
        RankLostError: a process has died, or has not answered for :data:`TIMEOUT`.
    """
    level = _log.level
    if launch.rank():
        _log.setLevel(logging.ERROR)  # the main rank says it all
    try:
        _start_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        yield (_Ddp if train.parallel == "ddp" else _Fsdp)(device, train)
        dist.destroy_process_group()
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        said = str(error).splitlines()[0]
        raise RankLostError(
            f"rank {launch.rank()}: another process of this run has died or does not answer: its "
            f"own error, or torchrun's report, says why; go on by --resume ({said:.120})"
        ) from error
    finally:
        _log.setLevel(level)


def _start_group(backend: str) -> None:
    # torchrun's store outlives a restart, and with it the addresses of those who died.
    store, rank, world_size = next(rendezvous("env://", timeout=TIMEOUT))
    store = PrefixStore(f"attempt-{launch.restarts()}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)


def _is_lost(error: BaseException) -> bool:
    """Tell whether ``error`` comes from a collective that another rank did not take part in."""
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("gloo", "NCCL", "Connection closed by peer")
    )


class _Group(Ranks):
    """Several processes: how they agree."""

    def __init__(self, device: torch.device, train: TrainConfig) -> None:
        super().__init__(device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except (OtherRankError, RankLostError):
            raise  # all know already
        except Exception as error:
            if not _is_lost(error):
                self._meet(error=error)
            raise
        self._meet()

    def from_main(self, value: T) -> T:
        met: T = self._meet(value)
        return met

    def _meet(self, value: Any = None, error: Exception | None = None) -> Any:
        """Wait for all ranks; return the main one's value, unless one of them has met an error.

        The first of those that have, returns, to raise its own.
        """
        status = error.exit_status if isinstance(error, MinillamaError) else 1
        fault = None if error is None else (str(error) or type(error).__name__, status)
        met: list[Any] = [None] * self.world_size
        dist.all_gather_object(met, (value if self.is_main else None, fault))
        for rank, (_, fault) in enumerate(met):
            if fault is not None and rank == self.rank:
                break
            if fault is not None:
                raise OtherRankError(f"rank {rank}: {fault[0]}", fault[1]) from error
        return met[0][0]

    def sum(self, value: float) -> float:
        # Not a reduction, whose order may differ from rank to rank, and with it the last bit.
        own = torch.tensor([value], dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own)
        return sum(part.item() for part in parts)

    def any(self, flag: bool) -> bool:
        return self.sum(flag) > 0

    def stop_signal(self) -> StopSignal:
        return AgreedStop(self.any)

    def finite(self, tensors: Iterable[Tensor]) -> bool:
        return not self.any(not super().finite(_own_part(tensor) for tensor in tensors))

    def batch(self, batches: Batches, step: int) -> tuple[Tensor, Tensor]:
        rows = rows_of_rank(batches.batch_size, self.rank, self.world_size)
        return batches.batch_at(step, rows)

    def probes(self) -> bool:
        return self.is_main


# -------------------------------------------------------------------------------------------- DDP


class _Forward(nn.Module):
    """Calls ``loss_sums`` as ``forward``, which is all that DDP watches."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, z_loss: float) -> LossSums:
        return self.model.loss_sums(tokens_BT, targets_BT, z_loss)


class _Ddp(_Group):
    """Each rank has the model whole; gradients are added up while they are computed."""

    def wrap(self, model: Transformer, compiled: bool) -> Loss:
        self._ddp = DistributedDataParallel(
            _Forward(model.to(self.device)),
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(None, lambda state, bucket: _add_up(bucket.buffer()))
        return torch.compile(self._ddp) if compiled else self._ddp

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()

    def weights(self, model: Transformer) -> Mapping[str, Tensor]:
        return model.state_dict() if self.is_main else {}

    def sampler(self, model: Transformer) -> Transformer | None:
        return model if self.is_main else None


def _add_up(gradients: Tensor) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return reduced


# ------------------------------------------------------------------------------------------- FSDP


class _Fsdp(_Group):
    """Each rank has a part of every matrix; the rest is whole on each."""

    def __init__(self, device: torch.device, train: TrainConfig) -> None:
        super().__init__(device, train)
        half = torch.bfloat16 if train.dtype == "bfloat16" else None
        # What flows between the matrices keeps float32, as under autocast.
        self._block_policy = MixedPrecisionPolicy(
            param_dtype=half, reduce_dtype=half and torch.float32, cast_forward_inputs=False
        )
        self._whole: list[nn.Parameter] = []

    def wrap(self, model: Transformer, compiled: bool) -> Loss:
        self._whole = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.ndim < 2 or is_norm_parameter(name)
        ]
        for parameter in self._whole:
            parameter.data = parameter.data.to(self.device)
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        whole = set(self._whole)
        for block in model.blocks:
            if compiled:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=self._block_policy, ignored_params=whole)
        fully_shard(model, mesh=mesh, ignored_params=whole)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # all that gloo can
                # Buffers made in a validation's inference mode would be of no use in training.
                module.unshard()
                module.reshard()
        register_fsdp_forward_method(model, "loss_sums")
        self._root = model
        return model.loss_sums

    def gather_gradients(self) -> None:
        # Those of the matrices were scattered with each backward pass, so that none is ever whole.
        gradients = [p.grad for p in self._whole if p.grad is not None]
        if gradients:
            together = nn.utils.parameters_to_vector(gradients)
            dist.all_reduce(together)
            nn.utils.vector_to_parameters(together, gradients)

    def before_update(self) -> None:
        # A forward pass without a backward one, a probe's, leaves matrices that would go stale.
        assert isinstance(self._root, FSDPModule)
        self._root.reshard()

    def norm(self, tensors: Iterable[Tensor]) -> Tensor:
        norms = [_whole(nn.utils.get_total_norm(kind)) for kind in _by_kind(tensors) if kind]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> float:
        parameters = [p for p in parameters if p.grad is not None]
        total = self.norm([p.grad for p in parameters if p.grad is not None])
        norm = total.item()
        if max_norm and norm > max_norm:
            for kind in _by_kind(parameters):
                nn.utils.clip_grads_with_norm_(kind, max_norm, total)
        return norm

    def probes(self) -> bool:
        return True  # a forward pass needs the parts of all

    def weights(self, model: Transformer) -> Mapping[str, Tensor]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: Mapping[str, Any] = get_model_state_dict(model, options=options)
        return weights if self.is_main else {}

    def sampler(self, model: Transformer) -> Transformer | None:
        weights = self.weights(model)
        if not self.is_main:
            return None
        alone = Transformer(model.config)
        alone.load_state_dict(dict(weights))
        return alone

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()["state"]
        return {
            "optimizer": {
                number: {name: v for name, v in values.items() if not isinstance(v, DTensor)}
                for number, values in state.items()
            },
            "sharded": {
                number: names
                for number, values in state.items()
                if (names := [name for name, v in values.items() if isinstance(v, DTensor)])
            },
        }

    def write_shards(
        self, optimizer: torch.optim.Optimizer, folder: Path | None
    ) -> Mapping[str, str]:
        folder = self.from_main(folder)
        assert folder is not None
        target = folder / OPTIMIZER
        shards = {
            f"{number}.{name}": value
            for number, values in optimizer.state_dict()["state"].items()
            for name, value in values.items()
            if isinstance(value, DTensor)
        }
        if not shards:
            return {}
        try:
            writer = HuggingFaceStorageWriter(str(target), save_distributed=True)
            save(shards, storage_writer=writer)
        except CheckpointException as error:  # the same on all ranks
            raise _cause(error) from error
        with self.together():
            files = target.glob(f"shard-{self.rank + 1:05d}-*")
            own = {f"{OPTIMIZER}/{file.name}": sha256_of_file(file) for file in files}
        sums: list[Any] = [None] * self.world_size
        dist.all_gather_object(sums, own)
        return {name: digest for part in sums for name, digest in part.items()}

    def load_weights(self, model: Transformer, weights: Mapping[str, Tensor], folder: Path) -> None:
        own = model.state_dict()
        parts = {n: self._like(own[n], w) if n in own else w for n, w in weights.items()}
        super().load_weights(model, parts, folder)

    def _like(self, parameter: Tensor, value: Any) -> Any:
        if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
            return value
        place = parameter.device_mesh, parameter.placements
        return distribute_tensor(value.to(self.device), *place, src_data_rank=None)


def _cause(error: CheckpointException) -> Exception:
    """Return what the first of the ranks met that could not write."""
    cause, _ = next(iter(error.failures.values()))
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return cause if isinstance(cause, Exception) else RuntimeError(str(error))


def _by_kind(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sharded tensors and the whole ones, which no one operation takes together."""
    kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
    for tensor in tensors:
        kinds[0 if isinstance(tensor, DTensor) else 1].append(tensor)
    return kinds


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _own_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
