import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import numpy as np
import pytest

import minillama.data.files
import minillama.data.tables
from minillama.cli import main
from minillama.config import RunConfig
from minillama.config.run import parse_run, to_yaml
from minillama.data.prepare import damaged_files, prepare
from minillama.data.tokenizer import ByteTokenizer, train_tokenizer
from minillama.errors import DataError, SourceUnreachableError

BOS, EOS = 1, 2


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "cache"))


def config(files: list[str], tokenizer: dict | None = None, **data) -> RunConfig:
    source = {"kind": "files", "files": files, "format": "json"}
    data = {"source": source, "seq_len": 8, "val_fraction": 0.2, "shard_tokens": 2000, **data}
    return parse_run({"data": data, "tokenizer": tokenizer or {"kind": "byte"}}, "test")


def documents(n: int, first: int = 0) -> list[str]:
    return [
        f"document {i} says: " + f"word{i} " * (i % 30) + "é\n" for i in range(first, first + n)
    ]


def write(folder: Path, *tables: list[str]) -> list[str]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{i:03}.jsonl" for i in range(len(tables))]
    for path, texts in zip(paths, tables, strict=True):
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return [str(path) for path in paths]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(ids: np.ndarray) -> list[str]:
    """The texts between bos and eos, the cut ones at the border included."""
    borders = np.flatnonzero((ids == BOS) | (ids == EOS))
    parts = [ByteTokenizer().decode(part.tolist()) for part in np.split(ids, borders)]
    return [part for part in parts if part]


def count(ids: np.ndarray) -> tuple[int, int]:
    return int((ids == BOS).sum()), int((ids == EOS).sum())


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small sources in parts, as large ones are."""
    for module in (minillama.data.files, minillama.data.tables):
        monkeypatch.setattr(module, "PART_BYTES", 2000)


# ---------------------------------------------------------------------------------- what is made


@pytest.mark.usefixtures("_small_parts")
def test_shards_hold_every_document_once(tmp_path):
    tables = [documents(150), documents(60, 150), documents(1, 210)]
    prepared = prepare(config(write(tmp_path, *tables)))
    whole = [text for table in tables for text in table]
    train, val = np.asarray(prepared.train), np.asarray(prepared.val)
    texts = decoded(train) + decoded(val)
    uncut = [text for text in texts if text in whole]
    n_parts = len({file.file.split("-")[1] for file in prepared.train.files})
    assert n_parts > 1
    assert len(uncut) >= len(whole) - n_parts
    assert len(set(uncut)) == len(uncut)
    n_bytes = sum(len(text.encode()) for text in whole)
    assert sum(len(text.encode()) for text in texts) == n_bytes
    assert np.add(count(train), count(val)).tolist() == [len(whole)] * 2

    meta = prepared.meta
    assert meta.n_val_bytes / n_bytes == pytest.approx(0.2, rel=0.1)
    assert (meta.n_train_tokens, meta.n_val_tokens) == (len(train), len(val))
    assert meta.n_train_bytes == sum(len(text.encode()) for text in decoded(train))
    assert meta.n_val_bytes == sum(len(text.encode()) for text in decoded(val))
    assert meta.n_documents == len(whole)
    counts = np.unique(train, return_counts=True)[1]
    shares = counts / counts.sum()
    assert meta.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), rel=1e-12)

    first, *others = [shard for shard in prepared.train.files if "-00000-" in shard.file]
    assert first.file == "train-00000-00000.bin"
    assert len(others) > 2
    for shard in (first, *others[:-1]):
        assert 2000 <= shard.tokens < 2300
        assert (prepared.folder / shard.file).stat().st_size == 2 * shard.tokens
    record = json.loads((prepared.folder / "meta.json").read_text(encoding="utf-8"))
    assert record["train"][0] == first.model_dump()
    assert sum(shard["bytes"] for shard in record["train"] + record["val"]) == n_bytes


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("shard_tokens", [None, 2000])
def test_the_number_of_workers_changes_nothing(tmp_path, monkeypatch, shard_tokens):
    files = write(tmp_path, documents(80), documents(70, 100), documents(90, 200))
    alone = prepare(config(files, shard_tokens=shard_tokens))
    assert (alone.folder / "shard-00002-00000.json").exists()
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "another"))
    together = prepare(config(files, workers=2, shard_tokens=shard_tokens))
    assert together.folder.name == alone.folder.name
    assert contents(together.folder) == contents(alone.folder)


def test_the_split_follows_split_seed_and_fraction_and_not_the_shards(tmp_path):
    files = write(tmp_path, documents(400))
    splits = [
        set(decoded(np.asarray(prepare(config(files, **options)).val)))
        for options in ({}, {"shard_tokens": None}, {"split_seed": 1}, {"val_fraction": 0.4})
    ]
    assert splits[0] == splits[1]
    assert len(splits[0] & splits[2]) < 0.4 * len(splits[0])
    assert len(splits[0] - splits[3]) <= 1  # the one that the border cuts
    assert len(splits[3]) == pytest.approx(160, rel=0.2)


def test_the_tokenizer_is_trained_on_the_training_text_alone_and_once(tmp_path):
    texts = documents(200)
    files, bpe = write(tmp_path, texts), {"kind": "bpe", "vocab_size": 290}
    prepared = prepare(config(files, bpe))
    expected = train_tokenizer(decoded(np.asarray(prepare(config(files)).train)), 290)
    assert prepared.tokenizer.sha256 == prepared.meta.tokenizer_sha256 == expected.sha256
    assert expected.sha256 != train_tokenizer(texts, 290).sha256
    stamps = {path: path.stat().st_mtime_ns for path in prepared.folder.iterdir()}
    assert prepare(config(files, bpe)).meta == prepared.meta
    assert {path: path.stat().st_mtime_ns for path in prepared.folder.iterdir()} == stamps


def test_text_files_of_any_size(tmp_path):
    book = "".join(f"Line {i} of the only book there is.\n" for i in range(150_000))
    (tmp_path / "book.txt").write_text(book, encoding="utf-8")
    source = {"kind": "files", "files": [str(tmp_path / "book.txt"), str(tmp_path / "*.md")]}
    (tmp_path / "note.md").write_text("a note", encoding="utf-8")
    prepared = prepare(config([], source=source, shard_tokens=1_000_000, val_fraction=0.5))
    train, val = np.asarray(prepared.train), np.asarray(prepared.val)
    tokenizer = prepared.tokenizer
    lines = (tokenizer.decode(train) + tokenizer.decode(val)).replace("a note", "").splitlines()
    assert sorted(lines) == sorted(book.splitlines())
    assert prepared.meta.n_documents == 2
    both = np.concatenate([train, val])
    assert ((both == BOS).sum(), (both == EOS).sum()) == (2, 2)
    assert min(len(train), len(val)) > 0


def test_too_little_text_is_refused_with_its_counts(tmp_path):
    files = write(tmp_path, ["tiny"])
    with pytest.raises(DataError, match=r"training text has \d tokens and the held-out text \d"):
        prepare(config(files, seq_len=100))


def test_the_command_says_how_many_shards_there_are(tmp_path, capsys):
    files = write(tmp_path, documents(200))
    (tmp_path / "run.yaml").write_text(to_yaml(config(files)), encoding="utf-8")
    assert main(["data", "prepare", str(tmp_path / "run.yaml")]) == 0
    printed = capsys.readouterr().out
    n_shards = len(prepare(config(files)).train.files)
    assert n_shards > 5
    assert f"\nn_train_shards: {n_shards}\n" in printed


# ------------------------------------------------------------------------------ errors survived


# Without `if __name__ == "__main__"`, which workers must not need.
PROGRAM = """
import sys
from minillama.config import load_config
from minillama.data.prepare import prepare
prepare(load_config(sys.argv[1]))
"""


@pytest.mark.usefixtures("_small_parts")
def test_files_of_the_current_folder_do_not_shadow_the_standard_library(tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("".join(f"line {i} of the text\n" for i in range(20_000)), encoding="utf-8")
    for name in ("queue", "statistics", "pickle"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    source = {"kind": "files", "files": [str(text)]}
    prepared = prepare(config([], source=source, workers=2, shard_tokens=20_000))
    assert (prepared.folder / "meta.json").is_file()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_kill_loses_no_finished_shard(tmp_path, monkeypatch, workers):
    big = tmp_path / "big.txt"
    big.write_text("".join(f"line {i} of the text\n" for i in range(1_800_000)), encoding="utf-8")
    source = {"kind": "files", "files": [str(big)]}
    made = config([], source=source, shard_tokens=500_000, workers=workers)
    (tmp_path / "run.yaml").write_text(to_yaml(made), encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    undisturbed = prepare(made).folder
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "killed"))
    folder = tmp_path / "killed" / "tokens" / undisturbed.name
    for wanted in (1, 3, 6):
        running = subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "run.yaml")]
        )
        deadline = time.monotonic() + 300
        while len(list(folder.glob("shard-*.json"))) < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        running.send_signal(signal.SIGKILL)
        assert running.wait(10) == -signal.SIGKILL
        settled = None
        while settled != (settled := contents(folder)):  # its workers leave when they notice
            time.sleep(0.3)
        assert not (folder / "meta.json").exists()
        finished = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*.json")}
        assert len(finished) >= wanted
    prepare(made)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert contents(folder) == contents(undisturbed)


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("damage", ["cut", "gone", "replaced"])
@pytest.mark.parametrize(
    "name",
    [
        *("train-00000-00001.bin", "the last of val", "shard-00000-00002.json"),
        *("meta.json", "tokenizer.model"),
    ],
)
def test_a_damaged_cache_is_repaired(tmp_path, name, damage):
    files = write(tmp_path, documents(300), documents(300, 300))
    made = config(files, {"kind": "bpe", "vocab_size": 290})
    folder = prepare(made).folder
    name = prepare(made).val.files[-1].file if name == "the last of val" else name
    assert (folder / name).stat().st_size
    before = contents(folder)
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(before[name][:-2] if damage == "cut" else b"{}")
    if name.startswith("shard-"):
        (folder / "meta.json").unlink()  # else it is not read
    prepare(made)
    assert contents(folder) == before
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.bin")}
    changed = {file for file in stamps if stamps[file] != after[file]}
    number = name.partition("-")[2].partition(".")[0]
    assert changed == ({f"train-{number}.bin", f"val-{number}.bin"} if number else set())


def started(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """The command, at work with two workers, and the folder where its folder is."""
    big = tmp_path / "big.txt"
    big.write_text("".join(f"line {i} of the text\n" for i in range(4_000_000)), encoding="utf-8")
    source = {"kind": "files", "files": [str(big)]}
    made = config([], source=source, shard_tokens=1_000_000, workers=2)
    (tmp_path / "run.yaml").write_text(to_yaml(made), encoding="utf-8")
    running = subprocess.Popen(
        [sys.executable, "-m", "minillama", "data", "prepare", str(tmp_path / "run.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    tokens = tmp_path / "cache" / "tokens"
    while not list(tokens.glob("*/shard-*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    return running, tokens


@pytest.mark.parametrize("shard_tokens", [None, 2000])
def test_a_check_finds_a_flipped_bit_and_repairs_it(tmp_path, capsys, caplog, shard_tokens):
    files = write(tmp_path, documents(200))
    made = config(files, shard_tokens=shard_tokens)
    (tmp_path / "run.yaml").write_text(to_yaml(made), encoding="utf-8")
    prepared = prepare(made)
    assert damaged_files(prepared) == []
    before = contents(prepared.folder)
    name = f"train-00000-0000{0 if shard_tokens is None else 3}.bin"
    (prepared.folder / name).write_bytes(bytes([before[name][0] ^ 1]) + before[name][1:])
    arguments = ["data", "prepare", str(tmp_path / "run.yaml")]
    assert main(arguments) == 0  # the sizes are right
    assert contents(prepared.folder) != before
    assert main([*arguments, "--check"]) == 0
    assert contents(prepared.folder) == before
    assert f"{name} is damaged and is made again" in caplog.text
    capsys.readouterr()


def test_ctrl_c_ends_all_workers_and_keeps_finished_shards(tmp_path):
    running, tokens = started(tmp_path)
    running.send_signal(signal.SIGINT)
    _, printed = running.communicate(timeout=300)  # which waits for the workers' stderr too
    assert (running.returncode, "Traceback" in printed) == (130, False)
    assert list(tokens.glob("*/shard-*.json"))
    written = sum(path.stat().st_size for path in tokens.glob("*/*.bin"))
    assert written < 0.7 * 2 * (tmp_path / "big.txt").stat().st_size  # two bytes per token


def test_a_worker_that_is_killed_is_an_error_of_one_line(tmp_path):
    running, tokens = started(tmp_path)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    if not children.exists():
        running.kill()
        pytest.skip("the system does not list a process's children")
    workers = [
        int(pid)
        for pid in children.read_text().split()
        if b"shard_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(workers[0], signal.SIGKILL)
    _, printed = running.communicate(timeout=300)
    assert running.returncode == 1
    assert "a process that prepared data was killed" in printed
    assert "Traceback" not in printed
    assert list(tokens.glob("*/shard-*.json"))


def test_a_full_disk_is_an_error_of_one_line_and_leaves_shards(tmp_path):
    resource = pytest.importorskip("resource")
    files = write(tmp_path, [*documents(200), "one that is long " * 200])
    made = config(files)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        with pytest.raises(DataError, match=r"cannot write .*: File too large; set .*CACHE"):
            prepare(made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    tokens = tmp_path / "cache" / "tokens"
    assert list(tokens.glob("*/shard-*.json"))
    assert not list(tokens.glob("*/*unfinished*"))
    assert len(prepare(made).train) > 4000


# ------------------------------------------------------------------------------------- over HTTP


class Flaky(BaseHTTPRequestHandler):
    """Serves one file by ranges; near its end it hangs up ``drops`` times."""

    protocol_version = "HTTP/1.1"
    body = b""
    drops = 0

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        cls, start, end = type(self), 0, len(self.body)
        asked = self.headers.get("Range")
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            start, end = int(first), min(end, int(last) + 1)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(self.body)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if with_body and end > len(self.body) * 15 // 16 and cls.drops:
            cls.drops -= 1
            self.wfile.write(self.body[start : (start + end) // 2])
            self.close_connection = True
        elif with_body:
            self.wfile.write(self.body[start:end])

    def log_message(self, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    texts = [f"{i:06} " * 3000 for i in range(1600)]
    monkeypatch.setattr(Flaky, "body", "".join(f'{{"text": "{t}"}}\n' for t in texts).encode())
    monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0.01)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 3)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing of a client that leaves early."""

    with Server(("127.0.0.1", 0), Flaky) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/texts.jsonl"
        running.shutdown()


def test_a_broken_connection_is_restored_and_a_dead_one_keeps_what_is_done(
    url, tmp_path, monkeypatch
):
    made = config([url], shard_tokens=2_000_000)
    folder = prepare(made).folder
    undisturbed = contents(folder)

    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr(Flaky, "drops", 2)
    assert contents(prepare(made).folder) == undisturbed
    assert Flaky.drops == 0

    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "third"))
    monkeypatch.setattr(Flaky, "drops", 1000)
    with pytest.raises(
        SourceUnreachableError,
        match=r"connection to http.*texts\.jsonl was lost.*; [1-9]\d* finished shards are kept in",
    ) as error:
        prepare(made)
    assert "\n" not in str(error.value)
    third = tmp_path / "third" / "tokens" / folder.name
    finished = {path: path.stat().st_mtime_ns for path in third.glob("shard-*.json")}
    monkeypatch.setattr(Flaky, "drops", 0)
    again = contents(prepare(made).folder)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert again.keys() == undisturbed.keys()
    for name, content in again.items():
        # `datasets` may name one and the same place in a stream in several ways.
        assert name.startswith("shard-") or content == undisturbed[name]
