"""Bytes that were never meant as text are read as text, or refused in one line."""

import gc
import random
import warnings

import pytest

from minillama.config.run import parse_run
from minillama.data.prepare import prepare
from minillama.errors import MinillamaError

KINDS = {
    "anything": lambda draw, size: draw.randbytes(size),
    "zeros": lambda draw, size: bytes(size),
    "ascii with some bytes flipped": lambda draw, size: bytes(
        draw.randrange(256) if draw.random() < 0.01 else draw.choice(b"abc de\n")
        for _ in range(size)
    ),
    "utf-16": lambda draw, size: "".join(chr(draw.randrange(32, 900)) for _ in range(size)).encode(
        "utf-16"
    ),
    "a lone byte order mark": lambda draw, size: b"\xef\xbb\xbf",
    "surrogates": lambda draw, size: b"\xed\xa0\x80" * size,
    "gzip": lambda draw, size: b"\x1f\x8b\x08\x00" + draw.randbytes(size),
}


def outcome(tmp_path, data, form, tokenizer):
    file = tmp_path / f"any.{form}"
    file.write_bytes(data)
    source = {"kind": "files", "files": [str(file)], "format": form}
    raw = {
        "data": {"source": source, "seq_len": 8, "val_fraction": 0.2},
        "tokenizer": tokenizer,
        "model": {"max_seq_len": 8},
    }
    try:
        prepared = prepare(parse_run(raw, "any"))
    except MinillamaError as refused:
        error = refused
    else:
        assert len(prepared.train) == prepared.meta.n_train_tokens
        assert int(prepared.train[:].max()) < prepared.tokenizer.vocab_size
        return "read"
    assert error.exit_status == 2
    assert 0 < len(str(error)) < 2000
    if form == "csv":  # pandas leaves a file that it cannot parse to the garbage collector
        del error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    return "refused"


@pytest.mark.parametrize("form", ["text", "json", "csv", "parquet"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_any_bytes_are_read_or_refused(tmp_path, kind, form):
    draw = random.Random(kind + form)
    for size in (1, 40, 3000):
        outcome(tmp_path, KINDS[kind](draw, size), form, {"kind": "byte"})


def test_bytes_that_are_no_text_are_refused_and_text_is_read(tmp_path):
    draw = random.Random(0)
    noise, text = draw.randbytes(3000), b"some words of a text. " * 100
    assert outcome(tmp_path, noise, "text", {"kind": "byte"}) == "refused"
    assert outcome(tmp_path, text, "text", {"kind": "byte"}) == "read"
    assert outcome(tmp_path, noise, "text", {"kind": "bpe", "vocab_size": 300}) == "refused"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "json", "csv", "parquet"])
def test_hundreds_of_random_files_are_read_or_refused(tmp_path, form):
    for seed in range(300):
        draw = random.Random(f"{form}{seed}")
        kind = draw.choice(list(KINDS))
        data = KINDS[kind](draw, draw.choice([1, 7, 100, 5000]))
        outcome(tmp_path, data, form, draw.choice([{"kind": "byte"}, {"kind": "bpe"}]))
