"""All that a run needs to go on to the bit: what a checkpoint holds, and how it is brought back."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from minillama.config import RunConfig
from minillama.data.prepare import Prepared
from minillama.errors import ConfigError
from minillama.model.transformer import Transformer
from minillama.training.checkpoint import Resumed, save_checkpoint
from minillama.training.journal import Journal
from minillama.training.loggers import Line, cut_metrics
from minillama.training.optim import build_optimizer
from minillama.training.outcome import Progress
from minillama.training.ranks import Ranks
from minillama.training.run_folder import RunFolder


class RunState:
    """The weights, the optimizer, the loss scale and how far the run has come.

    Args:
        config: resolved.
        model: its parameters as the ranks share them.
        prepared: the text, whose hash is kept, and the tokenizer.
        folder: of the run.
        ranks: the processes that train together.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Transformer,
        prepared: Prepared,
        folder: RunFolder,
        ranks: Ranks,
    ) -> None:
        self._config, self._model, self._prepared = config, model, prepared
        self._folder, self._ranks = folder, ranks
        self.progress = Progress()
        self.optimizer = build_optimizer(model, config.optim)
        scaled = config.train.dtype == "float16"
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=scaled)

    def save(self, journal: Journal) -> None:
        """Write a checkpoint of this step, or only set the links if it is there.

        The lines of ``journal`` are safe before it counts.
        """
        ranks, progress, folder = self._ranks, self.progress, self._folder
        write_shards = partial(ranks.write_shards, self.optimizer)
        with ranks.together():
            new = ranks.from_main(not folder.holds(progress.step))
            weights = ranks.weights(self._model) if new else {}
            if not ranks.is_main:
                if new:
                    write_shards(None)
                return
            tokenizer, state = self._prepared.tokenizer, self._collected()
            with folder.writing():
                journal.sync()
                folder.save(
                    progress.step,
                    progress.best_step,
                    self._config.train.keep_last,
                    lambda path: save_checkpoint(
                        path, weights, tokenizer, self._config, state, write_shards
                    ),
                )

    def _collected(self) -> dict[str, Any]:
        device = self._ranks.device
        cuda = device.type == "cuda"
        return {
            "progress": asdict(self.progress),
            **self._ranks.optimizer_state(self.optimizer),
            "scaler": self.scaler.state_dict(),
            "data_sha256": self._prepared.meta.data_sha256,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(device) if cuda else None,
        }

    def restore(self, resumed: Resumed) -> None:
        """Put the run where a checkpoint left it, and cut metrics.jsonl back to there.

        Raises:
            CheckpointError: its weights do not fit the model.
            ConfigError: the text has changed since.
        """
        state, ranks, folder = resumed.state, self._ranks, self._folder
        if state["data_sha256"] != self._prepared.meta.data_sha256:
            raise ConfigError(
                f"{folder.path} cannot be resumed: data.source no longer gives the text that "
                "the run began with; restore it, or start anew with --overwrite"
            )
        ranks.load_weights(self._model, resumed.weights, resumed.folder)
        ranks.load_optimizer(self.optimizer, state, resumed.folder)
        if state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and ranks.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], ranks.device)
        self.progress = progress = Progress(**state["progress"])
        if ranks.is_main:
            with folder.writing():
                folder.link(progress.step, progress.best_step)
                cut_metrics(folder.metrics, self._happened)

    def _happened(self, line: Line) -> bool:
        """Tell whether a line of metrics.jsonl was written before the state that was restored."""
        last = self.progress.evaluated_step if "val_loss" in line else self.progress.step
        return bool(line["step"] <= last)
