"""The commands that need torch: train, eval, generate and others; each returns what to print."""

from __future__ import annotations

import inspect
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import indent

import numpy as np
from numpy.typing import NDArray

from minillama import launch
from minillama.config import RunConfig
from minillama.config.norms import NORM_KINDS
from minillama.config.placement import PLACEMENTS
from minillama.config.run import FilesSource
from minillama.data.prepare import damaged_files, prepare
from minillama.data.shards import Tokens
from minillama.data.sources import read_documents
from minillama.data.tokenizer_base import Tokenizer
from minillama.errors import ConfigError, DataError, DivergedError, RunFolderError
from minillama.evaluation import evaluate
from minillama.formatting import finite_json, text_table
from minillama.model.convert import layernorm_to_rmsnorm
from minillama.model.norms import NORM_BUILDERS
from minillama.model.transformer import Transformer
from minillama.plugins import load_plugins
from minillama.registry import unknown_name
from minillama.sampling import SamplingOptions, stream
from minillama.training.checkpoint import load_checkpoint, save_checkpoint
from minillama.training.stability import remedies
from minillama.training.trainer import train

_log = logging.getLogger("minillama")


def train_run(config: RunConfig, resume: bool | str, overwrite: bool, *, progress: bool) -> str:
    """Train, and return a summary: the sample, the validation loss, the run folder."""
    summary = train(config, resume=resume, overwrite=overwrite, progress=progress)
    if summary["fate"] == "diverged":
        raise launch.on_first_rank(
            DivergedError(
                f"training diverged: the final validation loss, {summary['val_loss']:.4f}, is no "
                f"better than at init, {summary['init_val_loss']:.4f}; {remedies(config)}. "
                f"The run is in {config.out_dir}"
            )
        )
    if launch.rank():
        return ""  # rank 0 reports
    lines = []
    if summary["sample"]:
        lines += ["", summary["sample"], ""]
    lines += [
        f"validation loss {summary['val_loss']:.4f} nats per token, "
        f"perplexity {summary['val_perplexity']:.2f}, "
        f"{summary['val_bits_per_byte']:.3f} bits per byte; fate: {summary['fate']}"
        + (" (still falling: train longer)" if summary["fate"] == "undertrained" else ""),
        f"run folder: {config.out_dir}; generate text: minillama generate {config.out_dir}",
    ]
    return "\n".join(lines)


def evaluate_text(
    checkpoint: str,
    text: str | None,
    seq_len: int | None,
    batch_size: int,
    *,
    as_json: bool,
) -> str:
    """Measure a checkpoint on a text file, or on the validation split of its training data."""
    model, tokenizer, config = load_checkpoint(checkpoint)
    if text is None:
        prepared = prepare(config)
        tokens: Tokens = prepared.val
        n_bytes, what = prepared.meta.n_val_bytes, "the validation split"
    else:
        documents = _documents_of(text, config)
        tokens = _encoded(documents, tokenizer)
        n_bytes = sum(len(document.encode()) for document in documents)
        what = text
    result = evaluate(
        model,
        tokens,
        n_bytes=n_bytes,
        seq_len=config.data.seq_len if seq_len is None else seq_len,
        batch_size=batch_size,
    )
    if as_json:
        return finite_json({**result, "n_bytes": n_bytes})
    return (
        f"{what}: loss {result['loss']:.4f} nats per token, perplexity {result['perplexity']:.2f}, "
        f"{result['bits_per_byte']:.4f} bits per byte "
        f"({result['n_tokens']} tokens, {n_bytes} bytes)"
    )


def _documents_of(text: str, config: RunConfig) -> list[str]:
    """Return the documents of the file or files that ``--text`` names, each as a whole.

    Raises:
        DataError: they cannot be read, or hold no text.
    """
    column = getattr(config.data.source, "text_field", "text")
    try:
        return list(read_documents(FilesSource(kind="files", files=[text], text_field=column)))
    except DataError as error:
        if error.field:
            raise type(error)(error.message, "--text") from error
        raise


def _encoded(documents: Iterable[str], tokenizer: Tokenizer) -> NDArray[np.uint32]:
    """Return the ids of all documents, each between bos and eos."""
    parts = [
        np.array(ids, dtype=np.uint32)
        for document in documents
        for ids in ([tokenizer.bos_id], *tokenizer.encode_parts(document), [tokenizer.eos_id])
    ]
    return np.concatenate(parts)


class Continuation:
    """The continuation of a prompt, piece by piece; ``text`` is the prompt with all so far.

    Args:
        model: the model to sample from.
        tokenizer: the model's.
        prompt: the text to continue.
        max_new_tokens: how many tokens to draw at most.
        options: of the sampling.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        prompt: str,
        max_new_tokens: int,
        options: SamplingOptions,
    ) -> None:
        self._tokenizer, self._ids = tokenizer, tokenizer.encode(prompt, bos=True)
        self.n_new = 0
        self.text = self._decode()
        stop_ids = {tokenizer.eos_id}
        self._stream = stream(model, list(self._ids), max_new_tokens, stop_ids=stop_ids, **options)

    def __iter__(self) -> Iterator[str]:
        for token in self._stream:
            self._ids.append(token)
            self.n_new += 1
            text = self._decode()
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is incomplete
                yield self._advance(text)
        yield self._advance(self._decode())

    def _advance(self, text: str) -> str:
        piece, self.text = text[len(self.text) :], text
        return piece

    def _decode(self) -> str:
        # An imported model may have a larger vocabulary than its tokenizer.
        return self._tokenizer.decode([i for i in self._ids if i < self._tokenizer.vocab_size])


def generate_text(
    checkpoint: str, prompt: str, max_new_tokens: int, options: SamplingOptions
) -> Iterator[str]:
    """Yield the prompt and its continuation, piece by piece, and log the speed."""
    model, tokenizer, _ = load_checkpoint(checkpoint)
    continuation = Continuation(model, tokenizer, prompt, max_new_tokens, options)
    yield continuation.text
    started = time.perf_counter()
    yield from continuation
    yield "\n"
    seconds, n_new = time.perf_counter() - started, continuation.n_new
    print(f"{n_new} tokens in {seconds:.2f} s, {n_new / seconds:.0f} tokens/s", file=sys.stderr)


def read_prompt(prompt: str | None, file: str | None) -> str:
    """Return the prompt: as given, or from ``file``; ``-`` for either is standard input.

    The last line end of a file does not count.

    Raises:
        ConfigError: both are given, or the file cannot be read as UTF-8.
    """
    if prompt is not None and file is not None:
        raise ConfigError("--prompt and --prompt-file exclude each other; give one of them")
    place = file if file is not None else "-" if prompt == "-" else None
    if place is None:
        return prompt or ""
    name = "standard input" if place == "-" else place
    try:
        raw = sys.stdin.buffer.read() if place == "-" else Path(place).expanduser().read_bytes()
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"the prompt cannot be read from {name}: {error.strerror}") from None
    return text.replace("\r\n", "\n").removesuffix("\n")


def convert_norm(checkpoint: str, out: str) -> str:
    """Write a pre-LayerNorm checkpoint as an equivalent pre-RMSNorm one."""
    model, tokenizer, config = load_checkpoint(checkpoint)
    if Path(out).exists():
        raise ConfigError(f"{out} already exists; choose another folder")
    twin = layernorm_to_rmsnorm(model)
    save_checkpoint(out, twin, tokenizer, config.model_copy(update={"model": twin.config}))
    return f"{out}: the same model with RMSNorm; generate text: minillama generate {out}"


def train_tokenizer_file(config: RunConfig, out: str) -> str:
    """Train the config's sentencepiece tokenizer on the training part of its data."""
    if config.tokenizer.kind != "bpe":
        raise ConfigError(
            f"tokenizer.kind = {config.tokenizer.kind!r} needs no training; set tokenizer.kind=bpe"
        )
    tokenizer = prepare(config).tokenizer
    try:
        tokenizer.save(Path(out))
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written: {error.strerror}") from None
    return f"{out}: {tokenizer.vocab_size} ids; use it: tokenizer.path={out}"


def prepare_data(config: RunConfig, *, check: bool = False) -> str:
    """Tokenize the config's data into the cache, and describe the result.

    With ``check`` all files are read, and damaged ones are made again.
    """
    prepared = prepare(config)
    if check and (damaged := damaged_files(prepared)):
        for path in damaged:
            _log.warning("%s is damaged and is made again", path)
            path.unlink()
        prepared = prepare(config)
    meta = prepared.meta
    counts = meta.model_dump(exclude={"train", "val"})
    counts |= {"n_train_shards": len(meta.train), "n_val_shards": len(meta.val)}
    lines = [f"{name}: {value}" for name, value in counts.items()]
    return "\n".join([f"folder: {prepared.folder}", *lines])


def explain_norms(name: str | None, plugins: list[str]) -> str:
    """List every norm kind and placement with formula and source, or explain the one named."""
    load_plugins(plugins)
    if name is None:
        kinds = [(k, NORM_KINDS.get(k).formula, NORM_KINDS.get(k).source) for k in NORM_KINDS]
        rows = [
            (row, PLACEMENTS.get(row).formula, PLACEMENTS.get(row).source) for row in PLACEMENTS
        ]
        return "\n\n".join(
            (
                "model.norm.kind\n" + indent(text_table(kinds), "  "),
                "model.norm.placement (N: the norm, f: attention or MLP)\n"
                + indent(text_table(rows), "  "),
                "minillama norms NAME explains one",
            )
        )
    if name in NORM_KINDS:
        spec, build = NORM_KINDS.get(name), NORM_BUILDERS.get(name)
        parts = [f"{name}: {spec.formula}    ({spec.source})"]
        parts += [inspect.cleandoc(build.__doc__)] if build.__doc__ else []
        fields = spec.options.model_fields
        options = [
            f"  {field}: default {info.get_default()!r}"
            + (f"; {info.description}" if info.description else "")
            for field, info in fields.items()
        ]
        parts += ["model.norm.options\n" + "\n".join(options)] if options else []
        return "\n\n".join(parts)
    if name in PLACEMENTS:
        row = PLACEMENTS.get(name)
        final = "a norm before the head" if row.final_norm else "no norm before the head"
        return f"{name}: x ← {row.formula}    ({row.source})\n{final}"
    raise ConfigError(unknown_name("norm kind or placement", name, [*NORM_KINDS, *PLACEMENTS]))
