"""The kernels, compiled for processors that know less than this one, compute the same."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from minillama.model.kernels import library

CODE = """
import json, sys, torch
from minillama import ModelConfig, Transformer
from minillama.sampling import generate_batch
from minillama.model.kernels import library, rms_norm

numbers, tokens_made = [], []
for dtype in (torch.float32, torch.float64):
    config = ModelConfig(
        vocab_size=37, dim=40, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=41, max_seq_len=40,
        tie_embeddings=False,
    )
    model = Transformer(config, seed=1).to(dtype)
    tokens = torch.arange(4 * 33).view(4, 33) * 7 % 37
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    numbers += [loss.item(), *(p.grad.double().square().sum().item() for p in model.parameters())]
    tokens_made += generate_batch(model, [[1], [2, 3, 4], [5] * 9], 20, temperature=0)
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    x = (torch.arange(9 * 41).view(9, 41) * 7 % 37 / 8 - 2).to(dtype).requires_grad_()
    gain = (torch.arange(41) / 32 + 0.5).requires_grad_()
    y = rms_norm(x, gain, 1e-6)
    y.backward(x.detach().flip(0))
    numbers += [t.double().square().sum().item() for t in (y, x.grad, gain.grad)]
width = library.load(torch.float32).vector_bytes()
json.dump({"numbers": numbers, "tokens": tokens_made, "bytes": width}, sys.stdout)
"""


def computed(cache: Path, flags: str) -> dict[str, object]:
    compiler = os.environ.get("CC") or library.find_compiler()[0]
    environment = os.environ | {"CC": f"{compiler} {flags}", "MINILLAMA_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "plain PyTorch" not in done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 instructions")
def test_narrower_vectors_compute_the_same(tmp_path: Path) -> None:
    try:
        library.find_compiler()
    except library.BuildError:
        pytest.skip("no C compiler here")
    results = [
        computed(tmp_path / str(number), flags)
        for number, flags in enumerate(("", "-mno-avx512f", "-mno-avx"))
    ]
    widths = [result["bytes"] for result in results]
    assert widths[0] in (16, 32, 64)
    assert widths[2] == 16
    assert widths[1] == min(32, int(str(widths[0])))
    for result in results[1:]:
        assert result["numbers"] == pytest.approx(results[0]["numbers"], rel=1e-4)
        assert result["tokens"] == results[0]["tokens"]
