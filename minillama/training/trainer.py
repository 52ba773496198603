"""The training loop.

    batch ─▶ micro-batches: loss, backward ─▶ clip ─▶ finite? ─▶ update ─▶ log ─▶ validate ─▶ save
                                                        └─ no: stop or skip, nothing updated

All that a step depends on is the config, the step's number, the weights and the optimizer's state.

Guaranteed: on one CPU with the same version of torch and as many threads, the same config gives the
same bits; so does a run that was interrupted or killed, however often, and resumed.  Probes,
validation, logging, saving, TensorBoard and the bar change no bit.  There are no data workers whose
number could matter: a batch is cut from a memory map by the step's number alone.

Not guaranteed, and tested only to rounding: the same bits with another number of threads, another
micro-batch size, another CPU (our C kernels are built for the one they run on) or version of torch,
with ``train.compile``, or on a GPU, whose sums may be in another order each time.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from minillama import launch
from minillama.config import RunConfig
from minillama.config.model import advice
from minillama.data.batches import Batches
from minillama.data.prepare import Prepared, prepare
from minillama.errors import DivergedError, InterruptedRunError
from minillama.evaluation import evaluate
from minillama.model.kernels import IGNORED
from minillama.model.transformer import Transformer, is_norm_parameter
from minillama.plan.limit import refuse_what_cannot_fit
from minillama.training.assemble import assemble
from minillama.training.bar import progress_bar, shown
from minillama.training.checkpoint import (
    hash_tensors,
    initialise_from,
    read_for_resume,
)
from minillama.training.checkpoint_folders import step_of
from minillama.training.device import check_compile, describe_device, return_freed_memory
from minillama.training.interrupt import StopSignal
from minillama.training.join import join
from minillama.training.journal import Journal
from minillama.training.loggers import Line, check_loggers
from minillama.training.outcome import Progress, fate, summarise
from minillama.training.probes import StepProbe
from minillama.training.profile import TRACE, StepClock
from minillama.training.ranks import Ranks
from minillama.training.run_folder import RunFolder, check_resumable
from minillama.training.sampling import write_sample
from minillama.training.schedule import learning_rate
from minillama.training.stability import check_ids, lost_weight, remedies, verdict
from minillama.training.state import RunState

_log = logging.getLogger("minillama")


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    began: float | None = None,
) -> dict[str, Any]:
    """Train a model as ``config`` says and return the run's summary, as summary.json has it.

    Seeds torch's global generator with ``train.seed``.

    Args:
        config: of the run.
        resume: go on from the newest checkpoint in the run folder; start anew if there is none.
        overwrite: replace the run that the folder holds.
        progress: show a bar on stderr.
        began: when the run was asked for, by ``time.time()``; None: now.

    Raises:
        ConfigError: the folder holds a run and neither flag is given; a resumed run differs in a
            field that decides its numbers; the device or a logger's package is missing; the run
            needs more memory than there is.
        DivergedError: a loss, gradient or weight is no longer finite.
        InterruptedRunError: Ctrl-C or SIGTERM came; the state is saved.
        RunFolderError: the folder cannot be written, or another run is using it.
        CheckpointError: the checkpoint to go on from is damaged.
    """
    began = time.time() if began is None else began
    config = assemble(config)
    with join(config) as ranks, ExitStack() as stack:
        with ranks.together():
            trainer = _set_up(config, ranks, stack, resume=resume, overwrite=overwrite)
        if isinstance(trainer, dict):
            return trainer
        trainer.progress.starting_seconds += time.time() - began
        return trainer.fit(progress)


def _set_up(
    config: RunConfig, ranks: Ranks, stack: ExitStack, *, resume: bool, overwrite: bool
) -> Trainer | dict[str, Any]:
    """Return the trainer, its run's folder claimed on ``stack``; or the summary of a run done."""
    refuse_what_cannot_fit(config, ranks.device, config.train.parallel, ranks.world_size)
    check_loggers(config.loggers)
    for line in advice(config.model):
        _log.warning("%s: %s", config.name, line)
    folder = RunFolder(Path(config.out_dir))
    if ranks.from_main(folder.restarted()):
        resume, overwrite = True, False
    if ranks.is_main:
        claim = RunFolder.claim(folder.path, resume=resume, overwrite=overwrite)
        stack.enter_context(claim)
    checkpoint = ranks.from_main(folder.newest() if resume else None)
    resumed = read_for_resume(checkpoint) if checkpoint else None
    if resumed is not None:
        check_resumable(resumed.config, config, step_of(resumed.folder), folder.path)
    if resume and (summary := folder.finished(config, has_checkpoint=resumed is not None)):
        return summary
    prepared = prepare(config)
    torch.manual_seed(config.train.seed)  # for a user's own norm; nothing here draws from it
    model = Transformer(config.model, seed=config.train.seed)
    if config.init_from is not None and resumed is None:
        new = initialise_from(model, config.init_from)
        _log.info(
            "%s: begins from the weights of %s; new norm parameters: %s",
            config.name,
            config.init_from,
            len(new) or "none",
        )
    batches = Batches(
        prepared.train, config.data.seq_len, config.train.batch_size, config.train.seed
    )
    trainer = Trainer(config, model, batches, prepared, folder, ranks)
    if resumed is not None:
        trainer.state.restore(resumed)
        _log.info("%s: going on after step %d", folder.path, trainer.progress.step)
    else:
        if resume:
            _log.info("%s holds no checkpoint to go on from; starting anew", folder.path)
        if ranks.is_main:
            with folder.writing():
                folder.clear()
    return trainer


class Trainer:
    """One run: its model and optimizer, how far it has come, and where it writes.

    Args:
        config: resolved.
        model: as it was initialised.
        batches: of the training split.
        prepared: the validation split, its counts and the tokenizer.
        folder: claimed, by the main one of the ranks.
        ranks: the processes that train together; default: this one, where the model is.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Transformer,
        batches: Batches,
        prepared: Prepared,
        folder: RunFolder,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.model, self.batches = config, model, batches
        self.prepared, self.folder = prepared, folder
        self.ranks = ranks or Ranks(model.embed.weight.device)
        self.device = self.ranks.device
        model.recompute = config.train.recompute
        if model.recompute and self.device.type == "cpu":
            return_freed_memory()
        self.journal = Journal(folder, silent=not self.ranks.is_main)
        self._ticked = time.perf_counter()
        norms = {n: p for n, p in model.named_parameters() if is_norm_parameter(n)}
        matrices = {n: p for n, p in model.named_parameters() if n not in norms and p.ndim > 1}
        self.facts = {
            "n_params": sum(p.numel() for p in model.parameters()),
            "n_norm_params": sum(p.numel() for p in norms.values()),
            "unigram_entropy": prepared.meta.unigram_entropy,
            "n_val_tokens": prepared.meta.n_val_tokens,
            "weights_hash": hash_tensors(matrices),
            "data_hash": batches.hash,
            "device": describe_device(self.device),
            "processes": self.ranks.world_size,
        }
        if config.train.compile:
            check_compile(self.device)
        self._loss_sums = self.ranks.wrap(model, config.train.compile)
        self.parameters = list(model.parameters())
        self.state = RunState(config, model, prepared, folder, self.ranks)
        self.optimizer, self.scaler = self.state.optimizer, self.state.scaler
        self.clock = StepClock(config.train.profile if self.ranks.is_main else 0, self.device)

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.state.progress

    # ------------------------------------------------------------------------------------ the loop

    def fit(self, show: bool = True) -> dict[str, Any]:
        """Train from where the run stands to its last step; return and write the summary."""
        config, progress = self.config, self.progress
        _log.info(
            "{}: {n_params:,} parameters, {n_norm_params:,} of them in norms; "
            "matrices at init have sha256 {weights_hash:.12}, batches {data_hash:.12}".format(
                config.name, **self.facts
            )
        )
        with ExitStack() as stack:
            self._ticked = time.perf_counter()
            with self.ranks.together():
                self.journal.begin(config, progress.step)
            stack.callback(self.journal.close)
            stop = stack.enter_context(self.ranks.stop_signal())
            bar = stack.enter_context(
                progress_bar(config, progress.step, show and self.ranks.is_main)
            )
            self._after_update(stop)
            while progress.step < config.train.steps:
                with self.clock.step(self.folder.path / TRACE):
                    line = self._train_step()
                if not bar.disable:
                    bar.set_postfix_str(shown(line, progress.val_loss), refresh=False)
                    bar.update()
                self._after_update(stop)
        self.clock.close(self.folder.path / TRACE)
        if self.ranks.is_main and (told := self.clock.told()):
            _log.info("%s: %s", config.name, told)
        return self._finish()

    def _train_step(self) -> Line:
        """Make one update, or skip it, and log it.

        Raises:
            DivergedError: the loss or the gradient is not finite; no update is made.
            DataError: the batch holds ids that the model does not know.
        """
        started = time.perf_counter()
        config, progress = self.config, self.progress
        step = progress.step + 1
        with self.clock.part("data"):
            inputs_BT, targets_BT = self.ranks.batch(self.batches, progress.step)
        check_ids(self.prepared.folder, config.model.known_vocab_size, inputs_BT, targets_BT)
        count = int(self.ranks.sum(int((targets_BT != IGNORED).sum())))
        probing = config.train.probe_every and step % config.train.probe_every == 0
        probe = StepProbe(self.model, self.ranks.norm) if probing and self.ranks.probes() else None

        loss = self._accumulate(inputs_BT, targets_BT, count)
        if probe is not None:
            with self._autocast():
                probe.before_update(inputs_BT.to(self.device))
        with self.clock.part("clip"):
            norm = self.ranks.clip(self.parameters, config.optim.grad_clip)
        lr = learning_rate(step, config.optim, config.train.steps)
        what = verdict(config.train, loss, norm, progress.skipped_in_a_row)
        if what == "skip" and config.train.on_nonfinite != "run_on" and self._lost_weight():
            what = "stop"  # no later batch can bring the weights back
        if what == "make":
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            with self.clock.part("update"):
                self.ranks.before_update()
                self.scaler.step(self.optimizer)
        self.scaler.update()
        spike = what != "stop" and progress.stepped(loss, count, skipped=what == "skip")
        seconds = time.perf_counter() - started
        progress.training_seconds += seconds
        line = {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "clipped": 0 < config.optim.grad_clip < norm,
            "tokens": progress.tokens,
            "tokens_per_s": self.journal.speed(count, seconds),
        }
        line |= {"skipped": progress.skipped} if what == "skip" else {}
        line |= {"spike": True} if spike else {}
        due = step % config.train.log_every == 0 or step == config.train.steps
        if what == "stop" or (due and what == "make"):
            progress.logged(loss)
        if due or what != "make" or spike:
            self.journal.write(line)
            self.journal.restart_speed()
        if what == "stop":
            self._diverged_at(step, loss)
        if probe is not None:
            self.journal.write({"step": step, "probe": probe.after_update()})
        return line

    def _accumulate(self, inputs_BT: Tensor, targets_BT: Tensor, count: int) -> float:
        """Add up the gradients of the micro-batches; return the mean cross-entropy of the step.

        Each token weighs the same, however the batch is cut: sums are divided by the step's count.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        size = self.config.train.micro_batch_size or len(inputs_BT)
        parts = list(zip(torch.split(inputs_BT, size), torch.split(targets_BT, size), strict=True))
        for number, (inputs, targets) in enumerate(parts, start=1):
            with self.ranks.micro_batch(last=number == len(parts)):
                with self.clock.part("forward"), self._autocast():
                    sums = self._loss_sums(
                        inputs.to(self.device), targets.to(self.device), self.config.optim.z_loss
                    )
                with self.clock.part("backward"):
                    torch.autograd.backward(self.scaler.scale(sums.objective / count))
            total += sums.cross_entropy.detach()
        self.ranks.gather_gradients()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        return self.ranks.sum((total / count).item())

    def _after_update(self, stop: StopSignal) -> None:
        """Validate and save if it is time to; leave if a signal has come."""
        train, step = self.config.train, self.progress.step
        at_end = step in (0, train.steps)
        due = at_end or (train.eval_every and step % train.eval_every == 0)
        best = False
        stop.agree()
        if due and self.progress.evaluated_step != step and not stop.requested:
            with stop.breakable():
                best = self._validate(stop)
        save_due = step == train.steps or (train.save_every and step % train.save_every == 0)
        if stop.requested or best or (step and save_due):
            if lost := self._lost_weight():
                self._diverged(f"{lost} is not finite after step {step}")
            self._tick()
            self.state.save(self.journal)
        if stop.requested:
            self._tick()
            self.journal.summarise(self._summary(None))
            raise launch.on_first_rank(
                InterruptedRunError(
                    f"stopped after step {step} of {train.steps} and saved; go on with: "
                    + launch.command("train", str(self.folder.config), "--resume")
                )
            )

    def _validate(self, stop: StopSignal) -> bool:
        """Measure the whole validation split and log it; tell whether it is the best so far."""
        meta, started = self.prepared.meta, time.perf_counter()

        def add(loss: float) -> float:
            stop.check()
            return self.ranks.sum(loss)

        with self._autocast():
            result = evaluate(
                self.model,
                self.prepared.val,
                n_bytes=meta.n_val_bytes,
                seq_len=self.config.data.seq_len,
                batch_size=self.config.train.micro_batch_size or self.config.train.batch_size,
                part=(self.ranks.rank, self.ranks.world_size),
                add=add,
            )
        self.progress.validation_seconds += time.perf_counter() - started
        best = self.progress.validated(result)
        self.journal.write(
            {
                "step": self.progress.step,
                "val_loss": result["loss"],
                "val_bits_per_byte": result["bits_per_byte"],
            }
        )
        if not math.isfinite(result["loss"]):
            self._diverged(f"the validation loss after step {self.progress.step} is not finite")
        return best

    def _finish(self) -> dict[str, Any]:
        progress, prompt = self.progress, self.config.train.sample_prompt
        assert progress.val_loss is not None
        assert progress.init_val_loss is not None
        self._tick()
        sample = None
        if prompt is not None and (model := self.ranks.sampler(self.model)) is not None:
            with self._autocast():
                sample = write_sample(
                    model, self.prepared.tokenizer, prompt, self.config.train.seed
                )
        start = progress.init_val_loss
        if self.config.init_from is not None:  # it began trained: no better is not diverged
            start = max(start, math.log(self.config.model.known_vocab_size))
        judged = fate(progress.val_loss, start, self.prepared.meta.unigram_entropy)
        summary = self._summary(judged, sample)
        self.journal.summarise(summary)
        return summary

    # -------------------------------------------------------------------------------- small things

    def _lost_weight(self) -> str | None:
        """Name a parameter that is not finite any more, on whichever rank."""
        if self.ranks.finite(self.parameters):
            return None
        return (lost_weight(self.model) if self.ranks.world_size == 1 else None) or "a weight"

    def _diverged_at(self, step: int, loss: float) -> NoReturn:
        what = "gradient norm" if math.isfinite(loss) else "loss"
        why = f"the {what} of step {step} is not finite, so it was not made"
        if lost := self._lost_weight():
            why += f"; nor is {lost}"
        elif self.progress.skipped_in_a_row:
            why += f", nor were the {self.progress.skipped_in_a_row} before it (train.max_skips)"
        self._diverged(why)

    def _diverged(self, what: str) -> NoReturn:
        self._tick()
        self.journal.summarise(self._summary("diverged"))
        raise launch.on_first_rank(
            DivergedError(
                f"training diverged: {what}; last good checkpoint: "
                f"{self.folder.newest() or 'none yet'}; {remedies(self.config)}"
            )
        )

    def _summary(self, judged: Any, sample: str | None = None) -> dict[str, Any]:
        return summarise(self.config, self.progress, self.facts, fate=judged, sample=sample)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.train.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.config.train.dtype))

    def _tick(self) -> None:
        """Add the time since the last tick to the run's."""
        now = time.perf_counter()
        self.progress.seconds += now - self._ticked
        self._ticked = now
