"""Text to token files, once.

    source ──▶ documents, split ──▶ train ........................ | val ....
                                      ├──▶ tokenizer (trained on train only)
                                      ▼
    [bos] tokens [eos] of each ──▶ shards, tokenizer.model and then meta.json in the cache

A small source is one shard; a large one is many, which several processes can write.  Preparation
that was stopped resumes after the shards that are finished.  Nothing here knows of batches, so that
the split is the same for all.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from minillama.config import RunConfig
from minillama.config.run import TokenizerConfig, token_fields
from minillama.data.files import cache_entry
from minillama.data.shard_writer import Shard, ShardWriter
from minillama.data.shards import ShardFile, TokenShards, are_complete
from minillama.data.sources import no_text, open_source, source_hash
from minillama.data.tokenizer import ByteTokenizer, load_tokenizer, train_tokenizer
from minillama.data.tokenizer_base import Tokenizer
from minillama.errors import DataError, TokenizerError
from minillama.files import atomic_file, cache_folder, sha256_of_file, write_atomic

_FORMAT = 2  # of the token files and of how they are made; a new one makes old caches unused
_SHARD_TOKENS = 100_000_000  # by default
_COUNTED_AT_ONCE = 1 << 20  # tokens
_TOKENIZER_FILE = "tokenizer.model"

_LOGGER = logging.getLogger("minillama")


class Meta(BaseModel):
    """The record of prepared data, meta.json.

    Attributes:
        source_hash: SHA-256 of the source's content, see :func:`source_hash`.
        tokenizer_sha256: SHA-256 of the tokenizer.
        data_sha256: SHA-256 of the SHA-256 of each file, those of train before those of val.
        dtype: of the files, little-endian.
        n_train_tokens, n_val_tokens: bos and eos included.
        n_train_bytes, n_val_bytes: UTF-8 bytes of the text itself.
        n_documents: in both.
        unigram_entropy: nats per token of the training tokens: the loss of a model that knows
            nothing but how frequent each token is.
        train, val: the files of each, in the order in which they are read; none is empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source_hash: str
    tokenizer_sha256: str
    data_sha256: str
    dtype: Literal["uint16", "uint32"]
    n_train_tokens: int
    n_val_tokens: int
    n_train_bytes: int
    n_val_bytes: int
    n_documents: int
    unigram_entropy: float
    train: tuple[ShardFile, ...]
    val: tuple[ShardFile, ...]


@dataclass(frozen=True)
class Prepared:
    """Token files, mapped into memory as they are read, and the tokenizer that made them."""

    tokenizer: Tokenizer
    train: TokenShards
    val: TokenShards
    meta: Meta
    folder: Path

    @property
    def sha256(self) -> str:
        """The identity of the data: a hash of all tokens, wherever their source is."""
        return self.meta.data_sha256


def prepare(config: RunConfig) -> Prepared:
    """Return the tokens of ``config``, from the cache if they are there and complete.

    Several processes may call this at once; one prepares and the others wait.

    Raises:
        DataError: the text is missing, cannot be read, or is shorter than a window.
        SourceUnreachableError: the text is on the network, which cannot be reached.
        TokenizerError: the vocabulary and the text do not fit.
        MinillamaError: a process that prepared a part of it was killed.
    """
    source = source_hash(config.data.source)
    folder = cache_folder() / "tokens" / _key(config, source)
    if not _is_complete(folder):
        with cache_entry(folder):
            if not _is_complete(folder):
                folder.mkdir(exist_ok=True)
                try:
                    _build(config, source, folder)
                except BaseException:
                    with suppress(OSError):
                        folder.rmdir()  # if no shard is finished
                    raise
    meta = _read_meta(folder)
    _refuse_short_text(config.data.seq_len, meta.n_train_tokens, meta.n_val_tokens)
    _LOGGER.info(
        "data: source sha256 %s, %d training and %d validation tokens",
        meta.source_hash,
        meta.n_train_tokens,
        meta.n_val_tokens,
    )
    return Prepared(
        tokenizer=_load_tokenizer(config.tokenizer, folder),
        train=TokenShards(folder, meta.train, meta.dtype),
        val=TokenShards(folder, meta.val, meta.dtype),
        meta=meta,
        folder=folder,
    )


def damaged_files(prepared: Prepared) -> list[Path]:
    """Return the token files whose content is not what was written; reads all of them."""
    return [*prepared.train.damaged(), *prepared.val.damaged()]


def _key(config: RunConfig, source: str) -> str:
    """Return the name of the folder of prepared data: a hash of what decides its content."""
    tokenizer, data = config.tokenizer, config.data
    decisive = {
        "format": _FORMAT,
        "source": source,
        "streaming": getattr(data.source, "streaming", None),  # decides the parts, so the blocks
        "data": token_fields(config),
        "tokenizer": [tokenizer.kind, tokenizer.vocab_size],
    }
    if tokenizer.path is not None:
        decisive["tokenizer"] = load_tokenizer(tokenizer, None).sha256
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


def _load_tokenizer(config: TokenizerConfig, folder: Path) -> Tokenizer:
    return load_tokenizer(config, folder / _TOKENIZER_FILE if config.has_file else None)


def _read_meta(folder: Path) -> Meta:
    return Meta.model_validate_json((folder / "meta.json").read_bytes())


def _is_complete(folder: Path) -> bool:
    """Return whether ``folder`` has all files that its meta.json names, each of its size."""
    try:
        meta = _read_meta(folder)
        return are_complete(folder, (*meta.train, *meta.val), meta.dtype) and (
            meta.tokenizer_sha256 == ByteTokenizer.sha256
            or meta.tokenizer_sha256 == sha256_of_file(folder / _TOKENIZER_FILE)
        )
    except (OSError, ValidationError):
        return False


# --------------------------------------------------------------------------------------- building


def _build(config: RunConfig, source: str, folder: Path) -> None:
    """Write what is missing of the shards; those that are there are complete."""
    data = config.data
    (folder / "meta.json").unlink(missing_ok=True)
    writer = ShardWriter(
        stream=open_source(data.source),
        tokenizer=ByteTokenizer(),
        folder=folder,
        shard_tokens=data.shard_tokens or _SHARD_TOKENS,
        val_fraction=data.val_fraction,
        split_seed=data.split_seed,
    )
    writer = replace(writer, tokenizer=_find_tokenizer(config, writer))
    shards = writer.write(data.workers)
    if n_blank := sum(shard.n_blank for shard in shards):
        n_read = n_blank + sum(shard.n_documents for shard in shards)
        _LOGGER.warning("data.source: %d of %d rows hold no text and are skipped", n_blank, n_read)
    meta = _describe(shards, source, writer)
    if not meta.n_train_bytes + meta.n_val_bytes:
        raise no_text(data.source)
    _refuse_short_text(data.seq_len, meta.n_train_tokens, meta.n_val_tokens)
    write_atomic(folder / "meta.json", meta.model_dump_json(indent=2) + "\n")


def _describe(shards: list[Shard], source: str, writer: ShardWriter) -> Meta:
    train = tuple(shard.train for shard in shards if shard.train.tokens)
    val = tuple(shard.val for shard in shards if shard.val.tokens)
    hashes = "\n".join(file.sha256 for file in (*train, *val))
    return Meta(
        source_hash=source,
        tokenizer_sha256=writer.tokenizer.sha256,
        data_sha256=hashlib.sha256(hashes.encode()).hexdigest(),
        dtype=writer.dtype,
        n_train_tokens=sum(file.tokens for file in train),
        n_val_tokens=sum(file.tokens for file in val),
        n_train_bytes=sum(file.bytes for file in train),
        n_val_bytes=sum(file.bytes for file in val),
        n_documents=sum(shard.n_documents for shard in shards),
        unigram_entropy=_unigram_entropy(
            TokenShards(writer.folder, train, writer.dtype), writer.tokenizer.vocab_size
        ),
        train=train,
        val=val,
    )


def _unigram_entropy(tokens: TokenShards, vocab_size: int) -> float:
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), _COUNTED_AT_ONCE):
        counts += np.bincount(tokens[start : start + _COUNTED_AT_ONCE], minlength=vocab_size)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())


def _find_tokenizer(config: RunConfig, writer: ShardWriter) -> Tokenizer:
    """Return the tokenizer that finished shards were made with, or else a new one."""
    if not config.tokenizer.has_file:
        return load_tokenizer(config.tokenizer, None)
    path = writer.folder / _TOKENIZER_FILE
    with suppress(TokenizerError):
        return load_tokenizer(config.tokenizer, path)
    if config.tokenizer.kind == "bpe" and config.tokenizer.path is None:
        tokenizer = _train_tokenizer(config, writer)
    else:
        tokenizer = load_tokenizer(config.tokenizer, None)
    with atomic_file(path) as temporary:
        tokenizer.save(temporary)
    return tokenizer


def _train_tokenizer(config: RunConfig, writer: ShardWriter) -> Tokenizer:
    n_bytes = {False: 0, True: 0}  # of the training and the held-out text

    def train_texts() -> Iterator[str]:
        for text, is_held_out in writer.split_text():
            n_bytes[is_held_out] += len(text.encode())
            if not is_held_out:
                yield text

    assert config.tokenizer.vocab_size is not None  # the config is resolved
    texts = train_texts()
    try:
        return train_tokenizer(texts, config.tokenizer.vocab_size)
    except TokenizerError:
        if next(texts, None) is None:  # all text was read: is there too little for any vocabulary?
            if not n_bytes[False] + n_bytes[True]:
                raise no_text(config.data.source) from None
            _refuse_short_text(config.data.seq_len, n_bytes[False], n_bytes[True], "at most ")
        raise


def _refuse_short_text(seq_len: int, n_train: int, n_val: int, most: str = "") -> None:
    window = seq_len + 1
    counts = (
        f"the training text has {most}{n_train} tokens and the held-out text {most}{n_val}, and a "
        f"window needs data.seq_len + 1 = {window}"
    )
    if n_train + n_val < 2 * window:
        raise DataError(f"{counts}; add text, or lower data.seq_len")
    if n_val < window:
        raise DataError(f"{counts}; raise data.val_fraction, add text, or lower data.seq_len")
    if n_train < window:
        raise DataError(f"{counts}; lower data.val_fraction, add text, or lower data.seq_len")
