"""The training loop.

    batch ─▶ micro-batches: loss, backward ─▶ clip ─▶ finite? ─▶ update ─▶ log ─▶ validate ─▶ save
                                                        └─ no: stop or skip, without an update

A step depends only on the config, its number, the weights and the optimizer's state.

Guaranteed: on one CPU, with the same version of torch and number of threads, the same config gives
the same bits; so does a run that was interrupted or killed, however often, and resumed.  Probes,
validation, logging, saving, TensorBoard and the progress bar do not change a bit of it.  There are
no data workers whose number could matter: a batch is cut from a memory map by the number of its
step alone.

Not guaranteed, and tested only to rounding: the same bits with another number of threads, another
micro-batch size, another CPU (our C kernels are built for the one they run on) or version of torch,
with ``train.compile``, or on a GPU, whose sums may be in another order each time.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from minillama import launch
from minillama.arguments import check_type
from minillama.config import RunConfig
from minillama.config.advice import advice
from minillama.config.run import TrainConfig
from minillama.data.batches import Batches, rows_of_rank
from minillama.data.prepare import Prepared, prepare
from minillama.errors import DivergedError, InterruptedRunError, MinillamaError
from minillama.evaluation import scores, windows
from minillama.model.kernels import IGNORED
from minillama.model.ngpt import normalise_weights
from minillama.model.norms import norm_parameter_names
from minillama.model.transformer import Transformer
from minillama.plan.limit import refuse_what_cannot_fit
from minillama.progress import ProgressBar
from minillama.sampling import generate
from minillama.training.assemble import assemble
from minillama.training.checkpoint import (
    Checkpoint,
    hash_tensors,
    initialise_from,
    load_optimizer,
    optimizer_tensors,
    read_checkpoint,
    save_checkpoint,
    whole_weights,
)
from minillama.training.checkpoint_folders import OPTIMIZER, step_of
from minillama.training.device import check_compile, describe_device, return_freed_memory
from minillama.training.interrupt import StopSignal, SyncedStopSignal
from minillama.training.loggers import Logger, build_loggers, check_loggers
from minillama.training.metrics import Line, filter_metrics
from minillama.training.optim import (
    build_optimizer,
    clip_gradients,
    is_sharded,
    learning_rate,
    local_part,
    set_learning_rate,
)
from minillama.training.parallel import DdpModel, LocalModel, Ranks, join
from minillama.training.probes import StepProbe
from minillama.training.profile import TRACE, StepClock
from minillama.training.run_folder import (
    RunFolder,
    check_config,
    check_content,
    content_hashes,
)
from minillama.training.stability import (
    check_ids,
    decide_update,
    remedies,
)
from minillama.training.summary import Fate, Progress, fate, summarise

SAMPLE_TOKENS, SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 200, 0.8, 50

_log = logging.getLogger("minillama")


def train(
    config: RunConfig,
    *,
    resume: bool | str | Path = False,
    overwrite: bool = False,
    progress: bool = True,
    began: float | None = None,
) -> dict[str, Any]:
    """Train a model as ``config`` says and return the run's summary, as summary.json has it.

    Seeds torch's global generator with ``train.seed``, and lowers torch's number of threads to the
    number of CPUs that may be used.

    Args:
        config: of the run.
        resume: continue from the newest checkpoint in the run folder, or start if there is none; a
            path: continue from this checkpoint of the run folder, and remove the later ones.
        overwrite: replace the run in the folder.
        progress: show a progress bar on stderr.
        began: when the run was asked for, by ``time.perf_counter()``; None: now.

    Raises:
        ConfigError: the folder contains a run and neither flag is given; a resumed run differs in a
            field that decides its numbers; the device or a logger's package is missing; the run
            needs more memory than there is.
        DivergedError: a loss, gradient or weight is no longer finite.
        InterruptedRunError: Ctrl-C, SIGTERM or SIGHUP came; the state is saved.
        RunFolderError: the folder cannot be written, or another run is using it.
        CheckpointError: the checkpoint to continue from is damaged.
        MinillamaError: code of the user called ``sys.exit``.
    """
    check_type("config", config, RunConfig)
    began = time.perf_counter() if began is None else began
    torch.set_num_threads(min(torch.get_num_threads(), launch.usable_cpus()))
    try:
        config = assemble(config)
        with join(config) as ranks, ExitStack() as stack:
            with ranks.sync_errors():
                folder, checkpoint, summary = _open_folder(config, ranks, stack, resume, overwrite)
                if summary is not None:
                    return summary
                trainer = _build_trainer(config, ranks, folder, checkpoint)
            trainer.progress.starting_seconds += time.perf_counter() - began
            return trainer.fit(progress)
    except SystemExit as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise MinillamaError(
            f"the training was ended by sys.exit({error.code!r}) in {place.filename}, line "
            f"{place.lineno}; raise an exception there instead"
        ) from error


def _open_folder(
    config: RunConfig,
    ranks: Ranks,
    stack: ExitStack,
    resume: bool | str | Path,
    overwrite: bool,
) -> tuple[RunFolder, Checkpoint | None, dict[str, Any] | None]:
    """Check the config and lock the run folder until ``stack`` ends.

    Returns the folder, the checkpoint to resume from, if any, and the summary, if the run is
    finished.
    """
    refuse_what_cannot_fit(config, ranks.device, config.train.parallel, ranks.world_size)
    check_loggers(config.loggers)
    for line in advice(config):
        _log.warning("%s: %s", config.name, line)
    folder = RunFolder(Path(config.out_dir))
    if ranks.broadcast(folder.restarted()):
        resume, overwrite = True, False
    if ranks.is_main:
        claim = RunFolder.claim(folder.path, resume=bool(resume), overwrite=overwrite)
        folder = stack.enter_context(claim)
    if not resume:
        return folder, None, None
    newest = resume is True
    path = ranks.broadcast(folder.newest() if newest else folder.own_checkpoint(str(resume)))
    checkpoint = None
    if path is not None:
        checkpoint = read_checkpoint(path, for_resume=True)
        check_config(checkpoint.config, config, step_of(path), folder.path)
    summary = folder.finished(config, has_checkpoint=path is not None) if newest else None
    if path is None and summary is None:
        _log.info("%s has no checkpoint to resume from; starting the run", folder.path)
    return folder, checkpoint, summary


def _build_trainer(
    config: RunConfig, ranks: Ranks, folder: RunFolder, checkpoint: Checkpoint | None
) -> Trainer:
    prepared = prepare(config)
    torch.manual_seed(config.train.seed)  # for a user's own norm; nothing here draws from it
    model = Transformer(config.model, seed=config.train.seed)
    if config.init_from is not None and checkpoint is None:
        new = initialise_from(model, config.init_from)
        _log.info(
            "%s: starting from the weights of %s; new norm parameters: %s",
            config.name,
            config.init_from,
            len(new) or "none",
        )
    trainer = Trainer(config, model, prepared, folder, ranks, checkpoint)
    if checkpoint is None and ranks.is_main:  # after all that can fail
        with folder.writing():
            folder.clear()
    return trainer


class Trainer:
    """One run: its model, its optimizer, its progress, and where it writes.

    Args:
        config: of the run.
        model: as it was initialised.
        prepared: the tokens of both splits, their counts, and the tokenizer.
        folder: locked by the main rank.
        ranks: the processes that train together; default: this one, where the model is.
        checkpoint: to resume from.

    Raises:
        CheckpointError: the weights of the checkpoint do not fit the model.
        ConfigError: the text, the tokenizer or a plugin has changed since the checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Transformer,
        prepared: Prepared,
        folder: RunFolder,
        ranks: Ranks | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.config, self.model, self.prepared, self.folder = config, model, prepared, folder
        self.ranks = ranks or Ranks(model.embed.weight.device)
        self.device = self.ranks.device
        self.batches = Batches(
            prepared.train, config.data.seq_len, config.train.batch_size, config.train.seed
        )
        model.recompute = config.train.recompute
        if model.recompute and self.device.type == "cpu":
            return_freed_memory()
        norms = norm_parameter_names(model)
        matrices = {n: p for n, p in model.named_parameters() if n not in norms and p.ndim > 1}
        self.facts = {
            "n_params": sum(p.numel() for p in model.parameters()),
            "n_norm_params": sum(model.get_parameter(name).numel() for name in norms),
            "unigram_entropy": prepared.meta.unigram_entropy,
            "n_val_tokens": prepared.meta.n_val_tokens,
            "source_sha256": prepared.meta.source_hash,
            "tokenizer_sha256": prepared.meta.tokenizer_sha256,
            "weights_hash": hash_tensors(matrices),
            "data_hash": self.batches.hash,
            "device": describe_device(self.device),
            "processes": self.ranks.world_size,
        }
        if config.train.compile:
            check_compile(self.device)
        if checkpoint is not None:  # before the model is sharded
            check_content(checkpoint.state, content_hashes(config, prepared), folder.path)
            model.load_state_dict(checkpoint.weights)
        self.parallel = parallelize(model, self.device, config.train)
        self.parameters = list(model.parameters())
        self.optimizer = build_optimizer(model, config.optim)
        # Scales the loss in float16, whose gradients would be rounded to zero.
        scaled = config.train.dtype == "float16"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        self.progress = Progress()
        if checkpoint is not None:
            self._restore(checkpoint)
        self.loggers: list[Logger] = []
        self.clock = StepClock(config.train.profile if self.ranks.is_main else 0, self.device)
        self._tokens, self._seconds = 0, 0.0  # of training since the last logged line
        self._ticked = time.perf_counter()

    # ------------------------------------------------------------------------------------ the loop

    def fit(self, show: bool = True) -> dict[str, Any]:
        """Train from the current step to the last one; return and write the summary."""
        config, progress, ranks = self.config, self.progress, self.ranks
        _log.info(
            "{}: {n_params:,} parameters, {n_norm_params:,} of them in norms; "
            "matrices at init have sha256 {weights_hash:.12}, batches {data_hash:.12}".format(
                config.name, **self.facts
            )
        )
        with ExitStack() as stack:
            self._ticked = time.perf_counter()
            with ranks.sync_errors():
                self._begin_logging()
            stack.callback(self._close_loggers)
            stop = stack.enter_context(
                StopSignal() if ranks.world_size == 1 else SyncedStopSignal(ranks.any)
            )
            bar = stack.enter_context(
                ProgressBar(
                    config.name, config.train.steps, progress.step, show=show and ranks.is_main
                )
            )
            self._validate_and_save(stop)
            while progress.step < config.train.steps:
                with self.clock.step(self.folder.path / TRACE):
                    line = self._train_step()
                self._validate_and_save(stop)
                bar.update(_status(line, progress.val_loss))  # the validation is of this step
        self.clock.close(self.folder.path / TRACE)
        if ranks.is_main and (times := self.clock.report()):
            _log.info("%s: %s", config.name, times)
        return self._finish()

    def _train_step(self) -> Line:
        """Make one update, or skip it, and log it.

        Raises:
            DivergedError: the loss or the gradient is not finite; no update is made.
            DataError: the batch has ids that the model does not have.
        """
        started = time.perf_counter()
        config, progress, ranks = self.config, self.progress, self.ranks
        step = progress.step + 1
        with self.clock.part("data"):
            rows = rows_of_rank(config.train.batch_size, ranks.rank, ranks.world_size)
            inputs_BT, targets_BT = self.batches.batch_at(progress.step, rows)
        check_ids(self.prepared.folder, config.model.known_vocab_size, inputs_BT, targets_BT)
        n_tokens = int(ranks.sum(int((targets_BT != IGNORED).sum())))
        probe = None
        if config.train.probe_every and step % config.train.probe_every == 0:
            with self._autocast():
                probe = StepProbe(self.model, inputs_BT.to(self.device))

        loss = self._accumulate(inputs_BT, targets_BT, n_tokens)
        if probe is not None:
            probe.before_update()
        with self.clock.part("clip"):
            norm = clip_gradients(self.parameters, config.optim.grad_clip)
        lr = learning_rate(step, config.optim, config.train.steps)
        decision = decide_update(config.train, loss, norm, progress.skipped_in_a_row)
        if decision == "skip" and config.train.on_nonfinite != "run_on" and self._lost_weight():
            decision = "stop"  # no later batch can bring the weights back
        if decision == "apply":
            set_learning_rate(self.optimizer, lr)
            with self.clock.part("update"):
                self.scaler.step(self.optimizer)
                if self.model.has_unit_weights:
                    normalise_weights(self.model)
        self.scaler.update()
        spike = decision != "stop" and progress.count_step(
            loss, n_tokens, config.train.steps, skipped=decision == "skip"
        )
        seconds = time.perf_counter() - started
        progress.training_seconds += seconds
        self._tokens += n_tokens
        self._seconds += seconds
        line = {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "clipped": 0 < config.optim.grad_clip < norm,
            "tokens": progress.tokens,
            "tokens_per_s": self._tokens / self._seconds,
        }
        line |= {"skipped": progress.skipped} if decision == "skip" else {}
        line |= {"spike": True} if spike else {}
        due = step % config.train.log_every == 0 or step == config.train.steps
        if decision == "stop" or (due and decision == "apply"):
            progress.add_loss(loss)
        if due or decision != "apply" or spike:
            self._write_line(line)
            self._tokens, self._seconds = 0, 0.0
        if decision == "stop":
            self._stop_diverged(step, loss)
        if probe is not None:
            self._write_line({"step": step, "probe": probe.after_update()})
        return line

    def _accumulate(self, inputs_BT: Tensor, targets_BT: Tensor, n_tokens: int) -> float:
        """Add up the gradients of the micro-batches; return the mean cross-entropy of the step.

        Each token has the same weight, however the batch is cut: sums are divided by the step's
        ``n_tokens``.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        size = self.config.train.micro_batch_size or len(inputs_BT)
        parts = list(zip(torch.split(inputs_BT, size), torch.split(targets_BT, size), strict=True))
        for number, (inputs, targets) in enumerate(parts, start=1):
            with self.parallel.micro_batch(last=number == len(parts)):
                with self.clock.part("forward"), self._autocast():
                    sums = self.parallel.loss_sums(
                        inputs.to(self.device), targets.to(self.device), self.config.optim.z_loss
                    )
                with self.clock.part("backward"):
                    torch.autograd.backward(self.scaler.scale(sums.objective / n_tokens))
            total += sums.cross_entropy.detach()
        self.parallel.sum_gradients()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        return self.ranks.sum((total / n_tokens).item())

    def _validate_and_save(self, stop: StopSignal) -> None:
        """Validate and save if the current step is due for it; leave if a signal has come."""
        train, step = self.config.train, self.progress.step
        at_end = step in (0, train.steps)
        due = at_end or (train.eval_every and step % train.eval_every == 0)
        best = False
        stop.sync()
        if due and self.progress.evaluated_step != step and not stop.requested:
            with stop.breakable():
                best = self._validate(stop)
        save_due = step == train.steps or (train.save_every and step % train.save_every == 0)
        if stop.requested or best or (step and save_due):
            if lost := self._lost_weight():
                self._raise_diverged(f"{lost} is not finite after step {step}")
            self._tick()
            self._save()
        if stop.requested:
            self._tick()
            self._write_summary(None)
            raise launch.on_first_rank(
                InterruptedRunError(
                    f"stopped after step {step} of {train.steps} and saved; continue with: "
                    + launch.command("train", str(self.folder.config), "--resume")
                )
            )

    def _validate(self, stop: StopSignal) -> bool:
        """Measure the whole validation split and log it; return whether it is the best so far."""
        started, meta = time.perf_counter(), self.prepared.meta
        ranks, progress = self.ranks, self.progress
        batches = windows(
            self.prepared.val,
            self.config.data.seq_len,
            self.config.train.micro_batch_size or self.config.train.batch_size,
            self.config.model.known_vocab_size,
        )
        with torch.inference_mode(), self._autocast():
            nats = sum_loss(self.model, batches, ranks, stop)
        result = scores(nats, len(self.prepared.val) - 1, meta.n_val_bytes)
        progress.validation_seconds += time.perf_counter() - started
        best = progress.add_validation(result)
        self._write_line(
            {
                "step": progress.step,
                "val_loss": result["loss"],
                "val_bits_per_byte": result["bits_per_byte"],
            }
        )
        if not math.isfinite(result["loss"]):
            self._raise_diverged(f"the validation loss after step {progress.step} is not finite")
        return best

    def _finish(self) -> dict[str, Any]:
        progress = self.progress
        assert progress.val_loss is not None
        assert progress.init_val_loss is not None
        self._tick()
        sample = self._sample()
        initial = progress.init_val_loss
        if self.config.init_from is not None:  # it started trained: no better is not diverged
            initial = max(initial, math.log(self.config.model.known_vocab_size))
        judged = fate(
            progress.val_loss,
            initial,
            self.prepared.meta.unigram_entropy,
            still_falling=progress.still_falling,
        )
        return self._write_summary(judged, sample)

    def _sample(self) -> str | None:
        """Return the sample prompt and the model's continuation, on the main rank alone."""
        prompt, model = self.config.train.sample_prompt, self.model
        if prompt is None:
            return None
        if any(map(is_sharded, self.parameters)):
            weights = whole_weights(self.model, keep=self.ranks.is_main)
            if self.ranks.is_main:
                model = Transformer(self.config.model)
                model.load_state_dict(weights)
        if not self.ranks.is_main:
            return None
        tokenizer = self.prepared.tokenizer
        ids = tokenizer.encode(prompt, bos=True)
        with self._autocast():
            ids += generate(
                model,
                ids,
                SAMPLE_TOKENS,
                temperature=SAMPLE_TEMPERATURE,
                top_k=SAMPLE_TOP_K,
                seed=self.config.train.seed,
                stop_ids=(tokenizer.eos_id,),
            )
        return tokenizer.decode(i for i in ids if i < tokenizer.vocab_size)

    # -------------------------------------------------------------------------------- save, resume

    def _save(self) -> None:
        """Write a checkpoint of this step, or only update the links if it exists.

        All lines of metrics.jsonl are on the disk before the checkpoint counts.
        """
        ranks, progress, folder = self.ranks, self.progress, self.folder
        with ranks.sync_errors():
            weights: dict[str, Tensor] = {}
            whole: dict[str, Tensor] = {}
            sharded: dict[str, Tensor] = {}
            new = ranks.broadcast(not folder.has_checkpoint(progress.step))
            if new:
                weights = whole_weights(self.model, keep=ranks.is_main)
                whole, sharded = optimizer_tensors(self.model, self.optimizer)
            write_shards = partial(self.parallel.write_shards, sharded, ranks=ranks)
            if not ranks.is_main:
                if new:
                    write_shards(None)
                return
            cuda = self.device.type == "cuda"
            state = {
                "progress": asdict(progress),
                "optimizer": whole,
                "sharded": list(sharded),
                "scaler": self.scaler.state_dict(),
                **content_hashes(self.config, self.prepared),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state(self.device) if cuda else None,
            }
            with folder.writing():
                for logger in self.loggers:
                    logger.sync()
                folder.save(
                    progress.step,
                    progress.best_step,
                    self.config.train.keep_last,
                    lambda path: save_checkpoint(
                        path, weights, self.prepared.tokenizer, self.config, state, write_shards
                    ),
                )

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint whose weights are loaded; cut metrics.jsonl back to it."""
        state, folder = checkpoint.state, self.folder
        load_optimizer(
            self.model,
            self.optimizer,
            state["optimizer"],
            state["sharded"],
            checkpoint.folder / OPTIMIZER,
        )
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        self.progress = progress = Progress(**state["progress"])
        if self.ranks.is_main:
            with folder.writing():
                folder.remove_checkpoints_after(progress.step)
                folder.link(progress.step, progress.best_step)
                filter_metrics(folder.metrics, self._is_before_now)
        _log.info("%s: resuming after step %d", folder.path, progress.step)

    def _is_before_now(self, line: Line) -> bool:
        """Return whether a line of metrics.jsonl was written before the restored state."""
        last = self.progress.evaluated_step if "val_loss" in line else self.progress.step
        return bool(line["step"] <= last)

    # ------------------------------------------------------------------------------------- logging

    def _begin_logging(self) -> None:
        """Write the config and open the loggers, on the main rank."""
        if self.ranks.is_main:
            with self.folder.writing():
                self.folder.begin(self.config)
                self.loggers = build_loggers(self.config, self.folder.path, self.progress.step)

    def _write_line(self, line: Line) -> None:
        with self.folder.writing():
            for logger in self.loggers:
                logger.log(line)

    def _close_loggers(self) -> None:
        for logger in self.loggers:
            with suppress(OSError):  # reported when the line was logged
                logger.close()

    def _write_summary(self, judged: Fate | None, sample: str | None = None) -> dict[str, Any]:
        summary = summarise(self.config, self.progress, self.facts, fate=judged, sample=sample)
        if self.ranks.is_main:
            with self.folder.writing():
                self.folder.write_summary(summary)
        return summary

    def _tick(self) -> None:
        """Add the time since the last tick to the run's."""
        now = time.perf_counter()
        self.progress.seconds += now - self._ticked
        self._ticked = now

    # ---------------------------------------------------------------------------------- divergence

    def _lost_weight(self) -> str | None:
        """Return the name of a parameter that is not finite on some rank, if there is one."""
        named = self.model.named_parameters()
        own = (name for name, p in named if not bool(torch.isfinite(local_part(p)).all()))
        names = self.ranks.gather(next(own, None))
        return next((name for name in names if name is not None), None)

    def _stop_diverged(self, step: int, loss: float) -> NoReturn:
        what = "gradient norm" if math.isfinite(loss) else "loss"
        why = f"the {what} of step {step} is not finite, so its update was not made"
        if lost := self._lost_weight():
            why += f"; nor is {lost} finite"
        elif self.progress.skipped_in_a_row:
            why += f", nor were the {self.progress.skipped_in_a_row} before it (train.max_skips)"
        self._raise_diverged(why)

    def _raise_diverged(self, why: str) -> NoReturn:
        self._tick()
        self._write_summary("diverged")
        raise launch.on_first_rank(
            DivergedError(
                f"training diverged: {why}; last good checkpoint: "
                f"{self.folder.newest() or 'none yet'}; {remedies(self.config)}"
            )
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.train.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.config.train.dtype))


def sum_loss(
    model: Transformer, batches: Iterator[tuple[Tensor, Tensor]], ranks: Ranks, stop: StopSignal
) -> float:
    """Return the cross-entropy of all ``batches``, in nats; each rank reads its share of them.

    Every rank makes as many forward passes, as FSDP needs; the last one may count no token.
    """
    nats, device = 0.0, ranks.device
    while turn := list(itertools.islice(batches, ranks.world_size)):
        inputs_BT, targets_BT = turn[min(ranks.rank, len(turn) - 1)]
        if ranks.rank >= len(turn):
            inputs_BT, targets_BT = inputs_BT[:1], torch.full_like(targets_BT[:1], IGNORED)
        own = float(model.loss_sums(inputs_BT.to(device), targets_BT.to(device)).cross_entropy)
        stop.check()
        nats += ranks.sum(own)
    return nats


def _status(line: Line, val_loss: float | None) -> str:
    """Return what the progress bar shows beside its own numbers."""
    val = "" if val_loss is None else f" val {val_loss:.3f}"
    return f"loss {line['loss']:.3f}{val} lr {line['lr']:.1e} {line['tokens_per_s']:,.0f} tokens/s"


def parallelize(model: Transformer, device: torch.device, train: TrainConfig) -> LocalModel:
    """Prepare ``model`` for training as ``train.parallel`` says.

    Its parameters may be other objects afterwards, with the same names, shapes and order.
    """
    if train.parallel == "none":
        return LocalModel(model, device, train)
    if train.parallel == "ddp":
        return DdpModel(model, device, train)
    # Imported here: torch.distributed's FSDP takes most of a second to import.
    from minillama.training.fsdp import FsdpModel

    return FsdpModel(model, device, train)
