"""Text to ids and back: sentencepiece BPE trained on the data, or one id per UTF-8 byte.

Both give back any text exactly: ``decode(encode(text)) == text``.  Special ids (unk 0, bos 1,
eos 2) are not text: whatever a user types, ``"</s>"`` too, is encoded as plain text.

The BPE model uses only settings that transformers' LlamaTokenizer and llama.cpp reproduce: no
normalisation, no space put in front, byte fallback.  One text differs there: sentencepiece writes a
space as U+2581 (▁) inside its pieces, and all three so take a typed ▁ for a space.  Here a typed ▁
becomes its three byte ids, which every one of them decodes to ▁ again.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from minillama.arguments import check_type, whole_number
from minillama.config.run import BYTE_VOCAB_SIZE, MIN_BPE_VOCAB_SIZE, TokenizerConfig
from minillama.data.imported_tokenizers import JsonTokenizer, NoTokenizer
from minillama.data.tokenizer_base import Tokenizer, check_text
from minillama.errors import TokenizerError
from minillama.files import write_atomic

UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
_FIRST_BYTE_ID = 3

_SPACE = "▁"
_UNKNOWN = "▅"  # U+2585, by which sentencepiece's trainer marks a character outside its alphabet
_PART_CHARS = 1 << 18  # encoded at once
# The trainer skips sentences beyond 4192 bytes; a character has at most 4.
_SENTENCE_CHARS = 1000
_TRAINING_CHARS = 1 << 26
# protobuf merges concatenated messages: this sets ModelProto.normalizer_spec.add_dummy_prefix = 0.
_WITHOUT_DUMMY_PREFIX = b"\x1a\x02\x18\x00"

_LOGGER = logging.getLogger("minillama")


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte: byte b is id b + 3, after unk, bos and eos."""

    kind = "byte"
    vocab_size = BYTE_VOCAB_SIZE
    unk_id, bos_id, eos_id = UNK_ID, BOS_ID, EOS_ID
    sha256 = hashlib.sha256(b"minillama byte tokenizer, id = byte + 3").hexdigest()

    def encode_parts(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of ``text`` in lists of bounded length."""
        check_text(text)
        for part in split_text(text, _PART_CHARS):
            yield [byte + _FIRST_BYTE_ID for byte in part.encode()]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i - _FIRST_BYTE_ID for i in ids if i >= _FIRST_BYTE_ID).decode(
            "utf-8", "replace"
        )

    def save(self, path: Path) -> None:
        """Write nothing: this tokenizer has no state."""


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, given as the bytes of its file.

    Of a model that was not trained here only its own promises hold: one with a normaliser or
    without byte fallback does not give back every text.

    Raises:
        TokenizerError: the bytes are not a model, or it lacks bos or eos.
    """

    kind = "bpe"

    def __init__(self, model: bytes) -> None:
        check_type("model", model, bytes)
        self._model = model
        self._processor = _processor(model)
        self.vocab_size = int(self._processor.vocab_size())
        self.unk_id = int(self._processor.unk_id())
        self.bos_id = int(self._processor.bos_id())
        self.eos_id = int(self._processor.eos_id())
        self.sha256 = hashlib.sha256(model).hexdigest()
        if min(self.bos_id, self.eos_id) < 0:
            raise TokenizerError(
                "the sentencepiece model has no bos or no eos piece, which documents are joined "
                "with; use one that has both, or leave out tokenizer.path to train one"
            )
        ids = list(range(self.vocab_size))
        control, unknown = self._processor.is_control(ids), self._processor.is_unknown(ids)
        self._special = frozenset(i for i in ids if control[i] or unknown[i])
        space_bytes = [self._processor.piece_to_id(f"<0x{b:02X}>") for b in _SPACE.encode()]
        has_bytes = all(self._processor.is_byte(i) for i in space_bytes)
        self._typed_space = space_bytes if has_bytes else None
        # A model that puts a space in front of a text must do so once, not before each part.
        self._inner = self._processor
        if self._processor.encode("x", out_type=str)[0].startswith(_SPACE):
            self._inner = _processor(model + _WITHOUT_DUMMY_PREFIX)

    def __reduce__(self) -> tuple[type[SentencePieceTokenizer], tuple[bytes]]:
        return SentencePieceTokenizer, (self._model,)

    def encode_parts(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of ``text`` in lists of bounded length.

        The text is cut before a space that follows another character, where no piece trained here
        reaches across, so that the ids are those of the whole text.
        """
        check_text(text)
        encode = self._processor.encode
        for part in split_text(text, _PART_CHARS):
            if self._typed_space is None or _SPACE not in part:
                yield encode(part)
            else:
                first, *others = part.split(_SPACE)
                ids = encode(first)
                for other in others:
                    ids += self._typed_space + self._inner.encode(other)
                yield ids
            encode = self._inner.encode

    def _decode(self, ids: list[int]) -> str:
        return str(self._processor.decode([i for i in ids if i not in self._special]))

    def save(self, path: Path) -> None:
        """Write the model file atomically."""
        write_atomic(path, self._model)


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Train a BPE model of ``vocab_size`` ids; the same text gives the same model to the byte.

    Of very long text the first 64 M characters are used.

    Raises:
        TokenizerError: the text has too few pieces or too many characters for ``vocab_size``, or
            there is no text.
    """
    whole_number("vocab_size", vocab_size, 1)
    if isinstance(documents, str):
        raise TypeError("documents must be texts, not one str; give [text]")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(documents),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=True,
            character_coverage=0.9995,  # rarer characters are left to the bytes
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(error, vocab_size) from error
    return SentencePieceTokenizer(model.getvalue())


def load_tokenizer(config: TokenizerConfig, model_file: Path | None) -> Tokenizer:
    """Return the tokenizer of ``config``; a bpe's model is at ``model_file``, else at its path.

    Raises:
        TokenizerError: the model file is missing, or is not one.
    """
    if config.kind == "byte":
        return ByteTokenizer()
    if config.kind == "none":
        return NoTokenizer(config.vocab_size or 0)
    path = model_file or (Path(config.path) if config.path else None)
    if path is None:
        raise TokenizerError(
            f"a {config.kind} tokenizer needs its model file, tokenizer.model; none is given"
        )
    try:
        model = path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"cannot read the tokenizer's model {path}: {error.strerror}"
        ) from error
    try:
        return JsonTokenizer(model) if config.kind == "json" else SentencePieceTokenizer(model)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error


def split_text(text: str, limit: int) -> Iterator[str]:
    """Cut ``text`` into parts of at most ``limit`` characters, before a space if there is one."""
    start = 0
    while len(text) - start > limit:
        end = text.rfind(" ", start + 1, start + limit + 1)
        while end > start and text[end - 1] == " ":  # leave a run of spaces whole
            end -= 1
        if end <= start:
            end = start + limit
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _sentences(documents: Iterable[str]) -> Iterator[str]:
    left = _TRAINING_CHARS
    # The trainer would take ▁ for a space, and would drop a whole sentence that holds ▅.
    reserved = re.compile(f"[{_SPACE}{_UNKNOWN}]")
    for document in documents:
        check_text(document)
        for stretch in reserved.split(document[:left]):
            yield from split_text(stretch, _SENTENCE_CHARS)
        left -= len(document)
        if left <= 0:
            _LOGGER.info("the tokenizer is trained on the first %d characters", _TRAINING_CHARS)
            return


def _explained(error: RuntimeError, vocab_size: int) -> TokenizerError:
    message = str(error)
    if high := re.search(r"size too high.*<= (\d+)", message):
        limit = int(high[1])
        fix = f"set it to {limit} or less" if limit >= MIN_BPE_VOCAB_SIZE else "use kind: byte"
        return TokenizerError(
            f"tokenizer.vocab_size = {vocab_size} is too large for this text, which yields at most "
            f"{limit} pieces; {fix}, or add text"
        )
    if low := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return TokenizerError(
            f"tokenizer.vocab_size = {vocab_size} is too small for this text, whose characters and "
            f"256 bytes alone need {low[1]} ids; set it to {low[1]} or more, or use "
            "kind: byte"
        )
    if "sentences_.empty()" in message:
        return TokenizerError("there is no text to train a tokenizer on")
    return TokenizerError(f"sentencepiece cannot train on this text: {message}")


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    try:
        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(model)
    except (RuntimeError, UnicodeDecodeError) as error:  # the latter in wording the former
        raise TokenizerError("not a sentencepiece model") from error
    return processor
