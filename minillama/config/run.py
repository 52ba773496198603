"""The config of a run: every field, its default, its rule; from YAML, overridden by dotted names.

    file.yaml ──read──▶ mapping ──overrides──▶ mapping ──check──▶ RunConfig

``check`` reports every error at once.  Each section fills in what follows from its own fields; only
the size of a vocabulary may still be missing, where a file has to be read for it
(:mod:`minillama.training.assemble`).  The sections are frozen: they never change.

This module imports no torch, so that a wrong config is refused in well under a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from minillama.config.fields import (
    BATCHES,
    NO_EFFECT,
    RESUMABLE,
    Beta,
    Name,
    NonNegative,
    NonNegativeFloat,
    PathText,
    Positive,
    PositiveFloat,
)
from minillama.config.loading import (
    NotBool,
    Owned,
    Section,
    check,
    delete_path,
    derived,
    dump_yaml,
    fields_of,
    flatten,
    get_path,
    json_copy,
    override,
    parse_overrides,
    read_yaml,
    refuse,
    text_fields,
)
from minillama.config.model import ModelConfig
from minillama.config.norms import NormConfig
from minillama.config.shipped import find_config
from minillama.errors import ConfigError, FieldError
from minillama.formatting import join_words
from minillama.plugins import load_plugins

BYTE_VOCAB_SIZE = 259  # unk, bos, eos and the 256 bytes
MIN_BPE_VOCAB_SIZE = 270  # unk, bos, eos, the 256 bytes and a little to learn
DEFAULT_BPE_VOCAB_SIZE = 512

# --------------------------------------------------------------------------- tokenizer and data


def _tokenizer_size(tokenizer: dict[str, Any]) -> int | None:
    if tokenizer["kind"] == "byte":
        return BYTE_VOCAB_SIZE
    trained = tokenizer["kind"] == "bpe" and tokenizer["path"] is None
    return DEFAULT_BPE_VOCAB_SIZE if trained else None


class TokenizerConfig(Section):
    """How text becomes ids."""

    kind: Literal["bpe", "byte", "json", "none"] = Field(
        "bpe",
        description="bpe: sentencepiece, trained on the data; byte: one id per UTF-8 byte; json or "
        "none: what an imported model brings, a tokenizer.json or nothing",
    )
    path: PathText | None = Field(
        None, description="a sentencepiece model to use instead of training"
    )
    vocab_size: Positive | None = derived(
        _tokenizer_size, "ids in all; default: 512 for bpe, or what the model at path has"
    )

    @model_validator(mode="after")
    def _check(self) -> TokenizerConfig:
        errors = []
        if self.kind == "byte":
            if self.vocab_size != BYTE_VOCAB_SIZE:
                rule = f"a byte tokenizer always has {BYTE_VOCAB_SIZE} ids; leave this out"
                errors.append(FieldError("vocab_size", self.vocab_size, rule))
            if self.path is not None:
                errors.append(FieldError("path", self.path, "a byte tokenizer has no file"))
        elif self.kind != "bpe":
            if self.vocab_size is None:
                rule = f"is required; a {self.kind} tokenizer comes only from `minillama import`"
                errors.append(FieldError("vocab_size", None, rule))
        elif self.path is None and (self.vocab_size or 0) < MIN_BPE_VOCAB_SIZE:
            rule = (
                f"must be at least {MIN_BPE_VOCAB_SIZE}: 256 bytes, 3 special ids and some pieces"
            )
            errors.append(FieldError("vocab_size", self.vocab_size, rule))
        refuse(errors)
        return self

    @property
    def has_file(self) -> bool:
        """Whether a checkpoint keeps a file of it."""
        return self.kind in ("bpe", "json")


class PydocsSource(Section):
    """English prose that ships with CPython: manual pages and docstrings; needs no network."""

    kind: Literal["pydocs"]


_TABLE_ENDINGS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_COMPRESSED_ENDINGS = {".gz", ".bz2", ".xz", ".zst"}


def format_by_ending(name: str) -> str:
    """Return the format that the ending of a file's name or URL stands for, else ``text``."""
    path = PurePosixPath(urlsplit(name).path if "://" in name else name)
    if path.suffix.lower() in _COMPRESSED_ENDINGS:
        path = path.with_suffix("")
    return _TABLE_ENDINGS.get(path.suffix.lower(), "text")


def _format_of_files(source: dict[str, Any]) -> str:
    formats = set(map(format_by_ending, source["files"]))
    return formats.pop() if len(formats) == 1 else "text"


class FilesSource(Section):
    """The user's own files, or URLs of files."""

    kind: Literal["files"]
    files: Annotated[list[PathText], Field(min_length=1)]
    format: Literal["text", "json", "csv", "parquet"] = derived(
        _format_of_files,
        "text: each file is one document; else each row is one; default: by the names' endings "
        "(.json, .jsonl, .ndjson, .csv, .tsv, .parquet, also compressed), else text",
    )
    text_field: str = Field("text", description="the column that holds the text (not for text)")

    @field_validator("files", mode="before")
    @classmethod
    def _one_is_a_list(cls, files: Any) -> Any:
        return [files] if isinstance(files, str) else files

    @model_validator(mode="after")
    def _check(self) -> FilesSource:
        formats = {format_by_ending(name): name for name in self.files}
        if len(formats) > 1 and "format" not in self.model_fields_set:
            found = join_words(f"{name} ({kind})" for kind, name in formats.items())
            rule = f"by their names these are files of several formats: {found}; set format"
            refuse([FieldError("files", self.files, rule)])
        return self


class HubSource(Section):
    """A data set of the Hugging Face hub, through ``datasets.load_dataset``."""

    kind: Literal["hub"]
    path: str
    name: str | None = Field(None, description="the data set's configuration, where it has several")
    split: str = "train"
    text_field: str = "text"
    streaming: bool = Field(False, description="read over the network without a full download")
    revision: str | None = Field(None, description="a commit, branch or tag of the data set")
    max_documents: Positive | None = Field(None, description="stop after so many documents")


Source = Annotated[PydocsSource | FilesSource | HubSource, Field(discriminator="kind")]


class DataConfig(Section):
    """Where text comes from and how it is cut."""

    source: Source = PydocsSource(kind="pydocs")
    seq_len: Positive = Field(
        128, description="tokens in a training window", json_schema_extra=BATCHES
    )
    val_fraction: Annotated[float, NotBool, Field(gt=0, lt=1)] = Field(
        0.05, description="share of the text's bytes that is held out"
    )
    split_seed: NonNegative = Field(
        0,
        description="shuffles documents before the split; not train.seed, so that runs with "
        "different seeds are judged on the same held-out text",
    )
    shard_tokens: Annotated[int, NotBool, Field(ge=1000)] | None = Field(
        None,
        description="tokens in a file of prepared data, about; preparation that was stopped "
        "resumes after the files that are finished; default: 100 million",
    )
    workers: Annotated[int, NotBool, Field(ge=0, le=256)] = Field(
        0,
        description="processes that prepare the data; 0: this one alone; the result is the same",
        json_schema_extra=NO_EFFECT,
    )


# ------------------------------------------------------------------------------------- training


class GroupConfig(Section):
    """What differs for the parameters of one role (:mod:`minillama.model.roles`)."""

    lr_factor: PositiveFloat = Field(1.0, description="times the learning rate of each step")
    weight_decay: NonNegativeFloat | None = Field(
        None, description="default: optim.weight_decay for matrices, 0 for the rest"
    )


class GroupsConfig(Section):
    """The roles of parameters, each with a factor on its learning rate and a decay of its own."""

    embed: GroupConfig | None = Field(None, description="the embedding; where tied, the head too")
    head: GroupConfig | None = Field(None, description="the matrix before the logits")
    hidden: GroupConfig | None = Field(None, description="the matrices of the blocks")
    gains: GroupConfig | None = Field(
        None, description="γ of norms; optim.decay_norms says which of them decay"
    )
    shifts: GroupConfig | None = Field(None, description="β of norms")
    other: GroupConfig | None = Field(
        None, description="α of DyT and Derf, a of ReZero, learned scales"
    )


_MOMENTA = {"muon": 0.95, "sgd": 0.9}


def _betas(optim: dict[str, Any]) -> tuple[float, float]:
    return (0.9, 0.99) if optim["kind"] == "lion" else (0.9, 0.95)


class OptimConfig(Section):
    """The optimizer and its schedule."""

    kind: Literal["adamw", "muon", "sgd", "lion"] = Field(
        "adamw",
        description="muon: for the matrices of the blocks, AdamW for the rest; sgd: with momentum; "
        "lion: the sign of a momentum",
    )
    lr: PositiveFloat = Field(
        1e-3,
        description="the peak learning rate; muon's is scaled so that its updates have the root "
        "mean square of AdamW's",
    )
    min_lr_ratio: Annotated[float, NotBool, Field(ge=0, le=1)] = Field(
        0.1, description="the last step's learning rate over the peak"
    )
    warmup_steps: NonNegative = 0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="after the warm-up; wsd holds the peak, then falls over the last fifth",
    )
    betas: tuple[Beta, Beta] = derived(
        _betas, "of adamw, lion and muon's AdamW; default: 0.9 and 0.95, lion's 0.9 and 0.99"
    )
    eps: PositiveFloat = Field(1e-8, description="of adamw and muon's AdamW")
    momentum: Beta | None = derived(
        lambda optim: _MOMENTA.get(optim["kind"]), "of muon and sgd; default: 0.95 and 0.9"
    )
    weight_decay: NonNegativeFloat = Field(
        0.1,
        description="decoupled (sgd's is an L2 penalty), on matrices only: never on shifts, on the "
        "gains of norms only with decay_norms",
    )
    decay_norms: Literal["none", "input", "output", "all"] = Field(
        "none",
        description="norms whose gains decay: those before a sub-layer or the head, those behind a "
        "sub-layer, or all; decay draws a gain to 0, with norm.options.unit_offset to 1",
    )
    groups: GroupsConfig = GroupsConfig()
    grad_clip: NonNegativeFloat = Field(1.0, description="largest gradient norm; 0: no clipping")
    z_loss: NonNegativeFloat = Field(0.0, description="weight of mean (log Z)² in the loss")

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        errors = []
        if self.momentum is not None and self.kind not in _MOMENTA:
            rule = f"{self.kind} has no such field, but optim.betas; leave this out"
            errors.append(FieldError("momentum", self.momentum, rule, "kind"))
        gains = self.groups.gains
        if gains is not None and gains.weight_decay and self.decay_norms == "none":
            rule = "no norm's gain decays; set optim.decay_norms: all, input or output"
            path = "groups.gains.weight_decay"
            errors.append(FieldError(path, gains.weight_decay, rule, "decay_norms"))
        refuse(errors)
        return self


class TrainConfig(Section):
    """The length of the run, its machine and what it writes."""

    steps: Positive = Field(1000, json_schema_extra=RESUMABLE)
    batch_size: Positive = Field(16, description="windows in a step")
    micro_batch_size: Positive = derived(
        lambda train: train["batch_size"],
        "windows in a forward pass; gradients of a step add up; default: batch_size",
    )
    seed: NonNegative = Field(0, description="of initial weights and of the order of batches")
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = Field(
        "auto", json_schema_extra=RESUMABLE
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="bfloat16, float16: autocast; weights and optimizer stay float32. float16 "
        "scales its loss, and skips an update whose gradient overflows (see max_skips)",
    )
    compile: bool = Field(
        False,
        description="torch.compile the model; on a CPU slower than the C kernels, whose place it "
        "takes",
        json_schema_extra=RESUMABLE,
    )
    profile: NonNegative = Field(
        0,
        description="steps to trace, after the first three, into trace.json in the run folder",
        json_schema_extra=NO_EFFECT,
    )
    recompute: bool = Field(
        False,
        description="activation checkpointing: keep only each block's input and run it again in "
        "the backward pass: about half the memory for a quarter to a third more time, on a CPU for "
        "about half more, since it also returns what is freed to the system "
        "(MALLOC_MMAP_THRESHOLD_ in the environment overrides that)",
        json_schema_extra=RESUMABLE,
    )
    parallel: Literal["none", "ddp", "fsdp"] = Field(
        "none",
        description="how the processes that torchrun starts share the work: ddp: each has the "
        "model whole and a part of the batch; fsdp: each has a part of the model as well",
        json_schema_extra=RESUMABLE,
    )
    eval_every: NonNegative = Field(
        100,
        description="steps between validations; 0: at both ends only",
        json_schema_extra=RESUMABLE,
    )
    save_every: NonNegative = Field(
        0,
        description="steps between checkpoints; 0: only at the end and where a validation is best",
        json_schema_extra=NO_EFFECT,
    )
    keep_last: Positive = Field(
        2, description="newest checkpoints to keep, besides the best", json_schema_extra=NO_EFFECT
    )
    log_every: Positive = Field(
        1, description="steps between training lines in metrics.jsonl", json_schema_extra=RESUMABLE
    )
    probe_every: NonNegative = Field(
        0, description="steps between probe lines; 0: none", json_schema_extra=RESUMABLE
    )
    on_nonfinite: Literal["stop", "skip", "run_on"] = Field(
        "stop",
        description="at a loss or gradient that is not finite: stop before the update; skip it, "
        "the step counts and its batch is used up; or make it and run on to the end, the run's "
        "fate is certain from there on",
        json_schema_extra=RESUMABLE,
    )
    max_skips: NonNegative = Field(
        10,
        description="updates in a row that may be skipped; at one more the run stops",
        json_schema_extra=RESUMABLE,
    )
    sample_prompt: str | None = Field(
        None, description="text to continue at the end of the run", json_schema_extra=NO_EFFECT
    )


class RunConfig(Section):
    """One training run."""

    name: Name = Field("run", json_schema_extra=NO_EFFECT)
    out_dir: PathText = derived(
        lambda run: f"runs/{run['name']}", "the run folder; default: runs/NAME", NO_EFFECT
    )
    plugins: list[PathText] = Field(
        default_factory=list, description="modules or .py files that register norms of your own"
    )
    init_from: PathText | None = Field(
        None,
        description="a checkpoint to begin from: its model, but for what is set here of model.norm "
        "and model.max_seq_len, and its tokenizer",
    )
    loggers: list[Literal["tensorboard", "trackio", "wandb", "csv"]] = Field(
        default_factory=list,
        description="besides metrics.jsonl, which is always written; csv: metrics.csv",
        json_schema_extra=NO_EFFECT,
    )
    group: Name | None = Field(
        None,
        description="under which trackio and wandb show runs together; an ablation's name in its "
        "cells",
        json_schema_extra=NO_EFFECT,
    )
    arm: Name | None = Field(
        None, description="the arm of a cell, set by its ablation", json_schema_extra=NO_EFFECT
    )
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()

    @field_validator("plugins")
    @classmethod
    def _files_from_any_folder(cls, plugins: list[str]) -> list[str]:
        return [str(Path(p).absolute()) if p.endswith(".py") else p for p in plugins]

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        errors = []
        inherits = self.init_from is not None and "max_seq_len" not in self.model.model_fields_set
        if self.data.seq_len > self.model.max_seq_len and not inherits:
            rule = f"is above model.max_seq_len = {self.model.max_seq_len}; lower it or raise that"
            errors.append(FieldError("data.seq_len", self.data.seq_len, rule, "model.max_seq_len"))
        if self.optim.warmup_steps > self.train.steps:
            rule = (
                f"the warm-up is longer than the run, train.steps = {self.train.steps}; set "
                f"optim.warmup_steps={self.train.steps // 10} too, or raise that"
            )
            errors.append(
                FieldError("optim.warmup_steps", self.optim.warmup_steps, rule, "train.steps")
            )
        if self.train.batch_size % self.train.micro_batch_size:
            rule = f"does not divide train.batch_size = {self.train.batch_size}"
            micro = FieldError(
                "train.micro_batch_size", self.train.micro_batch_size, rule, "train.batch_size"
            )
            errors.append(micro)
        if self.optim.kind == "muon" and self.train.parallel == "fsdp":
            rule = (
                "updates each matrix as a whole, and train.parallel = fsdp splits it; set ddp, or "
                "another kind"
            )
            errors.append(FieldError("optim.kind", "muon", rule, "train.parallel"))
        if self.model.parametrization == "mup" and self.optim.kind not in ("adamw", "lion"):
            rule = (
                "has no rule for model.parametrization = mup here, whose learning rates are for "
                "updates of a fixed size (adamw, lion); set one of these, or standard"
            )
            path = "model.parametrization"
            errors.append(FieldError("optim.kind", self.optim.kind, rule, path))
        if self.optim.groups.head is not None and self.model.tie_embeddings and not self.init_from:
            rule = "the head is the embedding (model.tie_embeddings); set optim.groups.embed"
            errors.append(FieldError("optim.groups.head", "set", rule, "model.tie_embeddings"))
        size, needed = self.model.vocab_size, self.tokenizer.vocab_size
        if size is not None and needed is not None and size < needed and self.init_from is None:
            rule = f"is smaller than the tokenizer's {needed} ids; leave it out"
            errors.append(FieldError("model.vocab_size", size, rule, "tokenizer.vocab_size"))
        refuse(errors)
        if size is None and self.init_from is None:
            self.__dict__["model"] = self.model.model_copy(update={"vocab_size": needed})
        return self


# ------------------------------------------------------------------------------------------- load

OWNED_BY_KIND = {
    "data.source": Owned(None, "pydocs"),
    "model.rope_scaling": Owned(None),
    "tokenizer": Owned(("vocab_size", "path"), "bpe"),
    "model.norm": Owned(("options",), NormConfig.model_fields["kind"].default),
    "optim": Owned(("betas", "momentum"), "adamw"),
}
"""The settings that an override of a section's ``kind`` drops."""


def load_plugins_of(raw: Mapping[str, Any]) -> None:
    """Load the plugins of a config that is not checked yet, so that its norms can be.

    Raises:
        ConfigError: one is missing or raises.
    """
    plugins = raw.get("plugins")
    if isinstance(plugins, list) and all(isinstance(plugin, str) for plugin in plugins):
        load_plugins(plugins)


def parse_run(raw: Mapping[str, Any], where: str) -> RunConfig:
    """Check a run config given as a mapping.

    Raises:
        ConfigError: with every error; ``where`` names the config in its message.
    """
    load_plugins_of(raw)
    return check(RunConfig, raw, where)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run config, apply dotted ``overrides`` such as ``"optim.lr=1e-3"``, check it.

    ``path`` is a YAML file, the name of a shipped config, or a run folder, whose ``config.yaml`` is
    read.  There, what was filled in follows an override: ``model.dim=128`` alone gives heads and an
    MLP to match; and ``out_dir`` is that folder, also when it was copied or moved.

    Raises:
        ConfigError: the file, an override or any entry is wrong; all entries at once.
    """
    path = find_config(path)
    raw, changes = read_yaml(path), parse_overrides(overrides, text_fields(RunConfig))
    if "arms" in raw and "base" in raw:
        raise ConfigError(f"{path} is the config of an ablation; run it: minillama ablate {path}")
    renamed = not {"name", "out_dir"}.isdisjoint(changes)
    moved = Path(path).is_dir() and not _is_folder(raw.get("out_dir"), path)
    if changes:
        raw = without_derived(raw)
    if moved and not renamed:
        raw["out_dir"] = str(path)
    return parse_run(override(raw, changes, OWNED_BY_KIND), str(path))


def _is_folder(out_dir: Any, folder: str | Path) -> bool:
    return isinstance(out_dir, str) and Path(out_dir).resolve() == Path(folder).resolve()


def without_derived(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved config without the fields that equal their own formula.

    Any other config, which a user wrote, is returned as it is: every entry is meant.
    """
    rest: dict[str, Any] = json_copy(raw)
    size = get_path(raw, "tokenizer.vocab_size")
    formulas = {"model.vocab_size": lambda model: size} | {
        f"{section}.{name}".removeprefix("."): formula
        for section, model in _WITH_DERIVED.items()
        for name, formula in model.derived_fields().items()
    }
    if not isinstance(get_path(raw, "data.source.files"), list):
        del formulas["data.source.format"]  # another kind of source
    if any(get_path(raw, path) is None for path in formulas):
        return rest
    for path, formula in formulas.items():
        section = path.rpartition(".")[0]
        if get_path(raw, path) == formula(get_path(raw, section) if section else raw):
            delete_path(rest, path)
    return rest


_WITH_DERIVED: dict[str, type[Section]] = {
    "": RunConfig,
    "tokenizer": TokenizerConfig,
    "data.source": FilesSource,
    "model": ModelConfig,
    "train": TrainConfig,
}


def with_mark(mark: Mapping[str, str]) -> frozenset[str]:
    """Return the dotted names of the fields of a run that have ``mark``, one of fields.py."""
    return frozenset(
        path for path, field in fields_of(RunConfig) if field.json_schema_extra == mark
    )


def deciding_fields(config: RunConfig) -> dict[str, Any]:
    """Return the values of all fields that decide the numbers of a run, by dotted name."""
    flat = flatten(config.model_dump(mode="json"))
    return {path: value for path, value in flat.items() if path not in with_mark(NO_EFFECT)}


def token_fields(config: RunConfig) -> dict[str, Any]:
    """Return the values of the data fields that decide the prepared tokens, beside the source."""
    unmarked = [n for n, f in DataConfig.model_fields.items() if not f.json_schema_extra]
    return config.data.model_dump(mode="json", include=set(unmarked) - {"source"})


def to_yaml(config: Section) -> str:
    """Write a config as YAML that :func:`load_config` reads back equal."""
    return dump_yaml(config.model_dump(mode="json"))


def json_schema() -> str:
    """Return the JSON schema of a run config, for editors."""
    return json.dumps(RunConfig.model_json_schema(), indent=2)
