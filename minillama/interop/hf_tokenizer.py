"""To and from tokenizer.json, the format of the ``tokenizers`` library and of transformers.

sentencepiece merges any two neighbours whose concatenation is a piece, the best score first, the
left one first where scores are equal.  ``tokenizers`` has a list of merges instead: every split of
a piece into two pieces, in order of the scores.  Typed text such as ``</s>`` stays text in both
(``split_special_tokens``).  One text differs: a typed ▁ is three bytes here, and a space there.
Decoding differs where ids are not valid UTF-8: there, all bytes of the run become U+FFFD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minillama.data.tokenizer import ByteTokenizer
from minillama.errors import ConfigError, TokenizerError
from minillama.interop.sentencepiece_proto import (
    SPACE,
    Kind,
    Piece,
    PieceModel,
    read_pieces,
    write_pieces,
)

TOKENIZER_JSON, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_NAMES = ("<unk>", "<s>", "</s>")
"""Names of unk, bos and eos where a tokenizer has none for them."""


def exportable_pieces(model_file: Path) -> PieceModel:
    """Read the sentencepiece model of a checkpoint that is to be exported.

    Raises:
        ConfigError: other programs' Llama tokenizer would give other ids.
    """
    model = read_pieces(model_file.read_bytes())
    if obstacles := model.obstacles():
        raise ConfigError(
            "the sentencepiece model cannot be exported, since other programs' Llama tokenizer "
            f"would not give the same ids: {'; '.join(obstacles)}"
        )
    return model


def byte_pieces() -> list[str]:
    """Return the names of a byte tokenizer's ids in a byte-level BPE.

    GPT-2 gave each byte a visible character: its own if that is visible, else the next from U+0100.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = [chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)]
    return [*SPECIAL_NAMES, *characters]


# ------------------------------------------------------------------------------------------ write


def sentencepiece_json(model: PieceModel, bos_id: int) -> dict[str, Any]:
    """Return the tokenizer.json of a sentencepiece model."""
    prefix = [{"type": "Prepend", "prepend": SPACE}] if model.add_dummy_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    special = (Kind.UNKNOWN, Kind.CONTROL)
    return _tokenizer_json(
        [piece.text for piece in model.pieces],
        {i for i, piece in enumerate(model.pieces) if piece.kind in special},
        bos_id,
        normalizer={
            "type": "Sequence",
            "normalizers": [
                *prefix,
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        pre_tokenizer=None,
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        model={
            "unk_token": next(p.text for p in model.pieces if p.kind == Kind.UNKNOWN),
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": [list(pair) for pair in merges(model.pieces)],
        },
    )


def byte_json() -> dict[str, Any]:
    """Return the tokenizer.json of a byte tokenizer: a byte-level BPE without merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    byte_level["trim_offsets"] = True
    return _tokenizer_json(
        byte_pieces(),
        set(range(len(SPECIAL_NAMES))),
        ByteTokenizer.bos_id,
        normalizer=None,
        pre_tokenizer=byte_level,
        decoder=byte_level,
        model={"unk_token": None, "fuse_unk": False, "byte_fallback": False, "merges": []},
    )


def _tokenizer_json(
    texts: Sequence[str],
    special_ids: Collection[int],
    bos_id: int,
    *,
    model: Mapping[str, Any],
    **steps: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return what both kinds share; bos is put in front of a text unless the caller opts out."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    bos = texts[bos_id]
    first, second = ({"SpecialToken": {"id": bos, "type_id": i}} for i in (0, 1))
    one, other = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": texts[i], **flags, "special": True} for i in sorted(special_ids)
        ],
        **steps,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, one],
            "pair": [first, one, second, other],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(texts)},
            **model,
        },
    }


def tokenizer_config(
    special: tuple[str, str, str], max_seq_len: int, *, add_prefix_space: bool
) -> dict[str, Any]:
    """Return tokenizer_config.json; ``special`` are the names of unk, bos and eos.

    Unk is the padding token too, since no text ever contains it.
    """
    unk, bos, eos = special
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_seq_len,
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unk,
        "pad_token": unk,
        "add_prefix_space": add_prefix_space,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }


def merges(pieces: Sequence[Piece]) -> Iterator[tuple[str, str]]:
    """Yield every split of a piece into two pieces, those of the best score first."""
    normal = {piece.text for piece in pieces if piece.kind == Kind.NORMAL}
    # sorted is stable: where scores are equal, the lower id comes first.
    for piece in sorted(pieces, key=lambda piece: -piece.score):
        if piece.kind == Kind.NORMAL:
            for i in range(1, len(piece.text)):
                left, right = piece.text[:i], piece.text[i:]
                if left in normal and right in normal:
                    yield left, right


# ------------------------------------------------------------------------------------------- read


def is_byte_json(raw: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json is that of a byte tokenizer."""
    ours = byte_json()["model"]
    model = raw.get("model")
    return isinstance(model, Mapping) and all(
        model.get(key) == ours[key] for key in ("type", "vocab", "merges")
    )


def special_tokens(
    settings: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, str | int | None]:
    """Return unk, bos and eos: names from tokenizer_config.json, else ids from config.json."""
    found: dict[str, str | int | None] = {}
    for name in ("unk", "bos", "eos"):
        number = config.get(f"{name}_token_id")
        if isinstance(number, list) and number:  # several tokens may end a text
            number = number[0]
        fallback = number if isinstance(number, int) else None
        found[name] = _content(settings.get(f"{name}_token")) or fallback
    return found


def sentencepiece_of(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> bytes:
    """Return the sentencepiece model that gives the same ids as a tokenizer.json.

    Args:
        raw: tokenizer.json.
        settings: tokenizer_config.json, which names the special tokens.

    Raises:
        TokenizerError: there is no such model; the message says why.
    """
    try:
        return _convert(raw, settings)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{TOKENIZER_JSON} is damaged: {error!r}") from None


def _convert(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> bytes:
    model = raw["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback"):
        is_bytes = "ByteLevel" in json.dumps(raw.get("pre_tokenizer"))
        found = "byte-level BPE" if is_bytes else f"{model['type']} without byte fallback"
        raise TokenizerError(f"{TOKENIZER_JSON} is {found}, not the BPE of sentencepiece")
    add_dummy_prefix = _prefix(raw)
    added = {token["content"]: token for token in raw.get("added_tokens") or ()}
    if any(not token["special"] for token in added.values()):
        raise TokenizerError(f"{TOKENIZER_JSON} has added tokens that are ordinary text")
    ids = {**model["vocab"], **{text: token["id"] for text, token in added.items()}}
    texts = sorted(ids, key=lambda text: ids[text])
    if [ids[text] for text in texts] != list(range(len(texts))):
        raise TokenizerError(f"the ids in {TOKENIZER_JSON} are not 0 to n - 1, each once")
    special = {
        name: _content(settings.get(f"{name}_token")) or default
        for name, default in zip(("unk", "bos", "eos"), SPECIAL_NAMES, strict=True)
    }
    if missing := [text for text in special.values() if text not in ids]:
        raise TokenizerError(f"{TOKENIZER_JSON} has no {' and no '.join(missing)}")
    pairs = [tuple(p.split(" ", 1) if isinstance(p, str) else p) for p in model["merges"]]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        ranks.setdefault(left + right, rank)
    pieces = []
    for number, text in enumerate(texts):
        kind = Kind.NORMAL
        if text in added or text in special.values():
            kind = Kind.UNKNOWN if text == special["unk"] else Kind.CONTROL
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            kind = Kind.BYTE
        # Pieces that no merge makes are single characters, whose scores have no effect.
        score = -float(ranks.get(text, len(pairs) + number)) if kind == Kind.NORMAL else 0.0
        pieces.append(Piece(text, score, kind))
    if sum(piece.kind == Kind.BYTE for piece in pieces) != 256:
        raise TokenizerError(f"{TOKENIZER_JSON} lacks some of the 256 bytes")
    ours = list(merges(pieces))
    # The same merges, and the same order of their results; the splits of one result may swap.
    if set(ours) != set(pairs) or list(map("".join, ours)) != list(map("".join, pairs)):
        raise TokenizerError(f"the merges of {TOKENIZER_JSON} do not follow from its vocabulary")
    unk, bos, eos = (ids[special[name]] for name in ("unk", "bos", "eos"))
    return write_pieces(pieces, (unk, bos, eos), add_dummy_prefix=add_dummy_prefix)


def _prefix(raw: Mapping[str, Any]) -> bool:
    """Return whether a space is put before a text; refuse any other change of the text."""
    steps: list[Mapping[str, Any]] = []
    for section, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = raw.get(section) or {}
        steps += step[inner] if step.get("type") == "Sequence" else [step]
    prefix = False
    for step in filter(None, steps):
        kind = step.get("type")
        if kind == "Prepend" and step.get("prepend") == SPACE:
            prefix = True
        elif kind == "Metaspace" and not step.get("split", True):
            if step.get("prepend_scheme", "always") != "never":
                raise TokenizerError(
                    f"{TOKENIZER_JSON} puts a space in front of some texts only (Metaspace), which "
                    "sentencepiece cannot do; add the model's tokenizer.model to the folder"
                )
        elif kind != "Replace" or (step.get("pattern"), step.get("content")) != (
            {"String": " "},
            SPACE,
        ):
            raise TokenizerError(f"{TOKENIZER_JSON} changes or splits the text first ({kind})")
    return prefix


def _content(token: Any) -> str | None:
    """Return the text of a special token, which may be a string or a mapping."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None
