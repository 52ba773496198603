import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillama.config import RunConfig
from minillama.data.prepare import Prepared, Split, cut, prepare
from minillama.data.sources import Documents
from minillama.data.tokenizer import ByteTokenizer, train_tokenizer
from minillama.errors import DataError, TokenizerError

BOS, EOS = 1, 2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, *texts: str) -> list[str]:
    paths = [folder / f"{i:03}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    return [str(path) for path in paths]


def config(files: list[str], tokenizer: dict | None = None, **data) -> RunConfig:
    data = {"source": {"kind": "files", "files": files}, "seq_len": 8, "val_fraction": 0.2, **data}
    return RunConfig(data=data, tokenizer=tokenizer or {"kind": "byte"})


def documents(texts: list[str]) -> Documents:
    return Documents("hash", np.array([len(text.encode()) for text in texts]), texts.__getitem__)


def streams(prepared: Prepared) -> tuple[list[int], list[int]]:
    return prepared.train.tolist(), prepared.val.tolist()


WORDS = [f"document {i} says: " + f"word{i} " * 20 + "\n" for i in range(40)]


# ---------------------------------------------------------------------------------- the streams


def test_streams_hold_every_document_between_bos_and_eos(tmp_path):
    prepared = prepare(config(write(tmp_path, *WORDS)))
    train, val = streams(prepared)
    tokenizer = ByteTokenizer()
    whole = train + val  # only the border lies between the two
    found = [
        tokenizer.decode(part)
        for part in " ".join(map(str, whole)).split(f" {EOS}")
        for part in [[int(i) for i in part.split()]]
        if part
    ]
    assert sorted(found) == sorted(WORDS)
    assert train[0] == BOS
    assert val[-1] == EOS
    assert whole.count(BOS) == whole.count(EOS) == len(WORDS)


def test_meta_counts_what_is_there(tmp_path):
    prepared = prepare(config(write(tmp_path, *WORDS, "Ünïcödé 你好\n")))
    meta = prepared.meta
    total = sum(len(text.encode()) for text in WORDS) + len("Ünïcödé 你好\n".encode())
    assert meta.n_train_bytes + meta.n_val_bytes == total
    assert (meta.n_train_tokens, meta.n_val_tokens) == (len(prepared.train), len(prepared.val))
    assert meta.n_documents == 41
    assert meta.tokenizer_sha256 == prepared.tokenizer.sha256
    assert meta.dtype == "uint16"
    text_tokens = np.concatenate([prepared.train, prepared.val]) > 2
    assert text_tokens.sum() == total  # one byte, one token

    _, counts = np.unique(prepared.train, return_counts=True)
    shares = counts / counts.sum()
    assert meta.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)
    assert json.loads((prepared.folder / "meta.json").read_text()) == meta.model_dump()


def test_a_single_book_is_cut_at_a_line_near_the_border(tmp_path):
    book = "".join(f"Line {i} of the only book there is.\n" for i in range(2000))
    prepared = prepare(config(write(tmp_path, book), val_fraction=0.1))
    train, val = streams(prepared)
    tokenizer = prepared.tokenizer
    assert tokenizer.decode(train) + tokenizer.decode(val) == book
    assert (train[0], BOS in val, EOS in train, val[-1]) == (BOS, False, False, EOS)
    assert tokenizer.decode(train).endswith(".\n")
    assert tokenizer.decode(val).startswith("Line 18")
    assert prepared.meta.n_val_bytes / len(book) == pytest.approx(0.1, rel=0.01)


def test_the_tokenizer_is_trained_on_the_training_text_alone(tmp_path):
    files = write(tmp_path, *WORDS)
    prepared = prepare(config(files, {"kind": "bpe", "vocab_size": 290}))
    split = Split(documents(WORDS), 0.2, 0)
    expected = train_tokenizer([piece.text for piece in split.train()], 290)
    assert prepared.tokenizer.sha256 == expected.sha256
    assert prepared.tokenizer.sha256 != train_tokenizer(WORDS, 290).sha256
    assert (prepared.folder / "tokenizer.model").read_bytes() == expected._model


def test_a_vocabulary_beyond_sixteen_bits_gets_wider_files(tmp_path):
    every_character = "".join(chr(0x20000 + i) for i in range(0x10000))
    train_tokenizer([every_character], 0x10000 + 300).save(tmp_path / "wide.model")
    made = config(
        write(tmp_path, every_character), {"kind": "bpe", "path": str(tmp_path / "wide.model")}
    )
    prepared = prepare(made)
    assert prepared.meta.dtype == "uint32"
    assert prepared.val.max() >= 1 << 16
    train, val = streams(prepared)
    assert prepared.tokenizer.decode(train + val) == every_character


# ------------------------------------------------------------------------------------ the split

TEXTS = st.lists(st.text("ab \né🙂", min_size=1, max_size=40), min_size=1, max_size=20)


@given(TEXTS, st.floats(0.01, 0.99), st.integers(0, 2**40))
def test_train_and_val_are_disjoint_and_make_up_everything(texts, val_fraction, seed):
    split = Split(documents(texts), val_fraction, seed)
    train, val = list(split.train()), list(split.val())
    pieces = train + val
    assert all(piece.text for piece in pieces)
    whole, parts = [], []
    for piece in pieces:
        (whole if piece.begins and piece.ends else parts).append(piece)
    if parts:
        head, tail = parts
        assert (head is train[-1], tail is val[0]) == (True, True)
        assert (head.begins, head.ends, tail.begins, tail.ends) == (True, False, False, True)
    rejoined = [piece.text for piece in whole] + ["".join(p.text for p in parts)] * bool(parts)
    assert sorted(rejoined) == sorted(texts)
    wanted = round(val_fraction * sum(len(text.encode()) for text in texts))
    got = sum(len(piece.text.encode()) for piece in val)
    assert wanted <= got <= 1.1 * wanted + 9 * 4


def test_the_split_follows_split_seed_and_nothing_else(tmp_path):
    files = write(tmp_path, *WORDS)
    base = config(files)
    same = base.model_copy(
        update={
            "train": base.train.model_copy(update={"seed": 7, "batch_size": 3}),
            "data": base.data.model_copy(update={"seq_len": 4}),
        }
    )
    assert prepare(same).folder == prepare(base).folder
    other = prepare(config(files, split_seed=1))
    assert other.meta.data_sha256 != prepare(base).meta.data_sha256
    orders = [[p.text for p in Split(documents(WORDS), 0.2, seed).train()] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != WORDS[: len(orders[0])]  # shuffled


@pytest.mark.parametrize(
    ("text", "size", "reach", "head"),
    [
        ("one\ntwo three", 6, 6, "one\n"),
        ("one\ntwo three", 10, 4, "one\ntwo"),
        ("one\ntwo three", 10, 1, "one\ntwo th"),
        ("one\n", 4, 2, "one\n"),
        ("éééé", 3, 0, "é"),
        ("🙂🙂", 7, 9, "🙂"),
        ("word", 2, 0, "wo"),
        (" word", 3, 9, ""),
    ],
)
def test_a_document_is_cut_at_a_line_a_space_or_a_character(text, size, reach, head):
    assert cut(text, size, reach) == (head, text[len(head) :])


# ------------------------------------------------------------------------------------ the cache


def test_the_second_run_reads_the_cache(tmp_path):
    files = write(tmp_path, *WORDS)
    first = prepare(config(files, {"kind": "bpe", "vocab_size": 290}))
    stamps = {path.name: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    second = prepare(config(files, {"kind": "bpe", "vocab_size": 290}))
    assert {path.name: path.stat().st_mtime_ns for path in second.folder.iterdir()} == stamps
    assert sorted(stamps) == ["meta.json", "tokenizer.model", "train.bin", "val.bin"]
    assert streams(second) == streams(first)
    assert second.meta == first.meta


def test_preparing_anew_gives_the_same_bytes(tmp_path, monkeypatch):
    files = write(tmp_path, *WORDS)
    bpe = {"kind": "bpe", "vocab_size": 290}
    first = prepare(config(files, bpe))
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "another"))
    assert prepare(config(files, bpe)).meta == first.meta


def test_what_decides_the_tokens_decides_the_folder(tmp_path):
    files = write(tmp_path, *WORDS)
    bpe = {"kind": "bpe", "vocab_size": 290}
    model = prepare(config(files, bpe)).folder / "tokenizer.model"
    configs = [
        config(files, bpe),
        config(files, {"kind": "bpe", "vocab_size": 291}),
        config(files, {"kind": "bpe", "path": str(model)}),
        config(files),
        config(files, val_fraction=0.3),
        config(files, split_seed=1),
        config(files[:-1]),
    ]
    assert len({prepare(c).folder for c in configs}) == len(configs)


def test_a_changed_source_is_prepared_anew(tmp_path):
    files = write(tmp_path, *WORDS)
    first = prepare(config(files))
    write(tmp_path, "changed " + WORDS[0], *WORDS[1:])
    second = prepare(config(files))
    assert second.meta.source_hash != first.meta.source_hash
    both = second.tokenizer.decode([*second.train, *second.val])
    assert "changed document 0" in both


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json", "tokenizer.model"])
@pytest.mark.parametrize("damage", ["cut", "gone", "foreign"])
def test_a_damaged_cache_is_prepared_anew(tmp_path, name, damage):
    made = config(write(tmp_path, *WORDS), {"kind": "bpe", "vocab_size": 290})
    folder = prepare(made).folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    file = folder / name
    if damage == "cut":
        file.write_bytes(before[name][:-2])
    elif damage == "gone":
        file.unlink()
    else:
        file.write_bytes(b"{}")
    prepare(made)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_second_run_imports_neither_datasets_nor_torch_and_is_quick(tmp_path):
    files = write(tmp_path, *WORDS)
    prepare(config(files))
    program = (
        "import sys, time\n"
        "from minillama.config.run import RunConfig\n"
        "from minillama.data.prepare import prepare\n"
        f"data = {config(files).data.model_dump()!r}\n"
        "start = time.monotonic()\n"
        "prepare(RunConfig(data=data, tokenizer={'kind': 'byte'}))\n"
        "assert time.monotonic() - start < 1\n"
        "assert not {'datasets', 'torch', 'pyarrow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_several_processes_may_prepare_at_once(tmp_path):
    files = write(tmp_path, *WORDS)
    made = config(files, {"kind": "bpe", "vocab_size": 290}).model_dump(mode="json")
    program = (
        "import json\n"
        "from minillama.config.run import RunConfig\n"
        "from minillama.data.prepare import prepare\n"
        f"print(prepare(RunConfig(**json.loads({json.dumps(made)!r}))).meta.data_sha256)\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = {process.communicate(timeout=100)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(printed) == 1


# ---------------------------------------------------------------------------------- too little


def test_text_shorter_than_a_window_is_refused_with_its_counts(tmp_path):
    files = write(tmp_path, "x" * 100)
    with pytest.raises(
        DataError, match=r"has 81 tokens .* text 21, .* \+ 1 = 22; raise data.val_f"
    ):
        prepare(config(files, seq_len=21))
    with pytest.raises(DataError, match=r"has at most 78 tokens .* at most .* \+ 1 = 201; add"):
        prepare(config(files, seq_len=200, val_fraction=0.25))
    with pytest.raises(DataError, match=r"has at most 8 tokens .* most 98, .*; lower data.val_f"):
        prepare(config(files, seq_len=8, val_fraction=0.95))
    assert len(prepare(config(files, seq_len=20)).val) == 21


def test_too_little_text_is_told_before_the_tokenizer_complains(tmp_path):
    with pytest.raises(DataError, match="add text, or lower"):
        prepare(config(write(tmp_path, "tiny"), {"kind": "bpe"}, seq_len=128))


def test_a_vocabulary_that_does_not_fit_leaves_nothing_behind(tmp_path, cache):
    with pytest.raises(TokenizerError, match="= 5000 is too large"):
        prepare(config(write(tmp_path, *WORDS), {"kind": "bpe", "vocab_size": 5000}))
    assert [path for path in cache.rglob("*") if path.is_dir()] == [cache / "tokens"]
