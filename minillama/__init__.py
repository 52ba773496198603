"""minillama: train a small Llama, change its norm by one line of config, see whether it helps.

The public names load on first use, so that ``import minillama`` and the command line stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillama.config import ModelConfig, NormConfig, RunConfig, load_config
    from minillama.errors import MinillamaError
    from minillama.evaluation import evaluate
    from minillama.model.norms import LayerNorm, RMSNorm, build_norm, register_norm
    from minillama.model.transformer import Transformer
    from minillama.sampling import generate
    from minillama.training.checkpoint import load_checkpoint
    from minillama.training.trainer import train

__version__ = "0.1.0"

_HOME = {
    "ModelConfig": "config",
    "NormConfig": "config",
    "RunConfig": "config",
    "load_config": "config",
    "MinillamaError": "errors",
    "evaluate": "evaluation",
    "generate": "sampling",
    "LayerNorm": "model.norms",
    "RMSNorm": "model.norms",
    "build_norm": "model.norms",
    "register_norm": "model.norms",
    "Transformer": "model.transformer",
    "load_checkpoint": "training.checkpoint",
    "train": "training.trainer",
}

__all__ = [
    "LayerNorm",
    "MinillamaError",
    "ModelConfig",
    "NormConfig",
    "RMSNorm",
    "RunConfig",
    "Transformer",
    "build_norm",
    "evaluate",
    "generate",
    "load_checkpoint",
    "load_config",
    "register_norm",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'minillama' has no attribute {name!r}")
    return getattr(importlib.import_module(f"minillama.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
