"""The config of a run: every field, its default, its rule; from YAML, overridden by dotted names.

The model's own fields stand in model_config.py and norm_config.py.

    file.yaml ──read──▶ mapping ──overrides──▶ mapping ──check──▶ RunConfig ──resolve──▶ RunConfig

``check`` reports every fault at once.  ``resolve`` alone fills in what follows
from other fields (vocabulary size, head dim, ...); after it nothing changes: the models are frozen.

This module imports no torch, so that a faulty config is refused in well under a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import sentencepiece
from pydantic import (
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from minillama.checkpoint_folders import CONFIG, TOKENIZER, resolve_checkpoint
from minillama.config.fields import (
    Beta,
    Name,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Seed,
)
from minillama.config.loading import (
    NotBool,
    Owned,
    Section,
    check,
    dump_yaml,
    json_copy,
    override,
    parse_overrides,
    read_yaml,
    refuse,
)
from minillama.config.model import ModelConfig
from minillama.errors import ConfigError, FieldError
from minillama.plugins import load_plugins

BYTE_VOCAB_SIZE = 259  # unk, bos, eos and the 256 bytes
MIN_BPE_VOCAB_SIZE = 270  # unk, bos, eos, the 256 bytes and a little to learn
DEFAULT_BPE_VOCAB_SIZE = 512

# --------------------------------------------------------------------------- tokenizer and data


class TokenizerConfig(Section):
    """How text becomes ids."""

    kind: Literal["bpe", "byte", "json", "none"] = Field(
        "bpe",
        description="bpe: sentencepiece, trained on the data; byte: one id per UTF-8 byte; json or "
        "none: what an imported model brings, a tokenizer.json or nothing",
    )
    vocab_size: Positive | None = Field(None, description="ids in all; bpe only, default 512")
    path: str | None = Field(None, description="a sentencepiece model to use instead of training")

    @model_validator(mode="after")
    def _check(self) -> TokenizerConfig:
        faults = []
        if self.kind == "byte":
            if self.vocab_size not in (None, BYTE_VOCAB_SIZE):
                rule = f"a byte tokenizer always has {BYTE_VOCAB_SIZE} ids; leave this out"
                faults.append(FieldError("vocab_size", self.vocab_size, rule))
            if self.path is not None:
                faults.append(FieldError("path", self.path, "a byte tokenizer has no file"))
        elif self.kind != "bpe":
            if self.vocab_size is None:
                rule = f"is required; a {self.kind} tokenizer comes from `minillama import` alone"
                faults.append(FieldError("vocab_size", None, rule))
        elif self.path is None and (self.vocab_size or DEFAULT_BPE_VOCAB_SIZE) < MIN_BPE_VOCAB_SIZE:
            rule = (
                f"must be at least {MIN_BPE_VOCAB_SIZE}: 256 bytes, 3 special ids and some pieces"
            )
            faults.append(FieldError("vocab_size", self.vocab_size, rule))
        refuse(faults)
        return self

    @property
    def has_file(self) -> bool:
        """Whether a checkpoint keeps a file of it."""
        return self.kind in ("bpe", "json")


class PydocsSource(Section):
    """English prose that ships with CPython: manual pages and docstrings; needs no network."""

    kind: Literal["pydocs"]


class FilesSource(Section):
    """The user's own files, or URLs of files."""

    kind: Literal["files"]
    files: Annotated[list[str], Field(min_length=1)]
    format: Literal["text", "json", "csv", "parquet"] = Field(
        "text", description="text: each file is one document; else each row is one"
    )
    text_field: str = Field("text", description="the column that holds the text (not for text)")

    @field_validator("files", mode="before")
    @classmethod
    def _one_is_a_list(cls, files: Any) -> Any:
        return [files] if isinstance(files, str) else files


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
    seq_len: Positive = Field(128, description="tokens in a training window")
    val_fraction: Annotated[float, NotBool, Field(gt=0, lt=1)] = Field(
        0.05, description="share of the text's bytes that is held out"
    )
    split_seed: Seed = Field(
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
        0, description="processes that prepare the data; 0: none but this one; same result"
    )


# ------------------------------------------------------------------------------------- training


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: PositiveFloat = Field(1e-3, description="the peak learning rate")
    min_lr_ratio: Annotated[float, NotBool, Field(ge=0, le=1)] = Field(
        0.1, description="the last step's learning rate over the peak"
    )
    warmup_steps: NonNegative = 0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="after the warm-up; wsd holds the peak, then falls over the last fifth",
    )
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = Field(
        0.1, description="decoupled, on matrices only: never on norms, gains or biases"
    )
    grad_clip: NonNegativeFloat = Field(1.0, description="largest gradient norm; 0: no clipping")
    z_loss: NonNegativeFloat = Field(0.0, description="weight of mean (log Z)² in the loss")


class TrainConfig(Section):
    """The length of the run, its machine and what it leaves behind."""

    steps: Positive = 1000
    batch_size: Positive = Field(16, description="windows in a step")
    micro_batch_size: Positive | None = Field(
        None, description="windows in a forward pass; gradients of a step add up; default: all"
    )
    seed: Seed = Field(0, description="of initial weights and of the order of batches")
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="bfloat16, float16: autocast; weights and optimizer stay float32. float16 "
        "scales its loss, and skips an update whose gradient overflows (see max_skips)",
    )
    compile: bool = Field(
        False,
        description="torch.compile the model; on a CPU slower than the C kernels, whose place it "
        "takes",
    )
    profile: NonNegative = Field(
        0, description="steps to trace, after the first three, into trace.json in the run folder"
    )
    recompute: bool = Field(
        False,
        description="activation checkpointing: keep each block's input alone and run it anew in "
        "the backward pass; less memory, about a third more time",
    )
    parallel: Literal["none", "ddp", "fsdp"] = Field(
        "none",
        description="how the processes that torchrun starts share the work: ddp: each has the "
        "model whole and a part of the batch; fsdp: each has a part of the model as well",
    )
    eval_every: NonNegative = Field(
        100, description="steps between validations; 0: at both ends only"
    )
    save_every: NonNegative = Field(
        0,
        description="steps between checkpoints; 0: only at the end and where a validation is best",
    )
    keep_last: Positive = Field(2, description="newest checkpoints to keep, besides the best")
    log_every: Positive = Field(1, description="steps between training lines in metrics.jsonl")
    probe_every: NonNegative = Field(0, description="steps between probe lines; 0: none")
    on_nonfinite: Literal["stop", "skip", "run_on"] = Field(
        "stop",
        description="at a loss or gradient that is not finite: stop before the update; skip it, "
        "the step counts and its batch is used up; or make it and run on to the end, the run's "
        "fate is certain from there on",
    )
    max_skips: NonNegative = Field(
        10, description="updates in a row that may be skipped; at one more the run stops"
    )
    sample_prompt: str | None = Field(None, description="text to continue at the end of the run")


class RunConfig(Section):
    """One training run."""

    name: Name = "run"
    out_dir: str | None = Field(None, description="the run folder; default: runs/NAME")
    plugins: list[str] = Field(
        default_factory=list, description="modules or .py files that register norms of your own"
    )
    init_from: str | None = Field(
        None,
        description="a checkpoint to begin from: its model, but for what is set here of model.norm "
        "and model.max_seq_len, and its tokenizer",
    )
    loggers: list[Literal["tensorboard"]] = Field(
        default_factory=list, description="besides metrics.jsonl, which is always written"
    )
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        faults = []
        inherits = self.init_from is not None and "max_seq_len" not in self.model.model_fields_set
        if self.data.seq_len > self.model.max_seq_len and not inherits:
            rule = f"is above model.max_seq_len = {self.model.max_seq_len}; lower it or raise that"
            faults.append(FieldError("data.seq_len", self.data.seq_len, rule, "model.max_seq_len"))
        if self.optim.warmup_steps > self.train.steps:
            rule = f"the warm-up is longer than the run, train.steps = {self.train.steps}"
            faults.append(
                FieldError("optim.warmup_steps", self.optim.warmup_steps, rule, "train.steps")
            )
        micro = self.train.micro_batch_size
        if micro is not None and self.train.batch_size % micro:
            rule = f"does not divide train.batch_size = {self.train.batch_size}"
            faults.append(FieldError("train.micro_batch_size", micro, rule, "train.batch_size"))
        refuse(faults)
        return self


# ------------------------------------------------------------------------------------ load, resolve

OWNED_BY_KIND = {
    "data.source": Owned(None, "pydocs"),
    "model.rope_scaling": Owned(None),
    "tokenizer": Owned(("vocab_size", "path"), "bpe"),
    "model.norm": Owned(("options",), "rmsnorm"),
}
"""What goes when an override changes a section's ``kind``."""


def load_plugins_of(raw: Mapping[str, Any]) -> None:
    """Load the plugins of a config that is not checked yet, so that its norms can be.

    Raises:
        ConfigError: one is missing or raises.
    """
    plugins = raw.get("plugins")
    if isinstance(plugins, list) and all(isinstance(plugin, str) for plugin in plugins):
        load_plugins(plugins)


def parse_run(raw: Mapping[str, Any], where: str) -> RunConfig:
    """Check a run config given as a mapping and resolve it.

    Raises:
        ConfigError: with every fault; ``where`` names the config in its message.
    """
    load_plugins_of(raw)
    return resolve(check(RunConfig, raw, where), where)


DERIVED = (
    "out_dir",
    "tokenizer.vocab_size",
    "model.vocab_size",
    "model.n_kv_heads",
    "model.head_dim",
    "model.ffn_dim",
    "train.micro_batch_size",
)
"""What ``resolve`` fills in where the user leaves it out, each before what follows from it."""


def without_derived(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a resolved config less what would be filled in again just so; any other as it is.

    So a run's own config.yaml can be overridden like the file it came from: ``model.dim=128`` alone
    makes a model with heads and an MLP to match, and does not keep those of the old width.
    """
    rest: dict[str, Any] = json_copy(raw)
    if any(_value(rest, path) is None for path in DERIVED):
        return rest  # a user wrote it: every entry is meant
    for path in DERIVED:
        less = json_copy(rest)
        *sections, leaf = path.split(".")
        del (less[sections[0]] if sections else less)[leaf]
        try:
            if _value(parse_run(less, where).model_dump(mode="json"), path) == _value(rest, path):
                rest = less
        except ConfigError:
            continue  # it is needed, or the fault is another's, who will be told
    return rest


def _value(raw: Mapping[str, Any], path: str) -> Any:
    value: Any = raw
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run config, apply dotted ``overrides`` such as ``"optim.lr=1e-3"``, check, resolve.

    ``path`` is a YAML file, or a run folder, whose ``config.yaml`` is read.  There, what was filled
    in is filled in anew where an override changes what it follows from.

    Raises:
        ConfigError: the file, an override or any entry is wrong; all entries at once.
    """
    raw, changes = read_yaml(path), parse_overrides(overrides)
    if changes:
        raw = without_derived(raw, str(path))
    return parse_run(override(raw, changes, OWNED_BY_KIND), str(path))


def resolve(config: RunConfig, where: str = "config") -> RunConfig:
    """Fill in all that follows from other fields; resolving twice changes nothing.

    Raises:
        ConfigError: fields that only now can be compared do not fit.
    """
    load_plugins(config.plugins)
    if config.init_from is not None:
        config = _inherit(config, config.init_from, where)
    tokenizer = config.tokenizer
    if tokenizer.kind == "byte":
        tokenizer = tokenizer.model_copy(update={"vocab_size": BYTE_VOCAB_SIZE})
    elif tokenizer.kind != "bpe":
        pass  # an import has filled it in
    elif tokenizer.path is not None and (
        tokenizer.vocab_size is None or Path(tokenizer.path).exists()
    ):  # a checkpoint, whose config is resolved, brings its own copy of a file that is gone
        size = _sentencepiece_size(tokenizer.path, where)
        if tokenizer.vocab_size not in (None, size):
            rule = f"the model at tokenizer.path has {size} ids; leave this out"
            fault = FieldError("tokenizer.vocab_size", tokenizer.vocab_size, rule)
            raise ConfigError.of(where, [fault])
        path = str(Path(tokenizer.path).absolute())
        tokenizer = tokenizer.model_copy(update={"vocab_size": size, "path": path})
    elif tokenizer.vocab_size is None:
        tokenizer = tokenizer.model_copy(update={"vocab_size": DEFAULT_BPE_VOCAB_SIZE})
    assert tokenizer.vocab_size is not None
    if config.model.vocab_size is not None and config.model.vocab_size < tokenizer.vocab_size:
        rule = f"is smaller than the tokenizer's {tokenizer.vocab_size} ids; leave it out"
        fault = FieldError(
            "model.vocab_size", config.model.vocab_size, rule, "tokenizer.vocab_size"
        )
        raise ConfigError.of(where, [fault])
    train = config.train
    return config.model_copy(
        update={
            "out_dir": config.out_dir or f"runs/{config.name}",
            "plugins": [
                str(Path(p).absolute()) if p.endswith(".py") else p for p in config.plugins
            ],
            "model": config.model.resolve(tokenizer.vocab_size),
            "tokenizer": tokenizer,
            "train": train.model_copy(
                update={"micro_batch_size": train.micro_batch_size or train.batch_size}
            ),
        }
    )


def _inherit(config: RunConfig, init_from: str, where: str) -> RunConfig:
    """Take model and tokenizer from the checkpoint ``init_from``."""
    if config.model.vocab_size is not None and not Path(init_from).exists():
        return config  # resolved before; a run that is resumed needs its first weights no more
    try:
        folder = resolve_checkpoint(init_from).absolute()
        raw = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"{folder / CONFIG} holds no config")
        load_plugins_of(raw)
        saved = check(RunConfig, raw, str(folder / CONFIG))
    except (OSError, ValueError) as error:  # a ConfigError is a ValueError
        raise ConfigError.of(where, [FieldError("init_from", init_from, str(error))]) from None
    model, norm = config.model, config.model.norm
    inherited: dict[str, Any] = {
        "tokenizer.kind": saved.tokenizer.kind,
        "tokenizer.vocab_size": saved.tokenizer.vocab_size,
        "tokenizer.path": str(folder / TOKENIZER) if saved.tokenizer.has_file else None,
    }
    inherited |= {
        f"model.{name}": value for name, value in saved.model if name not in ("norm", "max_seq_len")
    }
    faults = [
        FieldError(
            path, given, f"the checkpoint of init_from has {inherited[path]!r}; leave this out"
        )
        for path, given in _explicit(config)
        if path in inherited and given not in (None, inherited[path])
    ]
    if faults:
        raise ConfigError.of(where, faults)
    chosen = {name: value for name, value in norm if name in norm.model_fields_set}
    kept = saved.model.norm.model_dump()
    if chosen.get("kind", kept["kind"]) != kept["kind"]:
        del kept["options"]
    whole = config.model_dump(exclude={"tokenizer", "model"}) | {
        "init_from": str(Path(init_from).absolute()),
        "tokenizer": {
            "kind": inherited["tokenizer.kind"],
            "vocab_size": inherited["tokenizer.vocab_size"],
            "path": inherited["tokenizer.path"],
        },
        "model": saved.model.model_dump(exclude={"norm", "max_seq_len"})
        | {
            "max_seq_len": model.max_seq_len
            if "max_seq_len" in model.model_fields_set
            else saved.model.max_seq_len,
            "norm": kept | chosen,
        },
    }
    return check(RunConfig, whole, where)


def _explicit(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of what was set in the sections a checkpoint brings."""
    for section in ("model", "tokenizer"):
        part = getattr(config, section)
        for name in part.model_fields_set:
            yield f"{section}.{name}", getattr(part, name)


def _sentencepiece_size(path: str, where: str) -> int:
    try:
        return int(sentencepiece.SentencePieceProcessor(model_file=path).vocab_size())
    except (OSError, RuntimeError):
        rule = "is not a sentencepiece model file" if Path(path).is_file() else "no such file"
        raise ConfigError.of(where, [FieldError("tokenizer.path", path, rule)]) from None


def to_yaml(config: Section) -> str:
    """Write a config as YAML that :func:`load_config` reads back equal."""
    return dump_yaml(config.model_dump(mode="json"))


def json_schema() -> str:
    """Return the JSON schema of a run config, for editors."""
    return json.dumps(RunConfig.model_json_schema(), indent=2)
