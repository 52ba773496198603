"""The optimizers, their groups of parameters, gradient clipping, the schedule.

rate                      cosine, linear   fall from the peak over all the remaining steps
 peak ┤   ╭────────╮      constant         keeps the peak
      │  ╱          ╲     wsd              keeps the peak, then falls over the last fifth
  min ┤ ╱            ╲                     (warm-up, stable, decay: Hu 2024, 2404.06395)
      └─┬──┬─────────┬─
        1  warm-up   steps
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from minillama.config.run import GroupConfig, OptimConfig
from minillama.model.parametrization import GroupFactors, group_factors
from minillama.model.roles import Role, parameter_roles
from minillama.model.transformer import Transformer

FUSED_DEVICES = ("cpu", "cuda")
"""Where one fused kernel updates all weights; on two CPU cores it takes 0.2 to 0.4 of the time of
the loop over tensors."""

WSD_DECAY = 5
"""``wsd`` falls over the last 1/WSD_DECAY of the run."""


OptimizerT = TypeVar("OptimizerT", bound=type[torch.optim.Optimizer])


def _without_compiler(kind: OptimizerT) -> OptimizerT:
    """Remove the decorators that exclude an optimizer's methods from torch.compile.

    They import torch's compiler at the first call, which takes a second at the start of every run.
    """
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        setattr(kind, name, inspect.unwrap(getattr(kind, name)))
    kind.step = torch.no_grad()(inspect.unwrap(kind.step))  # type: ignore[method-assign]
    return kind


@_without_compiler
class AdamW(torch.optim.AdamW):
    """torch's AdamW (Loshchilov 2019, arXiv 1711.05101)."""


@_without_compiler
class SGD(torch.optim.SGD):
    """torch's SGD with momentum; its weight decay is an L2 penalty, added to the gradient."""


@_without_compiler
class _Muon(torch.optim.Muon):
    """torch's Muon, which takes matrices only."""


@_without_compiler
class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (Chen 2023, arXiv 2302.06675, algorithm 2).

        θ ← θ − η·(sign(β₁·m + (1 − β₁)·g) + λ·θ)
        m ← β₂·m + (1 − β₂)·g

    Args:
        params: parameters or groups of them.
        lr: η.
        betas: β₁ and β₂.
        weight_decay: λ.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                mean = state["exp_avg"]
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(mean.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-lr)
                mean.lerp_(parameter.grad, 1 - beta2)


@_without_compiler
class Muon(torch.optim.Optimizer):
    """Muon for matrices, and AdamW for the rest, as one optimizer.

    Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a
    matrix's gradient by the nearest orthogonal matrix, nearly: five Newton–Schulz steps in bfloat16
    bring its singular values to between 0.7 and 1.2.  It is scaled by 0.2·√max(rows, columns), to
    the root mean square of AdamW's updates, so that both take one learning rate and one decay
    (Liu 2025, arXiv 2502.16982, section 2.2).

    Args:
        matrices: groups for Muon.
        rest: groups for AdamW.
        config: of both.
        fused: use AdamW's fused kernel.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        rest: list[dict[str, Any]],
        config: OptimConfig,
        *,
        fused: bool,
    ) -> None:
        self._muon = _Muon(
            matrices, config.lr, momentum=_momentum(config), adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = AdamW(rest, config.lr, config.betas, config.eps, fused=fused)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both parts work on the groups and the state of the whole."""
        n = len(self._muon.param_groups)
        self._muon.param_groups, self._adamw.param_groups = (
            self.param_groups[:n],
            self.param_groups[n:],
        )
        self._muon.state = self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self._muon.step()  # type: ignore[no-untyped-call]
        self._adamw.step()


def _momentum(config: OptimConfig) -> float:
    assert config.momentum is not None  # the config refuses it
    return config.momentum


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimizer of ``config`` for all parameters of ``model``.

    Matrices decay, embeddings and the head included (nanoGPT's choice; OLMo 2 excludes its
    embeddings), and no other parameter unless the config says so.  Tied weights are one parameter
    and count once.  Each group has a ``lr_factor``, by which :func:`set_learning_rate` multiplies.
    A :class:`~minillama.model.transformer.Transformer` may have a parametrization that changes
    these by the size of the model.
    """
    groups: dict[tuple[bool, float, float, float, bool], list[nn.Parameter]] = {}
    roles = parameter_roles(model)
    for name, parameter in model.named_parameters():
        role = roles[name]
        own: GroupConfig = getattr(config.groups, role) or GroupConfig()
        by_muon = config.kind == "muon" and role == "hidden"
        by_size = GroupFactors()
        if isinstance(model, Transformer):
            in_block = name.startswith("blocks.")
            by_size = group_factors(model.config, role, in_block=in_block)
        decay = _weight_decay(name, role, config) * by_size.weight_decay
        factor, eps = own.lr_factor * by_size.lr, config.eps * by_size.eps
        # torch's fused kernels take sharded and whole tensors in separate calls only.
        key = by_muon, factor, decay, eps, is_sharded(parameter)
        groups.setdefault(key, []).append(parameter)
    split: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for (by_muon, factor, decay, eps, _), parameters in groups.items():
        group = {"params": parameters, "lr_factor": factor, "weight_decay": decay}
        if config.kind == "adamw":
            group["eps"] = eps
        split[by_muon].append(group)
    devices = {p.device.type for parameters in groups.values() for p in parameters}
    fused = devices <= set(FUSED_DEVICES)
    if config.kind == "muon":
        return Muon(split[True], split[False], config, fused=fused)
    if config.kind == "sgd":
        return SGD(split[False], config.lr, _momentum(config), fused=fused)
    if config.kind == "lion":
        return Lion(split[False], config.lr, config.betas)
    return AdamW(split[False], config.lr, config.betas, config.eps, fused=fused)


def _weight_decay(name: str, role: Role, config: OptimConfig) -> float:
    own = getattr(config.groups, role)
    decay: float | None = None if own is None else own.weight_decay
    if role == "gains":
        if not _decays(name, config.decay_norms):
            return 0.0
        return config.weight_decay if decay is None else decay
    if decay is not None:
        return decay
    return config.weight_decay if role in ("embed", "head", "hidden") else 0.0


def _decays(name: str, which: str) -> bool:
    """Return whether the gain ``name`` is of a norm that ``optim.decay_norms`` means."""
    norm = name.split(".")[-2]
    before = norm.endswith("_input_norm") or norm == "final_norm"
    behind = norm.endswith("_output_norm")
    return {"none": False, "input": before, "output": behind, "all": True}[which]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each group: ``lr`` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, of which this rank has a part."""
    return hasattr(tensor, "full_tensor")  # importing DTensor to ask for it takes half a second


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor``, gathered from all ranks if it is sharded; then all of them must call."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``; all of it if it is not sharded."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the L2 norm of all ``tensors`` together; sharded and whole ones may be mixed."""
    norms = [nn.utils.get_total_norm(kind) for kind in _by_kind(tensors) if kind]
    whole = [whole_tensor(norm) for norm in norms]
    if len(whole) < 2:
        return whole[0] if whole else torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(whole))
    return norm


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients together so that their norm is at most ``max_norm``; 0: leave them.

    Returns the L2 norm of all gradients before clipping.  Reading it is the only wait for the
    device; the gradients are read a second time only if they are too long.
    """
    parameters = [p for p in parameters if p.grad is not None]
    total = total_norm([p.grad for p in parameters if p.grad is not None])
    norm = total.item()
    if max_norm and norm > max_norm:
        for kind in _by_kind(parameters):
            nn.utils.clip_grads_with_norm_(kind, max_norm, total)
    return norm


def _by_kind(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sharded tensors and the whole ones, which torch cannot reduce in one call."""
    kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
    for tensor in tensors:
        kinds[0 if is_sharded(tensor) else 1].append(tensor)
    return kinds


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """Return the learning rate of update ``step``, which counts from 1 to ``steps``.

    The warm-up is linear, ``lr · step / warmup_steps``, and reaches the peak at its last step;
    without one the first step has the peak.  The last step has ``lr · min_lr_ratio`` exactly,
    except with ``constant`` or where the warm-up fills the run.

    Raises:
        ValueError: ``step`` is outside the run.
    """
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is not in 1 … {steps}")
    peak, last = config.lr, config.lr * config.min_lr_ratio
    warmup = max(1, config.warmup_steps)
    if step <= warmup:
        return peak * (step / warmup)
    if config.schedule == "constant":
        return peak
    start = warmup
    if config.schedule == "wsd":
        start = max(warmup, steps - max(1, steps // WSD_DECAY))
        if step <= start:
            return peak
    t = (step - start) / (steps - start)
    share = 0.5 * (1 + math.cos(math.pi * t)) if config.schedule == "cosine" else 1 - t
    return last + (peak - last) * share
