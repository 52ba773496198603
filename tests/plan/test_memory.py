"""The plan's estimates, against what autograd saves and what a process really takes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minillama.config import ModelConfig
from minillama.config.run import parse_run
from minillama.model.transformer import Transformer
from minillama.plan import memory
from minillama.plan.memory import PROCESS, Execution, estimate_memory, measure_kept
from minillama.plan.parameters import layer_kinds
from minillama.training.optim import build_optimizer

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "dim": 96,
    "n_layers": 5,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 18,
    "ffn_dim": 160,
    "max_seq_len": 64,
}


def saved_bytes(model: Transformer, tokens_BT: torch.Tensor) -> int:
    """Return the bytes that forward keeps for backward, parameters aside."""
    storages: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens_BT).sum()
    return sum(
        tensor.untyped_storage().nbytes()
        for pointer, tensor in storages.items()
        if pointer not in weights
    )


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"n_kv_heads": 6},
        {"norm": {"kind": "layernorm", "placement": "peri", "embed_norm": True}},
        {"norm": {"placement": "post", "qk_norm": "full"}},
        {"norm": {"placement": "hybrid"}},
        {"norm": {"placement": "mix", "qk_norm": "head"}},
        {"norm": {"placement": "rezero"}},
        {"norm": {"kind": "none", "final_norm": True}},
        {"norm": {"kind": "dyt"}, "embed_scale": "learned"},
        {"norm": {"kind": "derf"}},
        {"norm": {"kind": "scalenorm"}},
        {"norm": {"options": {"partial": 0.5}}},
        {"norm": {"v_norm": True}, "attention_gate": "element"},
        {"norm": {"placement": "ngpt", "kind": "l2norm"}},
        {"ffn_dim": 161},  # no whole vectors
    ],
    ids=str,
)
@pytest.mark.parametrize("how", [Execution(), Execution(autocast=True)], ids=str)
def test_activations_are_what_autograd_saves(changed: dict[str, Any], how: Execution) -> None:
    config = ModelConfig.model_validate(SHAPE | changed)
    tokens_BT = torch.randint(300, (7, 64))
    with torch.autocast("cpu", torch.bfloat16, enabled=how.autocast):
        measured = saved_bytes(Transformer(config), tokens_BT)
    kept = measure_kept(config, how)
    copy_of_head = 2 * config.dim * 300 if how.autocast else 0
    estimated = tokens_BT.numel() * kept.per_token + kept.copies + copy_of_head
    assert estimated == pytest.approx(measured, rel=0.03)


def test_other_devices_keep_what_plain_pytorch_keeps() -> None:
    """RMSNorm and SwiGLU of plain PyTorch keep more than the kernels do, and repeat the heads."""
    config = ModelConfig.model_validate(SHAPE)
    on_cpu, elsewhere = (measure_kept(config, Execution(on_cpu=value)) for value in (True, False))
    heads = 4 * 3 * config.n_heads * config.head_dim
    mlp = 4 * 4 * config.ffn_dim
    assert elsewhere.per_token > on_cpu.per_token
    assert elsewhere.per_token > config.n_layers * (heads + mlp)


@pytest.mark.parametrize("how", [Execution(), Execution(autocast=True)], ids=str)
def test_a_block_that_is_scaled_down_keeps_the_same(
    how: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"dim": 1024, "ffn_dim": 2816, "n_heads": 8, "n_kv_heads": 4, "head_dim": 128}
    config = ModelConfig.model_validate(SHAPE | shape)
    scaled = measure_kept(config, how)
    monkeypatch.setattr(memory, "_LARGEST_BLOCK", 1 << 30)
    whole = measure_kept(config, how)
    assert scaled.per_token == pytest.approx(whole.per_token, rel=0.01)
    assert scaled.copies == pytest.approx(whole.copies, rel=0.01)


def test_measuring_draws_no_random_numbers_and_happens_once() -> None:
    config = ModelConfig.model_validate(SHAPE | {"dim": 128})
    state = torch.get_rng_state()
    measure_kept(config, Execution())
    assert torch.equal(torch.get_rng_state(), state)
    misses = memory._measure.cache_info().misses
    measure_kept(config, Execution())
    assert memory._measure.cache_info().misses == misses


def test_torchs_defaults_change_no_estimate() -> None:
    config = ModelConfig.model_validate(SHAPE)
    kept = measure_kept(config, Execution())
    memory._measure.cache_clear()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert measure_kept(config, Execution()) == kept
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_layers_of_each_kind_are_counted() -> None:
    kinds = {
        placement: layer_kinds(
            ModelConfig.model_validate(SHAPE | {"n_layers": 9, "norm": {"placement": placement}})
        )
        for placement in ("pre", "mix", "scaled")
    }
    assert kinds == {"pre": [(0, 9)], "mix": [(0, 2), (2, 7)], "scaled": [(0, 1), (1, 8)]}


MEASURE = """
import json, sys
import torch
import minillama.training.trainer as trainer
from minillama.config.run import parse_run
def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
torch.set_num_threads(1)
before = status("VmRSS")
trainer.train(parse_run(json.loads(sys.argv[1]), "test"), progress=False)
print(json.dumps({"before": before, "taken": status("VmHWM") - before}))
"""


def sized(dim: int, n_layers: int, vocab_size: int, seq_len: int, **train: Any) -> dict[str, Any]:
    return {
        "tokenizer": {"kind": "byte"},
        "model": {
            "dim": dim,
            "n_layers": n_layers,
            "n_heads": dim // 32,
            "n_kv_heads": dim // 64,
            "max_seq_len": seq_len,
            "vocab_size": vocab_size,
        },
        "data": {"seq_len": seq_len},
        "train": {"steps": 3, "device": "cpu", "eval_every": 0, **train},
    }


def measured_and_estimated(raw: dict[str, Any], tmp_path: Path) -> tuple[float, float]:
    """Train in a separate process; return how far its memory rose, and the estimate."""
    text = tmp_path / "text.txt"
    text.write_text("A plan is as good as its estimates. " * 10_000)
    source = {"kind": "files", "files": [str(text)]}
    raw = raw | {"data": raw["data"] | {"source": source, "val_fraction": 0.01}}
    raw |= {"out_dir": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(raw)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    # What the process holds before it trains is compared roughly: it depends on the build.
    assert figures["before"] == pytest.approx(PROCESS, rel=0.25)
    return figures["taken"], estimate_memory(parse_run(raw, "test"), on_cpu=True).peak_on_cpu


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")


@linux_only
def test_a_cpu_run_takes_the_estimated_memory(tmp_path: Path) -> None:
    raw = sized(256, 6, 4096, 128, batch_size=8)
    taken, estimated = measured_and_estimated(raw, tmp_path)
    assert estimated == pytest.approx(taken, rel=0.15)


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(sized(256, 8, 4096, 256, batch_size=16), id="activations weigh most"),
        pytest.param(sized(768, 8, 16384, 128, batch_size=4), id="the optimizer weighs most"),
        pytest.param(sized(512, 4, 32000, 128, batch_size=8), id="logits weigh most"),
        pytest.param(
            sized(256, 8, 4096, 256, batch_size=32, micro_batch_size=8), id="micro-batches"
        ),
        pytest.param(sized(256, 8, 4096, 256, batch_size=8, dtype="bfloat16"), id="bfloat16"),
        pytest.param(sized(256, 8, 4096, 256, batch_size=32, recompute=True), id="recomputed"),
        pytest.param(
            sized(256, 6, 4096, 128, batch_size=8, recompute=True), id="small, recomputed"
        ),
        pytest.param(
            sized(768, 8, 16384, 128, batch_size=4, recompute=True), id="optimizer, recomputed"
        ),
        pytest.param(
            sized(512, 4, 32000, 128, batch_size=8, recompute=True), id="logits, recomputed"
        ),
        pytest.param(
            sized(256, 8, 4096, 256, batch_size=32, micro_batch_size=8, recompute=True),
            id="micro-batches, recomputed",
        ),
        pytest.param(
            sized(256, 8, 4096, 256, batch_size=8, dtype="bfloat16", recompute=True),
            id="bfloat16, recomputed",
        ),
    ],
)
def test_larger_cpu_runs_take_the_estimated_memory(raw: dict[str, Any], tmp_path: Path) -> None:
    taken, estimated = measured_and_estimated(raw, tmp_path)
    assert estimated == pytest.approx(taken, rel=0.15)


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd", "lion"])
def test_the_optimizers_state_is_what_a_step_leaves(kind):
    fields = {"vocab_size": 300, "dim": 32, "n_layers": 2, "tie_embeddings": False}
    raw = {"model": fields, "optim": {"kind": kind}, "tokenizer": {"kind": "byte"}}
    config = parse_run(raw, "test")
    model = Transformer(config.model)
    optimizer = build_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    expected = sum(tensor.nbytes for tensor in kept)
    assert estimate_memory(config, on_cpu=True).optimizer == expected
