from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minillama.config.run import parse_run
from minillama.errors import ConfigError
from minillama.model.transformer import Transformer
from minillama.plan.compute import GPUS, count_flops, gpu_named, measure_cpu

BASE: dict[str, Any] = {
    "tokenizer": {"kind": "byte"},
    "model": {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 32},
    "data": {"seq_len": 24},
    "train": {"steps": 7, "batch_size": 2},
}


@pytest.mark.parametrize("tied", [True, False])
def test_the_flops_are_those_that_torch_counts(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    base = BASE | {"model": BASE["model"] | {"tie_embeddings": tied, "head_dim": 10}}
    config = parse_run(base, "test")
    # The counter knows torch's own operators alone: those of float64, and attention written out.
    for name in ("attention", "mlp"):
        monkeypatch.setattr(f"minillama.model.kernels.{name}.c_library", lambda *_, **__: None)
    model = Transformer(config.model).double()
    tokens_BT = torch.randint(259, (2, 24))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(tokens_BT).sum()
    forward = counter.get_total_flops()
    with counter, sdpa_kernel(SDPBackend.MATH):
        torch.autograd.backward(loss)
    backward = counter.get_total_flops()
    compute = count_flops(config)
    assert compute.forward * tokens_BT.numel() == forward
    assert compute.backward * tokens_BT.numel() == backward
    assert compute.tokens == 7 * 2 * 24
    assert compute.total == (forward + backward) * 7


def test_the_formula_is_palms_for_a_large_model() -> None:
    # Llama 2 7B: 6.607 billion parameters without the embedding, 32 layers of 32 heads of 128
    raw: dict[str, Any] = {
        "tokenizer": {"kind": "byte"},
        "model": {
            "vocab_size": 32000,
            "dim": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "ffn_dim": 11008,
            "max_seq_len": 4096,
            "tie_embeddings": False,
        },
        "data": {"seq_len": 4096},
    }
    compute = count_flops(parse_run(raw, "test"))
    n = 6_738_415_616 - 131_072_000 - 65 * 4096
    assert compute.forward + compute.backward == 6 * n + 12 * 32 * 32 * 128 * 4096


def test_time_is_flops_over_what_is_reached() -> None:
    compute = count_flops(parse_run(BASE, "test"))
    h100 = gpu_named("h100")
    assert compute.seconds(h100, 4, "bfloat16", 0.5) == pytest.approx(
        compute.total / (4 * 0.5 * 989.4e12)
    )
    assert compute.seconds(h100, 1, "float32", 1.0) == pytest.approx(compute.total / 67e12)


def test_an_unknown_gpu_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="unknown GPU 'h10'; did you mean 'h100'") as caught:
        gpu_named("h10")
    assert all(name in str(caught.value) for name in [*GPUS, "cpu"])


def test_the_cpu_is_measured() -> None:
    device = measure_cpu("float32", 1, seconds=0.05)
    assert 1e8 < device.peak("float32") < 1e15
    assert device.memory == 1
