"""Files from strangers: the result is always a model or one clear line, at a bounded cost.

Mutations are drawn from a seed, so that a failure can be reproduced.
"""

import json
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillama.interop import gguf, huggingface

SEEDS = range(50)
ABSURD = (
    0,
    -1,
    1 << 31,
    1 << 62,
    10**30,
    1e308,
    "64",
    "",
    None,
    [],
    {},
    [[[]]],
    True,
    0.5,
    "x" * 999,
)
MIB = 1 << 20

WORKER = """
import json, resource, shutil, sys, time
from minillama.errors import MinillamaError
from minillama.interop import gguf, huggingface
from minillama.training.checkpoint import load_checkpoint

unit = 1 if sys.platform == "darwin" else 1024
for line in sys.stdin:
    how, path, out = json.loads(line)
    shutil.rmtree(out, ignore_errors=True)
    error, started = None, time.process_time()
    try:
        if how == "load":
            load_checkpoint(path)
        else:
            {"hf": huggingface, "gguf": gguf}[how].import_model(path, out)
    except Exception as caught:
        kind = "MinillamaError" if isinstance(caught, MinillamaError) else "another"
        error = [kind, type(caught).__name__, str(caught)]
    seconds = time.process_time() - started
    peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([error, seconds, peak]), flush=True)
"""


class Importer:
    """A process that only imports, since a process's peak of memory never falls again.

    Cost is counted from the import of a sound file, which comes first.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.sound: tuple[float, int] | None = None

    def __call__(self, how: str, path: Path, mib: int = 50) -> "Result":
        """Import ``path``, within ``mib`` of memory and 50 times a sound file's CPU time."""
        assert self.process.stdin
        assert self.process.stdout
        request = [how, str(path), str(path.parent / "out")]
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        error, seconds, peak = json.loads(self.process.stdout.readline())
        if self.sound is None:
            assert error is None
            self.sound = seconds, peak
        assert seconds < 50 * self.sound[0]
        assert peak - self.sound[1] < mib * MIB
        if error is None:
            return Result("", "")
        kind, name, message = error
        assert kind == "MinillamaError", error
        assert 0 < len(message) < 5000
        return Result(name, message)


class Result(NamedTuple):
    """Of an import: the error's class and message, both empty if it went well."""

    error: str
    message: str


@pytest.fixture(scope="module")
def worker() -> Iterator[Importer]:
    importer = Importer()
    yield importer
    importer.process.communicate(timeout=300)


@pytest.fixture
def hf(save: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    huggingface.export(save("qwen3", rope_scaling={"kind": "linear", "factor": 2.0}), folder)
    return folder


@pytest.fixture
def run(worker: Importer, hf: Path) -> Importer:
    """The importing process, after it has imported a sound model."""
    if worker.sound is None:
        assert worker("hf", hf) == Result("", "")
    return worker


def import_copy(run: Importer, hf: Path, change: Callable[[Path], object]) -> Result:
    """Import a copy of ``hf`` after a ``change``."""
    copy = hf.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(hf, copy)
    change(copy)
    return run("hf", copy)


def mutated(value: Any, rng: random.Random) -> Any:
    """Change one thing somewhere inside a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        what = rng.random()
        if what < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.25:
            return value | {rng.choice(["new", "num_experts", "weight_map"]): rng.choice(ABSURD)}
        return value | {key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], mutated(value[place], rng), *value[place + 1 :]]
    return rng.choice(ABSURD)


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"],
)
def test_any_change_of_a_json_file(name, hf, run):
    if name == "model.safetensors.index.json":
        weights = load_file(hf / "model.safetensors")
        (hf / "model.safetensors").rename(hf / "part.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "part.safetensors")}
        (hf / name).write_text(json.dumps(index))
    if name.startswith("tokenizer"):
        (hf / "tokenizer.model").unlink()
    original = json.loads((hf / name).read_text(encoding="utf-8"))
    ended = set()
    for seed in SEEDS:
        rng = random.Random(seed)

        def change(copy: Path, rng: random.Random = rng) -> None:
            content = original
            for _ in range(rng.randint(1, 3)):
                content = mutated(content, rng)
            (copy / name).write_text(json.dumps(content), encoding="utf-8")

        ended.add(import_copy(run, hf, change).error == "")
    assert ended == {True, False}  # else the mutations are too tame or too wild


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.model", "tokenizer.json"]
)
def test_flipped_bytes_and_truncation(name, hf, run):
    for tokenizer in {"tokenizer.json", "tokenizer.model"} - {name}:
        if name.startswith("tokenizer"):
            (hf / tokenizer).unlink()
    original = (hf / name).read_bytes()
    ended = set()
    for seed in SEEDS:
        rng = random.Random(seed)

        def change(copy: Path, rng: random.Random = rng) -> None:
            content = bytearray(original)
            for _ in range(rng.randint(1, 4)):
                content[rng.randrange(min(len(content), 4000))] = rng.randrange(256)
            if rng.random() < 0.3:
                del content[rng.randrange(len(content)) :]
            (copy / name).write_bytes(content)

        ended.add(import_copy(run, hf, change).error == "")
    assert False in ended


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


HUGE = {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 1 << 62) + b"{}",
        safetensors({}),
        safetensors(b"[" * 100_000),
        safetensors({"model.norm.weight": HUGE}),
        safetensors({"model.norm.weight": HUGE | {"shape": [64], "data_offsets": [0, 256]}}),
        safetensors({"a": HUGE | {"shape": [1], "data_offsets": [4, 0]}}, b"1234"),
        safetensors({"a": HUGE | {"shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
    ],
)
def test_a_false_safetensors_header(content, hf, run):
    result = import_copy(run, hf, lambda copy: (copy / "model.safetensors").write_bytes(content))
    assert result.error == "CheckpointError"
    assert re.search("model.safetensors is damaged|do not fit|tensors", result.message)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers|n_layers"),
        ({"num_hidden_layers": 20_000}, "layers cannot be in"),
        ({"hidden_size": 1 << 40}, "beyond the size of any model"),
        ({"vocab_size": 1 << 23}, "the model needs"),
        ({"max_position_embeddings": 10**12}, "beyond the size|too large a table"),
        ({"max_position_embeddings": 1 << 24}, "too large a table of rotations"),
        ({"head_dim": 1 << 20}, "the model needs|too large"),
        ({"num_attention_heads": 1 << 23, "num_key_value_heads": 1 << 23}, "the model needs"),
    ],
)
def test_absurd_sizes_cost_nothing(change, said, hf, run):
    def enlarge(copy: Path) -> None:
        raw = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        (copy / "config.json").write_text(json.dumps(raw | change))

    result = import_copy(run, hf, enlarge)
    assert result.error == "CheckpointError"
    assert re.search(said, result.message)


@pytest.mark.parametrize(
    "change", [{"max_seq_len": 10**9}, {"dim": 1 << 22}, {"n_layers": 10**5}, {"vocab_size": 10**9}]
)
def test_a_checkpoint_with_false_sizes_costs_nothing(change, save, run):
    folder = save(name="false")
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")  # no checksums
    raw = json.loads((folder / "config.json").read_text())
    raw["model"] |= change
    (folder / "config.json").write_text(json.dumps(raw))
    result = run("load", folder)
    assert result.error == "CheckpointError"
    assert "does not fit" in result.message


def test_a_huge_json_is_not_read(hf, run):
    with (hf / "config.json").open("ab") as file:
        file.truncate(1 << 30)  # a hole: it takes no disk
    result = run("hf", hf)
    assert result.error == "CheckpointError"
    assert "too large" in result.message


def test_deeply_nested_json(hf, run):
    (hf / "config.json").write_text("[" * 200_000)
    result = run("hf", hf)
    assert result.error == "CheckpointError"
    assert "is not JSON" in result.message


def test_weights_need_not_be_finite(hf):
    """They are only copied; what is not finite is reported when it is used."""
    weights = load_file(hf / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, hf / "model.safetensors")
    huggingface.import_model(hf, hf.parent / "out")
    [copied] = (hf.parent / "out").rglob("model.safetensors")
    assert load_file(copied)["final_norm.weight"].isnan().all()


# ------------------------------------------------------------------------------------------- GGUF


@pytest.fixture
def gguf_file(save: Any, tmp_path: Path) -> Path:
    gguf.export(save("llama", name="sound"), tmp_path / "m.gguf", "q8_0")
    return tmp_path / "m.gguf"


def import_bytes(run: Importer, gguf_file: Path, content: bytes) -> Result:
    copy = gguf_file.with_name("copy.gguf")
    copy.write_bytes(content)
    return run("gguf", copy)


def test_any_change_of_a_gguf_header(gguf_file, run):
    original = gguf_file.read_bytes()
    header = original.index(b"blk.1.attn_q.weight") + 200
    ended = set()
    for seed in range(3 * len(SEEDS)):
        rng = random.Random(seed)
        content = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(header)
            if rng.random() < 0.5:
                content[place] = rng.randrange(256)
            else:  # a number of eight bytes, such as a length
                content[place : place + 8] = struct.pack("<Q", rng.choice([0, 1, 1 << 31, 1 << 62]))
        if rng.random() < 0.2:
            del content[rng.randrange(len(content)) :]
        ended.add(import_bytes(run, gguf_file, bytes(content)).error == "")
    assert ended == {True, False}


def start(n_tensors: int = 0, n_entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_entries)


ENTRY = start(0, 1) + struct.pack("<Q", 1) + b"k"
TENSOR = start(1) + struct.pack("<Q", 1) + b"t"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"GGUX" + bytes(60), "does not begin with GGUF"),
        (start(version=1) + bytes(60), "version 1"),
        (start(version=3 << 24) + bytes(60), "version 50331648"),  # of the other byte order
        (start(n_tensors=1 << 60), "cannot hold 1152921504606846976 tensors"),
        (start(n_entries=1 << 60), "cannot hold"),
        (start(0, 1) + struct.pack("<Q", 1 << 60) + bytes(20), "beyond the end"),
        (
            ENTRY + struct.pack("<IIQ", 9, 8, 1 << 60),
            "cannot hold",
        ),
        (ENTRY + struct.pack("<IIQ", 9, 4, 1 << 60) + bytes(64), "cannot hold"),
        (ENTRY + struct.pack("<IIQ", 9, 0, 5_000_000) + bytes(5_000_000), "cannot hold"),
        (ENTRY + struct.pack("<IIQ", 9, 9, 1), "of type 9"),
        (ENTRY + struct.pack("<IQ", 99, 0), "no type 99"),
        (
            TENSOR + struct.pack("<IQIQ", 1, 1 << 40, 0, 0),
            "t reaches beyond the end",
        ),
        (
            TENSOR + struct.pack("<IQIQ", 99, 1, 0, 0),
            "99 dimensions",
        ),
        (start() + bytes(64), "general.architecture = None"),
    ],
)
def test_a_false_gguf_header(content, said, gguf_file, run):
    result = import_bytes(run, gguf_file, content)
    assert result.error == "CheckpointError"
    assert said in result.message
