"""What the trainer asks of the processes that train together, answered by one that is alone.

A *rank* is one such process; rank 0 is the *main* one, which alone writes what there is once.  The
answers of several are in :mod:`minillama.training.parallel`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from minillama.data.batches import Batches
from minillama.model.transformer import LossSums, Transformer
from minillama.training.checkpoint import load_weights
from minillama.training.checkpoint_folders import OPTIMIZER
from minillama.training.interrupt import StopSignal
from minillama.training.optim import clip_gradients

T = TypeVar("T")
Loss = Callable[[Tensor, Tensor, float], LossSums]


class Ranks:
    """One process alone: it is the main one, and has nobody to ask.

    Args:
        device: that this process computes on.
    """

    rank, world_size = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes what there is once."""
        return self.rank == 0

    # ------------------------------------------------------------------------------- to agree

    def together(self) -> AbstractContextManager[None]:
        """Leave the body only when every rank has; if any of them raises, all do.

        Raises:
            OtherRankError: this rank has not raised, but another has.
        """
        return nullcontext()

    def from_main(self, value: T) -> T:
        """Return the value that the main rank gives, which can be pickled."""
        return value

    def sum(self, value: float) -> float:
        """Return the sum over all ranks, the same to the bit on each."""
        return value

    def any(self, flag: bool) -> bool:
        """Tell whether it is so on any rank."""
        return flag

    def stop_signal(self) -> StopSignal:
        """Return what hears of the wish to stop, on whichever rank it comes."""
        return StopSignal()

    # ------------------------------------------------------------------------------- the step

    def wrap(self, model: Transformer, compiled: bool) -> Loss:
        """Put ``model`` where it is trained, and return its ``loss_sums`` for the training pass.

        Its parameters may be others from then on, of the same names, shapes and order.
        """
        model.to(self.device)
        return torch.compile(model.loss_sums) if compiled else model.loss_sums

    def batch(self, batches: Batches, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of the batch of ``step``, counted from 0."""
        return batches.batch_at(step)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Surround the forward and backward pass of a micro-batch, ``last`` being of a step."""
        return nullcontext()

    def gather_gradients(self) -> None:
        """Make sure that gradients are sums over the micro-batches of all ranks."""

    def before_update(self) -> None:
        """Make ready for the optimizer's step."""

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> float:
        """Do as :func:`minillama.training.optim.clip_gradients`."""
        return clip_gradients(parameters, max_norm)

    def norm(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the L2 norm of all of ``tensors``, such as gradients, taken together."""
        return nn.utils.get_total_norm(tensors)

    def finite(self, tensors: Iterable[Tensor]) -> bool:
        """Tell whether all numbers of ``tensors`` are finite, on all ranks."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)

    def probes(self) -> bool:
        """Tell whether this rank takes part in a probe; only the main one logs it."""
        return True

    # ---------------------------------------------------------------------------- save, go on

    def weights(self, model: Transformer) -> Mapping[str, Tensor]:
        """Return the whole weights by name; on ranks other than the main one, nothing."""
        return model.state_dict()

    def sampler(self, model: Transformer) -> Transformer | None:
        """Return a model that the main rank can use alone; None on the others."""
        return model

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what trainer_state.pt holds of the optimizer.

        ``optimizer`` has the tensors of each parameter, by its number in the groups; ``sharded``
        the names of those that :meth:`write_shards` writes instead.
        """
        return {"optimizer": optimizer.state_dict()["state"], "sharded": {}}

    def write_shards(
        self, optimizer: torch.optim.Optimizer, folder: Path | None
    ) -> Mapping[str, str]:
        """Let each rank write its part of the optimizer's state into the main rank's ``folder``.

        Returns the SHA-256 of each file, by its path inside of the folder.
        """
        return {}

    def load_weights(self, model: Transformer, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Do as :func:`minillama.training.checkpoint.load_weights`."""
        load_weights(model, weights, folder)

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], folder: Path
    ) -> None:
        """Load what :meth:`optimizer_state` and :meth:`write_shards` of any kind of ranks left."""
        parameters = parameters_of(optimizer)
        moments: dict[int, dict[str, Any]] = {
            number: {name: self._like(parameters[number], value) for name, value in values.items()}
            for number, values in state["optimizer"].items()
        }
        # A checkpoint of a version that knew no shards has no word of them.
        sharded = {
            (number, name): torch.zeros_like(parameters[number])
            for number, names in state.get("sharded", {}).items()
            for name in names
        }
        if sharded:
            # Here: they take half a second to import.
            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
            from torch.distributed.checkpoint.state_dict_loader import load

            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is told
                load(
                    {f"{number}.{name}": tensor for (number, name), tensor in sharded.items()},
                    storage_reader=HuggingFaceStorageReader(str(folder / OPTIMIZER)),
                    no_dist=True,  # every rank reads what it needs, and no more
                )
        for (number, name), tensor in sharded.items():
            moments.setdefault(number, {})[name] = tensor
        groups = optimizer.state_dict()["param_groups"]  # the config's, not those saved
        optimizer.load_state_dict({"state": moments, "param_groups": groups})

    def _like(self, parameter: Tensor, value: Any) -> Any:
        """Return the part of a whole ``value`` that belongs to this rank's part of a parameter."""
        return value


def parameters_of(optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
    """Return the parameters in the order in which the optimizer's state counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
