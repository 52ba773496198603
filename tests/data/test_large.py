"""Token data beyond memory: what it takes does not grow with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minillama.config.run import parse_run, to_yaml

pytest.importorskip("resource")

MIB = 1 << 20

MEASURED = """
import json
import resource
import sys
from pathlib import Path

import numpy as np
import torch

from minillama.config import load_config
from minillama.data.batches import Batches, rows_of_rank
from minillama.data.prepare import prepare
from minillama.data.shards import ShardFile, TokenShards

torch.set_num_threads(1)


def peak():
    # Of this process or of a child that has ended, the largest; pages of mapped files included.
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    size = max(resource.getrusage(who).ru_maxrss for who in whose)
    return size * (1 if sys.platform == "darwin" else 1024)


def read(tokens, seq_len, n_steps):
    batches = Batches(tokens, seq_len, 16, 0)
    last = batches.n_windows // 16 - 1
    for step in [0, last, *np.random.default_rng(0).integers(0, 3 * last, n_steps).tolist()]:
        parts = [batches.batch_at(step, rows_of_rank(16, rank, 3))[0] for rank in range(3)]
        inputs, targets = batches.batch_at(step)
        assert torch.equal(torch.cat(parts), inputs)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    return batches.n_windows
"""

READ = """
folder, n_shards, shard_tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
files = []
for number in range(n_shards):
    path = folder / f"train-{number:05}.bin"
    with path.open("wb") as file:
        file.write(np.array([2 * number + 1], "<u2").tobytes())
        file.truncate(2 * shard_tokens)  # a hole in the file, which takes no disk
        file.seek(2 * shard_tokens - 2)
        file.write(np.array([2 * number + 2], "<u2").tobytes())
    files.append(ShardFile(file=path.name, tokens=shard_tokens, bytes=0, sha256=path.name))
tokens = TokenShards(folder, files, "uint16")
read(TokenShards(folder, files[:1], "uint16"), 128, 1)
before = peak()
n_windows = read(tokens, 128, 3000)
borders = [shard_tokens * number for number in range(1, n_shards)]
found = [tokens[at - 1 : at + 2].tolist() for at in borders]
assert found == [[2 * n, 2 * n + 1, 0] for n in range(1, n_shards)]
total = sum(int(tokens[at : at + (1 << 20)].sum()) for at in range(0, len(tokens), 1 << 20))
assert total == sum(range(1, 2 * n_shards + 1))
print(json.dumps({"n_tokens": len(tokens), "n_windows": n_windows, "growth": peak() - before}))
"""

PREPARE = """
small, large = map(load_config, sys.argv[1:])
prepared = prepare(small)
read(prepared.train, 128, 1)
before = peak()
prepared = prepare(large)
n_windows = read(prepared.train, 128, 1000)
counts = [
    sum(int((t[at : at + (1 << 20)] == 2).sum()) for at in range(0, len(t), 1 << 20))
    for t in (prepared.train, prepared.val)
]
print(json.dumps({**prepared.meta.model_dump(), "n_windows": n_windows, "n_eos": sum(counts),
                  "growth": peak() - before}))
"""


def measured(folder: Path, program: str, *arguments: object) -> dict:
    (folder / "program.py").write_text(MEASURED + program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(folder / "program.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_billion_tokens_are_read_in_bounded_memory(tmp_path):
    found = measured(tmp_path, READ, tmp_path, 20, 50_000_000)
    assert found["n_tokens"] == 1_000_000_000
    assert found["n_windows"] == (1_000_000_000 - 1) // 128
    print(found["growth"] / MIB, "MiB")
    assert found["growth"] < 150 * MIB


LINES = [f"Line {i} of a text that comes again and again.\n" for i in range(20_000)]


def repeated(folder: Path, format: str, times: int, workers: int) -> Path:
    """Write the config of a source that is one file of about 1 MB under many names."""
    folder.mkdir()
    if format == "text":
        (folder / "one").write_text("".join(LINES), encoding="utf-8")
    else:
        texts = ["".join(LINES[at : at + 50]) for at in range(0, len(LINES), 50)]
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "one").write_text(rows, encoding="utf-8")
    for number in range(times):
        (folder / f"{number:05}.{format}").hardlink_to(folder / "one")
    source = {"kind": "files", "format": format, "files": [str(folder / f"*.{format}")]}
    data = {"source": source, "shard_tokens": 20_000_000, "workers": workers, "val_fraction": 0.3}
    made = parse_run({"data": data, "tokenizer": {"kind": "byte"}}, "test")
    (folder / "run.yaml").write_text(to_yaml(made), encoding="utf-8")
    return folder / "run.yaml"


@pytest.mark.parametrize(
    ("format", "times", "workers"),
    [
        ("text", 50, 0),
        ("json", 50, 0),
        pytest.param("text", 1070, 0, marks=pytest.mark.slow),
        pytest.param("json", 1070, 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_prepared_in_bounded_memory(tmp_path, monkeypatch, format, times, workers):
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "cache"))
    small = repeated(tmp_path / "small", format, 20, workers)
    large = repeated(tmp_path / "large", format, times, workers)
    found = measured(tmp_path, PREPARE, small, large)
    n_documents = times * (1 if format == "text" else 400)
    assert found["n_documents"] == found["n_eos"] == n_documents
    n_bytes = times * sum(len(line) for line in LINES)
    assert found["n_train_bytes"] + found["n_val_bytes"] == n_bytes
    assert found["n_train_tokens"] + found["n_val_tokens"] == n_bytes + 2 * n_documents
    print(found["growth"] / MIB, "MiB")
    assert found["growth"] < 150 * MIB
