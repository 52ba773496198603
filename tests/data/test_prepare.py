import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minillama.config import RunConfig
from minillama.data.prepare import Prepared, prepare
from minillama.data.split import Piece, split_block
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


def streams(prepared: Prepared) -> tuple[list[int], list[int]]:
    return prepared.train[:].tolist(), prepared.val[:].tolist()


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


def test_meta_has_the_counts_of_the_text(tmp_path):
    prepared = prepare(config(write(tmp_path, *WORDS, "Ünïcödé 你好\n")))
    meta = prepared.meta
    total = sum(len(text.encode()) for text in WORDS) + len("Ünïcödé 你好\n".encode())
    assert meta.n_train_bytes + meta.n_val_bytes == total
    assert (meta.n_train_tokens, meta.n_val_tokens) == (len(prepared.train), len(prepared.val))
    assert meta.n_documents == 41
    assert meta.tokenizer_sha256 == prepared.tokenizer.sha256
    assert meta.dtype == "uint16"
    text_tokens = np.concatenate([prepared.train[:], prepared.val[:]]) > 2
    assert text_tokens.sum() == total  # one byte, one token

    _, counts = np.unique(prepared.train[:], return_counts=True)
    shares = counts / counts.sum()
    assert meta.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)
    assert json.loads((prepared.folder / "meta.json").read_text()) == meta.model_dump(mode="json")


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
    train, _ = split_block([Piece(text) for text in WORDS], 0.2, 0)
    expected = train_tokenizer([piece.text for piece in train], 290)
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
    assert prepared.val[:].max() >= 1 << 16
    train, val = streams(prepared)
    assert prepared.tokenizer.decode(train + val) == every_character


# ------------------------------------------------------------------------------------ the split


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


@pytest.mark.parametrize("shard_tokens", [None, 1000])
def test_a_long_document_is_split_whatever_the_shards(tmp_path, shard_tokens):
    book = "".join(f"Line {i} of the only book there is.\n" for i in range(250_000))  # 9.5 MB
    made = config(write(tmp_path, book), val_fraction=0.05, shard_tokens=shard_tokens)
    prepared = prepare(made)
    assert prepared.meta.n_val_bytes / len(book) == pytest.approx(0.05, rel=0.001)
    train, val = streams(prepared)
    assert prepared.tokenizer.decode(train) + prepared.tokenizer.decode(val) == book
    assert val == prepare(config(write(tmp_path, book), val_fraction=0.05)).val[:].tolist()


# ------------------------------------------------------------------------------------ the cache


def test_the_second_run_reads_the_cache(tmp_path):
    files = write(tmp_path, *WORDS)
    first = prepare(config(files, {"kind": "bpe", "vocab_size": 290}))
    stamps = {path.name: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    second = prepare(config(files, {"kind": "bpe", "vocab_size": 290}))
    assert {path.name: path.stat().st_mtime_ns for path in second.folder.iterdir()} == stamps
    number = "00000-00000"
    assert sorted(stamps) == [
        "meta.json",
        f"shard-{number}.json",
        "tokenizer.model",
        f"train-{number}.bin",
        f"val-{number}.bin",
    ]
    assert streams(second) == streams(first)
    assert second.meta == first.meta


def test_preparing_again_gives_the_same_bytes(tmp_path, monkeypatch):
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
        config(files, shard_tokens=1000),
    ]
    assert len({prepare(c).folder for c in configs}) == len(configs)


def test_moved_files_are_the_same_data(tmp_path):
    (tmp_path / "moved").mkdir()
    files = write(tmp_path, *WORDS)
    first = prepare(config(files))
    moved = [str(Path(file).rename(tmp_path / "moved" / Path(file).name)) for file in files]
    second = prepare(config(moved))
    assert (second.folder, second.sha256) == (first.folder, first.sha256)
    changed = prepare(config(write(tmp_path, "changed " + WORDS[0], *WORDS[1:])))
    assert changed.sha256 != first.sha256


def test_a_changed_source_is_prepared_again(tmp_path):
    files = write(tmp_path, *WORDS)
    first = prepare(config(files))
    write(tmp_path, "changed " + WORDS[0], *WORDS[1:])
    second = prepare(config(files))
    assert second.meta.source_hash != first.meta.source_hash
    both = second.tokenizer.decode([*second.train[:], *second.val[:]])
    assert "changed document 0" in both


def test_a_second_run_imports_no_datasets_or_torch_and_writes_nothing(tmp_path):
    files = write(tmp_path, *WORDS)
    prepare(config(files))
    program = (
        "import os, sys\n"
        "from minillama.config.run import RunConfig\n"
        "from minillama.data.prepare import prepare\n"
        f"data = {config(files).data.model_dump()!r}\n"
        "written = []\n"
        "def watch(event, found):\n"
        "    if event == 'open' and found[2] & (os.O_WRONLY | os.O_RDWR):\n"
        "        written.append(str(found[0]))\n"
        "sys.addaudithook(watch)\n"
        "prepare(RunConfig(data=data, tokenizer={'kind': 'byte'}))\n"
        "assert all(file.endswith('.lock') for file in written), written\n"
        "assert not {'datasets', 'torch', 'pyarrow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


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
    printed = {process.communicate(timeout=300)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(printed) == 1


# ---------------------------------------------------------------------------------- too little


def test_text_shorter_than_a_window_is_refused_with_its_counts(tmp_path):
    files = write(tmp_path, "x" * 100)
    with pytest.raises(
        DataError, match=r"has 81 tokens .* text 21, .* \+ 1 = 22; raise data.val_f"
    ):
        prepare(config(files, seq_len=21))
    with pytest.raises(DataError, match=r"has 76 tokens .* text 26, .* \+ 1 = 201; add"):
        prepare(config(files, seq_len=200, val_fraction=0.25))
    with pytest.raises(DataError, match=r"has 6 tokens .* text 96, .*; lower data.val_f"):
        prepare(config(files, seq_len=8, val_fraction=0.95))
    assert len(prepare(config(files, seq_len=20)).val) == 21


def test_too_little_text_is_reported_rather_than_too_large_a_vocabulary(tmp_path):
    with pytest.raises(DataError, match=r"has at most 3 tokens .* most 1, .* add text, or lower"):
        prepare(config(write(tmp_path, "tiny"), {"kind": "bpe"}, seq_len=128))
    with pytest.raises(DataError, match="no text in "):
        prepare(config(write(tmp_path, " \n"), {"kind": "bpe"}))
    with pytest.raises(DataError, match="no text in "):
        prepare(config(write(tmp_path, " \n")))


@pytest.mark.parametrize("tokenizer", [{"kind": "byte"}, {"kind": "bpe", "vocab_size": 290}])
def test_damaged_text_leaves_nothing_behind(tmp_path, cache, tokenizer):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"text " * 999 + b"caf\xe9")
    with pytest.raises(DataError, match="not UTF-8 at byte 4998"):
        prepare(config([str(path)], tokenizer))
    assert [path for path in cache.rglob("*") if path.is_dir()] == [cache / "tokens"]
    path.write_bytes(b"text " * 999)
    assert prepare(config([str(path)], {"kind": "byte"})).meta.n_documents == 1


def test_a_vocabulary_that_does_not_fit_leaves_nothing_behind(tmp_path, cache):
    with pytest.raises(TokenizerError, match="= 5000 is too large"):
        prepare(config(write(tmp_path, *WORDS), {"kind": "bpe", "vocab_size": 5000}))
    assert [path for path in cache.rglob("*") if path.is_dir()] == [cache / "tokens"]
