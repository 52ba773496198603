"""Which processes train a model: this one alone, or all that torchrun has started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minillama import launch
from minillama.config import RunConfig
from minillama.config.run import TrainConfig
from minillama.errors import ConfigError, FieldError
from minillama.training.device import pick_device
from minillama.training.ranks import Ranks


@contextmanager
def join(config: RunConfig) -> Iterator[Ranks]:
    """Yield the ranks that train as ``config`` says, this process among them.

    Raises:
        ConfigError: ``train.parallel`` does not fit the number of processes, or that does not fit
            the batch or the machine.
        RankLostError: a process has died, or has not answered for
            :data:`minillama.training.parallel.TIMEOUT`.
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
    _check(train, launch.world_size())
    device = _own_device(train.device)
    # Here: torch.distributed's engines take most of a second to import.
    from minillama.training.parallel import group

    with group(device, train) as ranks:
        yield ranks


def _check(train: TrainConfig, n: int) -> None:
    faults = []
    micro = train.micro_batch_size
    if train.batch_size % n:
        rule = f"is not divisible by the {n} processes"
        faults.append(FieldError("train.batch_size", train.batch_size, rule))
    elif micro not in (None, train.batch_size) and (train.batch_size // n) % micro:
        rule = (
            f"does not divide each process's share, {train.batch_size // n} of "
            f"train.batch_size = {train.batch_size}"
        )
        faults.append(FieldError("train.micro_batch_size", micro, rule))
    if train.dtype == "float16":
        rule = "needs a scale of the loss that processes agree on; set bfloat16"
        faults.append(FieldError("train.dtype", train.dtype, rule))
    if faults:
        raise launch.on_first_rank(ConfigError.of(f"train.parallel = {train.parallel}", faults))


def _own_device(name: str) -> torch.device:
    n_gpus, n_local = torch.cuda.device_count(), launch.local_world_size()
    if name not in ("auto", "cpu", "cuda"):
        raise launch.on_first_rank(
            ConfigError(
                f"train.device = {name}: every process has a GPU of its own, or none has; set "
                "auto, cpu or cuda"
            )
        )
    if name == "cpu" or (name == "auto" and not n_gpus):
        return torch.device("cpu")
    if n_local > n_gpus:
        raise launch.on_first_rank(
            ConfigError(
                f"train.device = {name}: {n_local} processes, but {n_gpus} GPUs on this machine; "
                "lower --nproc-per-node, or set train.device=cpu"
            )
        )
    device = torch.device("cuda", launch.local_rank())
    torch.cuda.set_device(device)
    return device
