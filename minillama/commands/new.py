"""`minillama new`: a config for a person's own text.

files ─sample─▶ size ─▶ shape, vocabulary, steps ─▶ tokenizer and a few steps, measured ─▶ config
"""

from __future__ import annotations

import glob
import json
import math
import re
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from minillama import launch
from minillama.bench.shapes import training_step
from minillama.config import RunConfig, load_config
from minillama.config.run import FilesSource, format_by_ending
from minillama.data.files import is_url
from minillama.data.sample import Sample, sample_files
from minillama.data.tokenizer import train_tokenizer
from minillama.errors import ConfigError, DataError, TokenizerError
from minillama.files import atomic_file, explain_write_errors
from minillama.formatting import (
    format_bytes,
    format_duration,
    format_si,
    pluralize,
    text_table,
)
from minillama.model.transformer import Transformer
from minillama.plan.compute import count_flops, measure_cpu
from minillama.plan.limit import memory_limit
from minillama.plan.memory import PROCESS, estimate_memory
from minillama.plan.parameters import count_parameters
from minillama.plan.suggest import Vocabulary, shorten, suggest
from minillama.training.device import pick_device

_PLAIN_TEXT = {".txt", ".text", ".md", ".rst", ".tex", ".org"}
_MEMORY_SHARE = 0.5  # of this machine's, that a suggested run takes at most
_FIRST_GUESS = 0.2  # of the speed of large products, that training reaches on a CPU
_TIMED_STEPS = 5
_TOKENIZER_BYTES = 2 << 20  # of the sample, for measuring bytes per token
_LARGEST_VOCABULARY = 1 << 15
_MANY_PASSES = 20


def new_config(names: Sequence[str], out: str | None, minutes: float) -> str:
    """Write a config for the text in ``names``, and return what was found and what to run.

    Args:
        names: files, folders or patterns.
        out: the config to write; None: named after the text, in the current folder.
        minutes: how long training may take on this machine, about.

    Raises:
        ConfigError: the config exists already, or a name is a URL.
        DataError: there is no text, or too little.
        RunFolderError: the config cannot be written.
    """
    if not minutes > 0:
        raise ConfigError(f"--minutes = {minutes:g}: must be above 0")
    name = _run_name(Path(names[0]))
    path = Path(out or f"{name}.yaml")
    _refuse_existing(path)
    source, notes = find_text(names)
    torch.set_num_threads(min(torch.get_num_threads(), launch.usable_cpus()))
    sample = sample_files(source)
    suggestion = _suggest(sample, 60 * minutes, name)
    with explain_write_errors(path):
        _refuse_existing(path)
        with atomic_file(path) as temporary:
            temporary.write_text(as_yaml(suggestion, sample, names, path), encoding="utf-8")
            load_config(temporary)
    return "\n".join(
        (
            *_describe(suggestion, sample, names),
            *(f"note: {note}" for note in notes),
            f"{path} is written; train the model:",
            f"    minillama train {shlex.quote(str(path))}",
        )
    )


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another name with --out, or remove it")


def _run_name(path: Path) -> str:
    stem = path.name.partition(".")[0] or path.resolve().name
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", stem).strip("-._=+") or "mytext"


# -------------------------------------------------------------------------------------- the text


def find_text(names: Sequence[str]) -> tuple[FilesSource, list[str]]:
    """Return the source for files, patterns and folders, and what a reader should know about it.

    Of a folder the files of one ending are taken, that which holds most.

    Raises:
        ConfigError: a name is a URL, or the files are of several formats.
        DataError: a folder contains no text.
    """
    files, notes = [], []
    for name in names:
        if is_url(name):
            raise ConfigError(f"{name}: download it first; `minillama new` looks at local files")
        folder = Path(name).expanduser()
        if not folder.is_dir():
            files.append(name)
            continue
        sizes = _sizes_by_ending(folder)
        if not sizes:
            raise DataError(f"{name} contains no text files, such as .txt, .md or .jsonl")
        (ending, _), *others = sizes.most_common()
        files.append(f"{glob.escape(str(folder))}/**/*{ending}")
        if others:
            skipped = ", ".join(each for each, _ in others)
            notes.append(f"of {name} the {ending} files are used, and not its {skipped} files")
    formats = {format_by_ending(file) for file in files}
    if len(formats) > 1:
        raise ConfigError(f"the files are of several formats, {', '.join(formats)}; give one kind")
    return FilesSource(kind="files", files=files), notes


def _sizes_by_ending(folder: Path) -> Counter[str]:
    """Return how many bytes the files below ``folder`` have that look like text, by ending."""
    sizes: Counter[str] = Counter()
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        for n in (2, 1):  # .jsonl.gz, .txt
            ending = "".join(path.suffixes[-n:])
            inner = Path(ending).stem if n == 2 else ending
            is_text = format_by_ending(f"x{ending}") != "text" or inner in _PLAIN_TEXT
            if ending and is_text and not hidden and path.is_file():
                sizes[ending] += path.stat().st_size
                break
    return sizes


# ------------------------------------------------------------------------------- the suggestion


class Suggestion(NamedTuple):
    """A config, and what was measured for it.

    Attributes:
        config: of the run.
        bytes_per_token: of its tokenizer on the sample.
        tokens_per_s: of training on this machine.
        tokenized_bytes_per_s: of preparing the text, in one process.
    """

    config: RunConfig
    bytes_per_token: float
    tokens_per_s: float
    tokenized_bytes_per_s: float

    @property
    def n_tokens(self) -> int:
        """How many tokens the run trains on."""
        train = self.config.train
        return train.steps * train.batch_size * self.config.data.seq_len

    @property
    def seconds(self) -> float:
        """How long training takes here."""
        return self.n_tokens / self.tokens_per_s


def _suggest(sample: Sample, seconds: float, name: str) -> Suggestion:
    device = pick_device("auto")
    limit = memory_limit(device)
    fitting = partial(
        suggest,
        sample.n_bytes,
        sample.source.model_dump(exclude_defaults=True),
        seconds=seconds,
        memory=_MEMORY_SHARE * limit if limit else math.inf,
        name=name,
    )
    guess = fitting(_FIRST_GUESS * measure_cpu("float32", 0).float32)
    vocabulary, tokenized = measure_vocabulary(guess, sample.texts)
    config = fitting(_flops_per_s(guess, measure_training(guess, device)), vocabulary=vocabulary)
    tokens_per_s = measure_training(config, device)
    config = shorten(config, _flops_per_s(config, tokens_per_s), seconds)
    return Suggestion(config, vocabulary.bytes_per_token, tokens_per_s, tokenized)


def _flops_per_s(config: RunConfig, tokens_per_s: float) -> float:
    compute = count_flops(config)
    return tokens_per_s * compute.total / compute.tokens


def measure_vocabulary(config: RunConfig, texts: Sequence[str]) -> tuple[Vocabulary, float]:
    """Return the config's vocabulary or the nearest that fits the texts, and bytes/s of encoding.

    Texts of many characters, such as Chinese, need a larger one; bytes always fit.
    """
    size = config.tokenizer.vocab_size
    if config.tokenizer.kind == "byte" or size is None:
        return Vocabulary(None, 1.0), math.inf
    kept = list(_first_bytes(texts, _TOKENIZER_BYTES))
    n_bytes = sum(len(text.encode()) for text in kept)
    while size <= _LARGEST_VOCABULARY:
        try:
            tokenizer = train_tokenizer(kept, size)
        except TokenizerError:
            size *= 2
            continue
        began = time.perf_counter()
        n_tokens = sum(len(tokenizer.encode(text)) for text in kept)
        return Vocabulary(size, n_bytes / n_tokens), n_bytes / (time.perf_counter() - began)
    return Vocabulary(None, 1.0), math.inf


def _first_bytes(texts: Sequence[str], most: int) -> Iterator[str]:
    for text in texts:
        yield text[:most]
        most -= len(text.encode())
        if most <= 0:
            return


def measure_training(config: RunConfig, device: torch.device) -> float:
    """Return the training tokens per second of a few steps of ``config``'s model on ``device``."""
    batch, seq_len = config.train.batch_size, config.data.seq_len
    model = Transformer(config.model).to(device)
    tokens = torch.randint(config.model.known_vocab_size, (batch, seq_len + 1), device=device)
    step = training_step(model, tokens)
    step()  # the first one compiles or loads kernels
    times = []
    for _ in range(_TIMED_STEPS):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return batch * seq_len / statistics.median(times)


# ------------------------------------------------------------------------------------- the result


def as_yaml(suggestion: Suggestion, sample: Sample, names: Sequence[str], path: Path) -> str:
    """Return the config, to be written to ``path``, as a commented YAML file."""
    config, source = suggestion.config, sample.source
    name, model, train = config.name, config.model, config.train
    heads = "grouped-query attention: query heads share key/value heads"
    passes = f"{suggestion.n_tokens * suggestion.bytes_per_token / sample.n_bytes:.2g}"
    tokenizer = ["  kind: byte                   # each byte of the text is a token"]
    if config.tokenizer.kind == "bpe":
        size = f"  vocab_size: {config.tokenizer.vocab_size}"
        per_token = f"{suggestion.bytes_per_token:.2f} bytes of this text per token"
        tokenizer = ["  kind: bpe", _commented(size, per_token)]
    table = [] if source.format == "text" else [f"    text_field: {_quoted(source.text_field)}"]
    return "\n".join(
        (
            f"# A model of {_one_line(names)}: {_size(sample)} of text.",
            "#",
            f"# Takes:  about {format_duration(suggestion.seconds)} on the machine that it was "
            "suggested for.",
            f"# Run:    minillama train {path}",
            f"# Swap:   minillama train {path} model.norm.kind=layernorm name={name}-layernorm",
            f"# Every field with its default: minillama config show {path}",
            "",
            _commented(f"name: {name}", f"its folder is runs/{name}"),
            "",
            _commented("model:", f"{format_si(count_parameters(model).total)} parameters"),
            f"  dim: {model.dim}",
            f"  n_layers: {model.n_layers}",
            f"  n_heads: {model.n_heads}",
            _commented(f"  n_kv_heads: {model.n_kv_heads}", heads),
            f"  max_seq_len: {model.max_seq_len}",
            "  norm:",
            _commented("    kind: rmsnorm", "`minillama norms` lists the others"),
            "    placement: pre",
            "",
            "tokenizer:",
            *tokenizer,
            "",
            "data:",
            "  source:",
            "    kind: files",
            f"    files: {_quoted(source.files)}",
            *table,
            _commented(f"  seq_len: {config.data.seq_len}", "tokens in a training window"),
            _commented(f"  val_fraction: {config.data.val_fraction}", "held out, for the loss"),
            "",
            "optim:",
            _commented(f"  lr: {config.optim.lr}", "lower it if training diverges"),
            f"  warmup_steps: {config.optim.warmup_steps}",
            "  schedule: cosine",
            "  weight_decay: 0.1",
            "  grad_clip: 1.0",
            "",
            "train:",
            _commented(f"  steps: {train.steps}", f"{passes} passes over the text"),
            _commented(f"  batch_size: {train.batch_size}", "windows in a step"),
            "  seed: 0",
            _commented(f"  eval_every: {train.eval_every}", "steps between validations"),
            _commented(
                f"  sample_prompt: {_quoted(_prompt(sample.texts))}", "continued at the end"
            ),
            "",
        )
    )


def _commented(line: str, comment: str) -> str:
    return f"{line:<30} # {comment}"


def _quoted(value: object) -> str:
    """Return a string or a list of strings as YAML, of which JSON is a part."""
    return json.dumps(value, ensure_ascii=False)


def _one_line(names: Sequence[str]) -> str:
    return " ".join(", ".join(names).split())


def _prompt(texts: Sequence[str]) -> str:
    """Return the first words of the text."""
    line = next(line for text in texts for line in text.splitlines() if line.strip())
    return " ".join(line.split()[:3])[:40]


def _size(sample: Sample) -> str:
    return f"{'' if sample.is_whole else 'about '}{format_bytes(sample.n_bytes)}"


def _describe(suggestion: Suggestion, sample: Sample, names: Sequence[str]) -> list[str]:
    config, per_token = suggestion.config, suggestion.bytes_per_token
    model, train = config.model, config.train
    n_params = count_parameters(model).total
    passes = suggestion.n_tokens * per_token / sample.n_bytes
    pieces = f"{model.known_vocab_size:,} {'bytes' if per_token == 1 else 'pieces'}"
    memory = estimate_memory(config, on_cpu=True).peak_on_cpu + PROCESS
    tokenizing = format_duration(sample.n_bytes / suggestion.tokenized_bytes_per_s)
    rows = {
        "text": f"{_one_line(names)}: {_size(sample)}"
        f"{'' if sample.is_whole else ', by a sample of it'}",
        "vocabulary": f"{pieces}, {per_token:.2f} bytes per token: "
        f"{format_si(sample.n_bytes / per_token)} tokens in all",
        "model": f"{format_si(n_params)} parameters: {pluralize(model.n_layers, 'layer')} of width "
        f"{model.dim}",
        "training": f"{train.steps:,} steps of {train.batch_size} × {config.data.seq_len} tokens: "
        f"{passes:.2g} passes over the text, {suggestion.n_tokens / n_params:.2g} tokens per "
        "parameter",
        "time": f"about {format_duration(suggestion.seconds)} here "
        f"({format_si(suggestion.tokens_per_s)} tokens/s, measured); before that {tokenizing} of "
        "tokenizing",
        "memory": f"about {format_bytes(memory)}",
    }
    lines = [text_table(list(rows.items()))]
    if passes > _MANY_PASSES:
        lines.append("note: the text is short, and the model may learn it by heart")
    if passes < 1:
        lines.append("note: there is text for a longer training: --minutes")
    return lines
