"""The config of a run and of an ablation: every field, its default, its rule.  Imports no torch."""

from __future__ import annotations

from minillama.config.ablation import AblationConfig as AblationConfig
from minillama.config.model import ModelConfig as ModelConfig
from minillama.config.norms import NormConfig as NormConfig
from minillama.config.run import RunConfig as RunConfig
from minillama.config.run import load_config as load_config
