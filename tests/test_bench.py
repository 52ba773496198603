"""What the benchmarks measure and return; how fast it is, no test can know."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from minillama import bench
from minillama.bench import ablation, norm_steps, norms, shapes, timing
from minillama.config import ModelConfig
from minillama.errors import ConfigError, RunFolderError
from minillama.model.transformer import Transformer


def test_norms_have_a_row_for_each_setting_and_say_what_was_compared() -> None:
    before = torch.get_num_threads()
    result = norms.bench((1, 2), shapes=((8, 4), (8, 16)), rounds=3, seconds=0, steps=())
    assert torch.get_num_threads() == before
    settings = [(r["threads"], r["dim"], r["direction"], r["cache"]) for r in result["rows"]]
    assert settings == [
        (threads, dim, direction, cache)
        for threads in (1, 2)
        for dim in (4, 16)
        for direction in ("forward", "forward+backward")
        for cache in ("cold", "warm")
    ]
    for row in result["rows"]:
        assert row["rounds"] == 3
        assert set(row["ratio"]) == {"layer_norm", "layer_norm without bias", "torch rms_norm"}
        for ratio in row["ratio"].values():
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        tensors = 2 if row["direction"] == "forward" else 5
        moved = tensors * 4 * row["rows"] * row["dim"]
        assert row["gb_per_s"] == pytest.approx(moved / row["time_us"]["minillama"] / 1e3)
    assert json.loads(json.dumps(result)) == result


def test_the_limit_is_the_time_to_copy_what_must_move() -> None:
    times = {"minillama": [6.0, 10.0, 8.0], "copy": [2.0, 2.0, 1.0], "layer_norm": [8.0, 8.0, 8.0]}
    both = norms._norm_row(1, 8, 4, "forward+backward", "cold", times)
    assert (
        both["over_limit"]["median"] == 2.0
    )  # five tensors move, a copy moves two: 6/5 10/5 8/2.5
    assert both["ratio"]["layer_norm"]["median"] == 1.0
    forward = norms._norm_row(1, 8, 4, "forward", "cold", times)
    assert forward["over_limit"]["median"] == 5.0


def test_means_are_geometric_over_the_shapes() -> None:
    rows = [
        {"threads": 1, "direction": "forward", "cache": "cold", "ratio": {"a": {"median": ratio}}}
        for ratio in (0.5, 0.8)
    ]
    (mean,) = norms._means(rows)
    assert mean["geometric_mean"] == pytest.approx(math.sqrt(0.4))
    assert mean["greatest"] == 0.8


def test_contenders_take_turns_in_changing_order() -> None:
    called: list[str] = []
    contenders = {name: lambda name=name: called.append(name) for name in "abc"}
    times = timing.alternate(contenders, rounds=8, calls=2)
    rounds = ["".join(called[start : start + 9]) for start in range(0, 72, 9)]
    for turn in rounds:
        assert sorted(turn) == sorted("aaabbbccc")
        assert turn[0] * 3 + turn[3] * 3 + turn[6] * 3 == turn  # one untimed, two timed
    assert len(set(rounds)) > 1
    assert {name: len(t) for name, t in times.items()} == {"a": 8, "b": 8, "c": 8}


def test_an_untimed_call_comes_before_each_sample() -> None:
    called: list[str] = []
    contenders = {name: lambda name=name: called.append(name) for name in "ab"}
    timing.alternate(contenders, rounds=3, calls=2, untimed=lambda: called.append("."))
    samples = "".join(called).split(".")[1:]
    assert sorted(samples) == ["aa"] * 3 + ["bb"] * 3


def test_steps_with_each_norm_are_compared_in_time_and_memory() -> None:
    shape = shapes.Shape(dim=32, n_layers=1, vocab_size=20, batch=2, length=8)
    (row,) = norm_steps.bench_steps((1,), (shape,), rounds=3)
    assert row["rounds"] == 3
    assert set(row["ratio"]) == set(norm_steps.NORMS) - {"rmsnorm"}
    for name, share in row["share"].items():
        assert share["low"] <= share["median"] <= share["high"] < 1, name
    assert row["ratio"]["none"]["median"] == pytest.approx(
        1 / (1 - row["share"]["rmsnorm"]["median"])
    )
    assert 0 < row["peak_mib"]["none"] < row["peak_mib"]["layernorm"]


def test_the_peak_is_that_of_the_tensors_alive_at_once() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)

    def step() -> None:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(400)
        del second, third

    assert 1500 * 4 <= norm_steps.peak_bytes(layer, step) < 1900 * 4


def test_rounds_go_on_until_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def wait() -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr("minillama.bench.timing.time.perf_counter", lambda: now)
    times = timing.alternate({"a": wait}, rounds=2, seconds=10.0)
    assert times == {"a": [1.0] * 5}  # each round has an untimed call and a timed one


def test_run_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = shapes.Shape(dim=16, n_layers=1, vocab_size=20, batch=2, length=8)
    tiny = norms.bench(threads=(1,), shapes=((8, 4),), rounds=2, seconds=0, steps=(step,))
    monkeypatch.setattr(norms, "bench", lambda threads: tiny | {"asked": threads})
    table = bench.run("norms", str(tmp_path / "norms.json"), 1)
    written = json.loads((tmp_path / "norms.json").read_text())
    assert written == tiny | {"asked": [1]}
    assert "8×4" in table
    assert "geometric mean" in table
    assert "share of rmsnorm" in table
    with pytest.raises(RunFolderError, match="cannot be written"):
        bench.run("norms", str(tmp_path / "no" / "norms.json"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # x-transformers' use
def test_the_step_is_compared_with_peers_of_the_same_shape() -> None:
    from minillama.bench import peers, step

    shape = shapes.Shape(dim=64, n_layers=2, vocab_size=40, batch=2, length=16, n_heads=2)
    config = ModelConfig(dim=64, n_layers=2, vocab_size=40, max_seq_len=16, n_heads=2)
    count = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
    ours = count(Transformer(config))
    assert count(peers.hf_llama(config)) == ours
    assert config.ffn_dim is not None
    assert count(peers.x_transformer(config)) == ours + 2 * 2 * config.ffn_dim
    result = step.bench(threads=(1,), shapes=(shape,), rounds=2, seconds=0, compiled=False)
    assert json.loads(json.dumps(result)) == result
    (row,) = result["rows"]
    assert set(row["speedup"]) == {step.EAGER, step.X_TRANSFORMERS}
    assert set(row["time_ms"]) == {step.OURS, step.PRODUCTS, step.EAGER, step.X_TRANSFORMERS}
    assert "over x-transformers" in step.show(result)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_a_step_changes_every_weight_of_each_peer() -> None:
    from minillama.bench import peers

    config = ModelConfig(dim=64, n_layers=1, vocab_size=10, max_seq_len=16, n_heads=2)
    tokens = torch.arange(34).view(2, 17) % 10
    llama, other = peers.hf_llama(config), peers.x_transformer(config)
    steps = [peers.hf_step(llama, llama, tokens), peers.x_step(other, tokens)]
    for model, step in zip((llama, other), steps, strict=True):
        before = [p.detach().clone() for p in model.parameters()]
        step()
        assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(("what", "threads"), [("norm", None), ("norms", 0), ("norms", 10**20)])
def test_faulty_arguments_are_refused(what: str, threads: int | None) -> None:
    with pytest.raises(ConfigError):
        bench.run(what, None, threads)


def test_the_ablation_runs_the_same_cells_on_one_worker_and_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "mine"))
    (tmp_path / "text.txt").write_text("A bench is a long seat for several at once. " * 40)
    source = {"kind": "files", "files": [str(tmp_path / "text.txt")]}
    base = {
        "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 16, "ffn_dim": 16},
        "tokenizer": {"kind": "byte"},
        "data": {"source": source, "seq_len": 16, "val_fraction": 0.1},
        "train": {"steps": 3, "batch_size": 2, "eval_every": 0, "device": "cpu"},
    }
    result = ablation.bench(threads=(1, 2), rounds=1, base=base)
    assert json.loads(json.dumps(result)) == result
    assert [(row["workers"], row["threads"]) for row in result["rows"]] == [(1, 2), (2, 1)]
    one, two = result["rows"]
    assert one["ratio"]["median"] == 1
    assert two["ratio"]["median"] == two["wall_s"]["median"] / one["wall_s"]["median"]
    for row in result["rows"]:
        assert 0 < row["later_start_s"]["median"] < row["first_start_s"]["median"]
        assert row["first_start_s"]["median"] < row["wall_s"]["median"]
        assert row["overhead_s"]["median"] * 8 <= row["wall_s"]["median"] * row["workers"]
    assert not (tmp_path / "mine").exists()  # it leaves the user's cache alone
    table = ablation.show(result)
    assert "8 cells" in table
    assert "of compilation" in table
