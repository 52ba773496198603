"""FSDP (Zhao 2023, arXiv 2304.11277; torch's FSDP2): each rank has a part of every matrix.

Also a part of the matrix's gradient and moments; a block's matrices are gathered when it computes.
Norms, gains and biases stay whole and in float32: they are less than a hundredth of the model, and
rounding a gain to bfloat16 would hide its steps.

Import this only where something is sharded: it takes most of a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from minillama.config.run import TrainConfig
from minillama.files import sha256_of_file
from minillama.model.norms import norm_parameter_names
from minillama.model.transformer import Transformer
from minillama.training.parallel import LocalModel, Ranks


class FsdpModel(LocalModel):
    """Each rank has a part of every matrix and the rest whole."""

    def __init__(self, model: Transformer, device: torch.device, train: TrainConfig) -> None:
        half = torch.bfloat16 if train.dtype == "bfloat16" else None
        # Activations between the matrices keep float32, as under autocast.
        policy = MixedPrecisionPolicy(
            param_dtype=half, reduce_dtype=half and torch.float32, cast_forward_inputs=False
        )
        norms = norm_parameter_names(model)
        self._whole = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.ndim < 2 or name in norms
        ]
        for parameter in self._whole:
            parameter.data = parameter.data.to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        whole = set(self._whole)
        for block in model.blocks:
            if train.compile:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=whole)
        fully_shard(model, mesh=mesh, ignored_params=whole)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # all that gloo can do
                # Buffers created in a validation's inference mode could not be used in training.
                module.unshard()
                module.reshard()
        register_fsdp_forward_method(model, "loss_sums")
        self.loss_sums = model.loss_sums

    def sum_gradients(self) -> None:
        """Sum the gradients of the whole parameters over all ranks."""
        # Those of the matrices were reduced and scattered during each backward pass.
        gradients = [p.grad for p in self._whole if p.grad is not None]
        if gradients:
            flat = nn.utils.parameters_to_vector(gradients)
            dist.all_reduce(flat)
            nn.utils.vector_to_parameters(flat, gradients)

    def write_shards(
        self, tensors: Mapping[str, Tensor], folder: Path | None, ranks: Ranks
    ) -> dict[str, str]:
        """Write each rank's part of ``tensors`` into the main rank's ``folder``, one file per rank.

        Returns the SHA-256 of each file by its name.

        Raises:
            OSError: a rank cannot write; all of them raise.
        """
        folder = ranks.broadcast(folder)
        assert folder is not None
        if not tensors:
            return {}
        try:
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            save(dict(tensors), storage_writer=writer)
        except CheckpointException as error:  # the same on all ranks
            raise _cause(error) from error
        with ranks.sync_errors():
            files = folder.glob(f"shard-{ranks.rank + 1:05d}-*")
            own = {file.name: sha256_of_file(file) for file in files}
        return {name: digest for part in ranks.gather(own) for name, digest in part.items()}


def read_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill ``tensors``, sharded or whole, with their values in ``folder``, by name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
        reader = HuggingFaceStorageReader(str(folder))
        load(dict(tensors), storage_reader=reader, no_dist=True)  # each rank reads what it needs


def shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of the whole ``value`` of something shaped like ``parameter``."""
    assert isinstance(parameter, DTensor)
    value = value.to(parameter.device)
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def _cause(error: CheckpointException) -> Exception:
    """Return the error of the first rank that could not write."""
    cause, _ = next(iter(error.failures.values()))
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return cause if isinstance(cause, Exception) else RuntimeError(str(error))
