"""Text to token files, once.

    source ──▶ documents, shuffled ──▶ train ........................ | val ....
                                         │    the last val_fraction of the bytes ┘
                                         ├──▶ tokenizer (trained on train only)
                                         ▼
    [bos] tokens [eos] of each ──▶ train.bin, val.bin, meta.json, tokenizer.model in the cache

The document that the border falls into is cut there: its head ends train without an eos, its tail
begins val without a bos.  Nothing here knows of batches, so that the split is the same for all.

With ``data.shard_tokens`` the source is a stream that becomes shards instead (see sharding.py):

    parts of the source ──▶ each document drawn: train or val ──▶ tokens ──▶ shards, index.json
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm import tqdm

from minillama.config import RunConfig
from minillama.config.run import TokenizerConfig
from minillama.data.building import build_once
from minillama.data.files import Piece
from minillama.data.sharding import Sharding, index_of, write_whole
from minillama.data.shards import INDEX, ShardIndex, Tokens, TokenShards, sha256_of
from minillama.data.sources import Documents, open_documents, source_hash
from minillama.data.streams import open_stream, source_stamp
from minillama.data.token_writer import TokenWriter
from minillama.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from minillama.errors import DataError, TokenizerError
from minillama.files import cache_folder

_FORMAT = 1  # of the token files and of the way to them; a new one makes old caches unused
_NEAR_CHARS = 4096  # how far the border moves, at most, to a line's or a word's end
_COUNTED_AT_ONCE = 1 << 20  # tokens
_BYTES_A_TOKEN = 4  # of a BPE in English, about

_LOGGER = logging.getLogger("minillama")


class Meta(BaseModel):
    """What is known of a pair of token files.

    Attributes:
        source_hash: sha256 of the source; for shards of its stamp, see :func:`source_stamp`.
        tokenizer_sha256: sha256 of the tokenizer.
        dtype: of the files, little-endian.
        n_train_tokens, n_val_tokens: bos and eos included.
        n_train_bytes, n_val_bytes: UTF-8 bytes of the text itself.
        n_documents: in both.
        unigram_entropy: nats per token of the training tokens: the loss of a model that knows
            nothing but how frequent each token is.
        data_sha256: sha256 of train.bin followed by val.bin; of shards, that of their index.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source_hash: str
    tokenizer_sha256: str
    dtype: Literal["uint16", "uint32"]
    n_train_tokens: int
    n_val_tokens: int
    n_train_bytes: int
    n_val_bytes: int
    n_documents: int
    unigram_entropy: float
    data_sha256: str


@dataclass(frozen=True)
class Prepared:
    """Token files, mapped into memory, and the tokenizer that made them."""

    tokenizer: Tokenizer
    train: Tokens
    val: Tokens
    meta: Meta
    folder: Path


def prepare(config: RunConfig) -> Prepared:
    """Return the tokens of ``config``, from the cache if they are there and whole.

    Several processes may call this at once; one prepares and the others wait.

    Raises:
        DataError: the text is missing, cannot be read, or is shorter than a window.
        TokenizerError: the vocabulary and the text do not fit.
    """
    sharded = config.data.shard_tokens is not None
    source = (source_stamp if sharded else source_hash)(config.data.source)
    folder = cache_folder() / "tokens" / _key(config, source)
    build = _build_shards if sharded else _build
    build_once(folder, _is_whole, lambda new: build(config, source, new), goes_on=sharded)
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
        train=_open_tokens(folder, "train", meta.dtype),
        val=_open_tokens(folder, "val", meta.dtype),
        meta=meta,
        folder=folder,
    )


def damaged_files(prepared: Prepared) -> list[Path]:
    """Return the token files whose content is not what was written; reads all of them.

    Of two files that are not in shards either may be the one, so both are named.
    """
    if isinstance(prepared.train, TokenShards) and isinstance(prepared.val, TokenShards):
        return [*prepared.train.damaged(), *prepared.val.damaged()]
    paths = [prepared.folder / "train.bin", prepared.folder / "val.bin"]
    return [] if sha256_of(*paths) == prepared.meta.data_sha256 else paths


def _open_tokens(folder: Path, split: Literal["train", "val"], dtype: str) -> Tokens:
    if (folder / INDEX).exists():
        return TokenShards(folder, getattr(_read_index(folder), split), dtype)
    return np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r")


def _key(config: RunConfig, source: str) -> str:
    tokenizer = config.tokenizer
    made_by: list[Any] = [tokenizer.kind, tokenizer.vocab_size]
    if tokenizer.path is not None:
        made_by.append(load_tokenizer(tokenizer, None).sha256)
    decisive = [_FORMAT, source, config.data.val_fraction, config.data.split_seed, made_by]
    if config.data.shard_tokens is not None:
        decisive.append(config.data.shard_tokens)
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


def _load_tokenizer(config: TokenizerConfig, folder: Path) -> Tokenizer:
    return load_tokenizer(config, folder / "tokenizer.model" if config.has_file else None)


def _read_meta(folder: Path) -> Meta:
    return Meta.model_validate_json((folder / "meta.json").read_bytes())


def _read_index(folder: Path) -> ShardIndex:
    return ShardIndex.model_validate_json((folder / INDEX).read_bytes())


def _is_whole(folder: Path) -> bool:
    """Tell whether a folder of the cache is there, with files of the sizes that meta names."""
    try:
        meta = _read_meta(folder)
        width = np.dtype(meta.dtype).itemsize
        model = folder / "tokenizer.model"
        if (folder / INDEX).exists():
            index = _read_index(folder)
            has_tokens = index.sha256 == meta.data_sha256 and index.is_whole(folder)
        else:
            sizes = [(folder / name).stat().st_size for name in ("train.bin", "val.bin")]
            has_tokens = sizes == [meta.n_train_tokens * width, meta.n_val_tokens * width]
        return has_tokens and (
            meta.tokenizer_sha256 == ByteTokenizer.sha256
            or meta.tokenizer_sha256 == hashlib.sha256(model.read_bytes()).hexdigest()
        )
    except (OSError, ValidationError):
        return False


# --------------------------------------------------------------------------------------- the split


class Split:
    """The documents in shuffled order, the last ``val_fraction`` of their bytes held out.

    Args:
        documents: all of them.
        val_fraction: share of the bytes that is held out.
        seed: of the shuffle.
    """

    def __init__(self, documents: Documents, val_fraction: float, seed: int) -> None:
        self._documents = documents
        order = np.random.Generator(np.random.PCG64(seed)).permutation(len(documents))
        ends = np.cumsum(documents.sizes[order])
        border = int(ends[-1]) - round(val_fraction * int(ends[-1]))
        at = int(np.searchsorted(ends, border, "right"))  # the first document that ends beyond
        self._whole_train, self._whole_val = order[:at], order[at + 1 :]
        self._head, self._tail = "", ""
        if at < len(order):
            inside = border - (int(ends[at - 1]) if at else 0)
            text = documents[int(order[at])]
            reach = min(_NEAR_CHARS, (int(ends[-1]) - border) // 10)
            self._head, self._tail = cut(text, inside, reach)

    def most_tokens(self) -> tuple[int, int]:
        """Return a bound on the tokens of train and val: one a byte, a prefix, bos and eos."""

        def most(whole: NDArray[np.int64], part: str) -> int:
            n_bytes = int(self._documents.sizes[whole].sum()) + len(part.encode())
            return n_bytes + 3 * (len(whole) + bool(part))

        return most(self._whole_train, self._head), most(self._whole_val, self._tail)

    def train(self) -> Iterator[Piece]:
        """Yield the training text."""
        for index in self._whole_train:
            yield Piece(self._documents[int(index)])
        if self._head:
            yield Piece(self._head, ends=not self._tail)

    def val(self) -> Iterator[Piece]:
        """Yield the held-out text."""
        if self._tail:
            yield Piece(self._tail, begins=not self._head)
        for index in self._whole_val:
            yield Piece(self._documents[int(index)])


def cut(text: str, size: int, reach: int) -> tuple[str, str]:
    """Cut ``text`` after at most ``size`` UTF-8 bytes, at a good place among the last characters.

    That is after a line's end if one of the last ``reach`` characters before the border is one,
    else before a white space among them, else between the two characters at the border.
    """
    border = len(text.encode()[:size].decode("utf-8", "ignore"))
    start = max(0, border - reach)
    line = text.rfind("\n", start, border) + 1
    if line:
        border = line
    else:
        spaces = [i for i in range(start, border) if text[i].isspace()]
        border = spaces[-1] if spaces else border
    return text[:border], text[border:]


# --------------------------------------------------------------------------------- token files


def _build(config: RunConfig, source: str, folder: Path) -> None:
    documents = open_documents(config.data.source)
    split = Split(documents, config.data.val_fraction, config.data.split_seed)
    _refuse_short_text(config.data.seq_len, *split.most_tokens(), "at most ")
    tokenizer = _new_tokenizer(config.tokenizer, (piece.text for piece in split.train()))
    if config.tokenizer.has_file:
        tokenizer.save(folder / "tokenizer.model")
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    digest = hashlib.sha256()
    n_bytes = int(documents.sizes.sum())
    with tqdm(total=n_bytes, unit="B", unit_scale=True, desc="tokenizing", delay=2) as bar:
        sides = []
        for name, pieces in (("train.bin", split.train()), ("val.bin", split.val())):
            with (folder / name).open("wb") as file:
                writer = TokenWriter(file, tokenizer, dtype, digest)
                for piece in pieces:
                    bar.update(writer.add(piece))
                sides.append(writer)
    train, val = sides
    meta = Meta(
        source_hash=source,
        tokenizer_sha256=tokenizer.sha256,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        n_train_tokens=train.n_tokens,
        n_val_tokens=val.n_tokens,
        n_train_bytes=train.n_bytes,
        n_val_bytes=val.n_bytes,
        n_documents=len(documents),
        unigram_entropy=_unigram_entropy(
            np.memmap(folder / "train.bin", dtype, "r"), tokenizer.vocab_size
        ),
        data_sha256=digest.hexdigest(),
    )
    (folder / "meta.json").write_text(meta.model_dump_json(indent=2) + "\n")


def _new_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    if config.kind != "bpe" or config.path is not None:
        return load_tokenizer(config, None)
    assert config.vocab_size is not None  # the config is resolved
    return train_tokenizer(texts, config.vocab_size)


def _build_shards(config: RunConfig, source: str, folder: Path) -> None:
    """Write what is missing of the shards; what is there was written whole."""
    data, shard_tokens = config.data, config.data.shard_tokens
    assert shard_tokens is not None
    for name in ("meta.json", INDEX):
        (folder / name).unlink(missing_ok=True)
    sharding = Sharding(
        stream=open_stream(data.source, _BYTES_A_TOKEN * shard_tokens),
        tokenizer=ByteTokenizer(),
        folder=folder,
        shard_tokens=shard_tokens,
        val_fraction=data.val_fraction,
        split_seed=data.split_seed,
    )
    sharding = replace(sharding, tokenizer=_tokenizer_of_shards(config.tokenizer, sharding))
    shards = sharding.write(data.workers)
    index = index_of(shards, sharding.dtype)
    n_train, n_val = (sum(file.tokens for file in files) for files in (index.train, index.val))
    _refuse_short_text(data.seq_len, n_train, n_val)
    meta = Meta(
        source_hash=source,
        tokenizer_sha256=sharding.tokenizer.sha256,
        dtype=index.dtype,
        n_train_tokens=n_train,
        n_val_tokens=n_val,
        n_train_bytes=sum(file.bytes for file in index.train),
        n_val_bytes=sum(file.bytes for file in index.val),
        n_documents=sum(shard.n_documents for shard in shards),
        unigram_entropy=_unigram_entropy(
            TokenShards(folder, index.train, index.dtype), sharding.tokenizer.vocab_size
        ),
        data_sha256=index.sha256,
    )
    for name, content in ((INDEX, index), ("meta.json", meta)):
        write_whole(folder / name, content.model_dump_json(indent=2).encode() + b"\n")


def _tokenizer_of_shards(config: TokenizerConfig, sharding: Sharding) -> Tokenizer:
    """Return the tokenizer that finished shards were made with, or else a new one."""
    path = sharding.folder / "tokenizer.model"
    if not config.has_file:
        return load_tokenizer(config, None)
    with suppress(TokenizerError):
        return load_tokenizer(config, path)
    tokenizer = _new_tokenizer(config, sharding.train_texts())
    temporary = path.with_name(f"{path.name}.new")
    tokenizer.save(temporary)
    write_whole(path, temporary.read_bytes())
    temporary.unlink()
    return tokenizer


def _unigram_entropy(tokens: Tokens, vocab_size: int) -> float:
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), _COUNTED_AT_ONCE):
        counts += np.bincount(tokens[start : start + _COUNTED_AT_ONCE], minlength=vocab_size)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())


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
