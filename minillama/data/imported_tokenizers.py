"""Tokenizers of models that were trained elsewhere: a tokenizer.json, or none at all.

They come in by `minillama import`; what is trained here has the two of
:mod:`minillama.data.tokenizer`.  A checkpoint keeps a tokenizer.json as it was, in the file that is
called tokenizer.model, with the three ids that a tokenizer.json does not name:

    {"unk_id": 0, "bos_id": 1, "eos_id": 2, "tokenizer": {...}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from minillama.data.tokenizer_base import Tokenizer, check_text
from minillama.errors import TokenizerError
from minillama.files import write_atomic

try:
    import tokenizers
except ImportError:  # the extra `hf`, which only such a model needs
    tokenizers = None  # type: ignore[assignment]


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn whatever ``tokenizers`` raises into one line.

    It raises plain exceptions, and where its own code fails a panic, which is no Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerError(f"{what}: {error}") from None


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, run by Hugging Face's ``tokenizers``; special tokens typed are text.

    Raises:
        TokenizerError: the bytes are not such a file, or the package is missing.
    """

    kind = "json"

    def __init__(self, content: bytes) -> None:
        if tokenizers is None:
            raise TokenizerError(
                "this model's tokenizer.json needs the package tokenizers; "
                "pip install 'minillama[hf]'"
            )
        self._content = content
        with _explained("not a tokenizer.json that tokenizers opens"):
            raw = json.loads(content)
            self.raw: dict[str, Any] = raw["tokenizer"]
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self.raw))
            ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
            self.vocab_size = max(ids) + 1
            self.unk_id, self.bos_id, self.eos_id = (
                int(raw[key]) for key in ("unk_id", "bos_id", "eos_id")
            )
        if not all(0 <= i < self.vocab_size for i in (self.unk_id, self.bos_id, self.eos_id)):
            raise TokenizerError("a special id of the tokenizer.json is beyond its vocabulary")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.sha256 = hashlib.sha256(content).hexdigest()

    @classmethod
    def of(cls, raw: Mapping[str, Any], special: Mapping[str, str | int | None]) -> JsonTokenizer:
        """Build it from a tokenizer.json.

        ``special`` names unk, bos and eos by their text or their id; where there is no bos or no
        unk, as in Qwen's, eos is used for it.

        Raises:
            TokenizerError: it cannot be opened, or there is no eos.
        """
        ids = {"unk_id": 0, "bos_id": 0, "eos_id": 0}
        probe = cls(json.dumps({**ids, "tokenizer": raw}).encode())
        for name in ("eos", "bos", "unk"):
            found = special.get(name)
            if isinstance(found, str):
                found = probe._tokenizer.token_to_id(found)
            if found is None and name == "eos":
                raise TokenizerError("nothing says which token of its tokenizer.json ends a text")
            ids[f"{name}_id"] = ids["eos_id"] if found is None else found
        return cls(json.dumps({**ids, "tokenizer": raw}, ensure_ascii=False).encode())

    def __reduce__(self) -> tuple[type[JsonTokenizer], tuple[bytes]]:
        return JsonTokenizer, (self._content,)

    def encode_parts(self, text: str) -> Iterator[list[int]]:
        """Yield the ids of ``text``, all at once: where it may be cut is not known."""
        check_text(text)
        with _explained("the text cannot be encoded"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        yield ids

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def token(self, number: int) -> str:
        """Return what the id is called in the file."""
        return str(self._tokenizer.id_to_token(number))

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        write_atomic(path, self._content)


class NoTokenizer(Tokenizer):
    """The tokenizer of a model that came without one: only ids can be used."""

    kind = "none"
    unk_id, bos_id, eos_id = 0, 1, 2

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.sha256 = hashlib.sha256(f"none of {vocab_size}".encode()).hexdigest()

    def encode_parts(self, text: str) -> Iterator[list[int]]:
        """Raise a TokenizerError."""
        self._refuse()

    def _decode(self, ids: list[int]) -> str:
        self._refuse()

    def save(self, path: Path) -> None:
        """Write nothing."""

    def _refuse(self) -> NoReturn:
        raise TokenizerError(
            "this model came without a tokenizer that can be used, so it knows ids only; import it "
            "again from a folder with its tokenizer.model or tokenizer.json"
        )
