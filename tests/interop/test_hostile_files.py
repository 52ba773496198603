"""Files from strangers: whatever is in them, the end is a model or one clear line.

Mutations are drawn from a seed, so that a failure can be run again.
"""

import contextlib
import json
import random
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillama.errors import CheckpointError, MinillamaError
from minillama.interop import gguf_import, huggingface
from minillama.interop.gguf import export as export_gguf
from minillama.training.checkpoint import load_checkpoint

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


@contextlib.contextmanager
def bounded(seconds: float = 5.0, mib: int = 300) -> Iterator[None]:
    """Fail if the body takes long or much memory."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    yield
    assert time.perf_counter() - started < seconds
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < mib * MIB


def survives(run: Callable[[], Any]) -> bool:
    """Run it; tell whether it went well, and let nothing pass but our errors."""
    with bounded():
        try:
            run()
        except MinillamaError as error:
            return not 0 < len(str(error)) < 5000
        return True


@pytest.fixture
def hf(save: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    huggingface.export(save("qwen3", rope_scaling={"kind": "linear", "factor": 2.0}), folder)
    return folder


def import_copy(hf: Path, change: Callable[[Path], None]) -> Callable[[], Any]:
    """Return what imports a copy of ``hf`` after a ``change``."""

    def run() -> None:
        copy, out = hf.parent / "copy", hf.parent / "out"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(hf, copy)
        change(copy)
        huggingface.import_model(copy, out)

    return run


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
def test_any_change_of_a_json_file(name, hf):
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

        ended.add(survives(import_copy(hf, change)))
    assert ended == {True, False}  # else the mutations are too tame or too wild to show much


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.model", "tokenizer.json"]
)
def test_flipped_bytes_and_truncation(name, hf):
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

        ended.add(survives(import_copy(hf, change)))
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
def test_a_header_that_lies(content, hf):
    said = []

    def lie(copy: Path) -> None:
        (copy / "model.safetensors").write_bytes(content)

    def run() -> None:
        try:
            import_copy(
                hf, lambda copy: (copy / "model.safetensors").write_bytes(content) and None
            )()
        except CheckpointError as error:
            said.append(str(error))
            raise

    assert not survives(run)
    assert (
        "model.safetensors is damaged" in said[0] or "do not fit" in said[0] or "tensors" in said[0]
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers|n_layers"),
        ({"num_hidden_layers": 20_000}, "layers cannot be in"),
        ({"hidden_size": 1 << 40}, "beyond the size of any model"),
        ({"vocab_size": 1 << 23}, "the config says"),
        ({"max_position_embeddings": 10**12}, "beyond the size|too large a table"),
        ({"max_position_embeddings": 1 << 24}, "too large a table of rotations"),
        ({"head_dim": 1 << 20}, "the config says|too large"),
        ({"num_attention_heads": 1 << 23, "num_key_value_heads": 1 << 23}, "the config says"),
    ],
)
def test_absurd_sizes_cost_nothing(change, said, hf):
    def enlarge(copy: Path) -> None:
        raw = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        (copy / "config.json").write_text(json.dumps(raw | change))

    with bounded(seconds=2, mib=50), pytest.raises(CheckpointError, match=said):
        import_copy(hf, enlarge)()


@pytest.mark.parametrize(
    "change", [{"max_seq_len": 10**9}, {"dim": 1 << 22}, {"n_layers": 10**5}, {"vocab_size": 10**9}]
)
def test_a_checkpoint_that_lies_costs_nothing(change, save):
    folder = save()
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")  # no checksums
    raw = json.loads((folder / "config.json").read_text())
    raw["model"] |= change
    (folder / "config.json").write_text(json.dumps(raw))
    with bounded(seconds=2, mib=50), pytest.raises(CheckpointError, match="does not fit"):
        load_checkpoint(folder)


def test_a_huge_json_is_not_read(hf, monkeypatch):
    with (hf / "config.json").open("ab") as file:
        file.truncate(1 << 30)  # a hole: it takes no disk
    with bounded(mib=50), pytest.raises(CheckpointError, match="too large"):
        huggingface.import_model(hf, hf.parent / "out")


def test_deeply_nested_json(hf):
    (hf / "config.json").write_text("[" * 200_000)
    with bounded(), pytest.raises(CheckpointError, match="is not JSON"):
        huggingface.import_model(hf, hf.parent / "out")


def test_weights_of_a_stranger_are_not_trusted_to_be_finite(hf):
    """They are only copied: what is not finite is told when it is used."""
    weights = load_file(hf / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, hf / "model.safetensors")
    huggingface.import_model(hf, hf.parent / "out")
    [copied] = (hf.parent / "out").rglob("model.safetensors")
    assert load_file(copied)["final_norm.weight"].isnan().all()


# ------------------------------------------------------------------------------------------- GGUF


@pytest.fixture
def gguf_file(save: Any, tmp_path: Path) -> Path:
    export_gguf(save("llama"), tmp_path / "m.gguf", "q8_0")
    return tmp_path / "m.gguf"


def import_bytes(gguf_file: Path, content: bytes) -> Callable[[], Any]:
    def run() -> None:
        copy, out = gguf_file.with_name("copy.gguf"), gguf_file.with_name("out")
        shutil.rmtree(out, ignore_errors=True)
        copy.write_bytes(content)
        gguf_import.import_model(copy, out)

    return run


def test_any_change_of_a_gguf_header(gguf_file):
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
        ended.add(survives(import_bytes(gguf_file, bytes(content))))
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
def test_a_gguf_header_that_lies(content, said, gguf_file):
    with bounded(seconds=2, mib=50), pytest.raises(CheckpointError, match=said):
        import_bytes(gguf_file, content)()
