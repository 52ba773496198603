"""The check of a GPU, on whatever device there is: what it measures, and that it can fail."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minillama import bench
from minillama.errors import MinillamaError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # x-transformers uses torch.jit.script
    from minillama.bench import gpu

TINY = dataclasses.replace(
    gpu.CPU_SIZES, norm=(16, 8), step=gpu.Shape(16, 1, 64, 2, 8, 2), seconds=1e-3
)


def test_norms_and_a_step_are_checked_and_timed() -> None:
    result = gpu.bench(sizes=TINY, parts=("accuracy", "norm speed", "training step"))
    assert result["passed"], gpu.show(result)
    assert json.loads(json.dumps(result)) == result
    by_part = {part: [f for f in result["figures"] if f["part"] == part] for part in gpu.PARTS}
    checked = {figure["what"] for figure in by_part["accuracy"]}
    assert {f"rmsnorm, {name}" for name in ("float32", "bfloat16", "float16")} <= checked
    assert all(figure["passed"] for figure in by_part["accuracy"])
    speeds = {figure["what"].partition(",")[0] for figure in by_part["norm speed"]}
    assert {"copy", "F.rms_norm", "minillama RMSNorm", "residual + RMSNorm"} <= speeds
    rates = [figure for figure in by_part["training step"] if figure["unit"] == "tokens/s"]
    assert [figure["what"].partition(",")[0] for figure in rates] == ["minillama", "transformers"]
    assert all(figure["value"] > 0 for figure in by_part["norm speed"] + by_part["training step"])


def test_a_wrong_norm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu._outputs

    def wrong(kind: str, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        y, dx = right(kind, x, grad)
        return [y * (1.001 if x.dtype == torch.float32 else 1), dx]

    monkeypatch.setattr(gpu, "_outputs", wrong)
    result = gpu.bench(sizes=TINY, parts=("accuracy",))
    failed = {figure["what"] for figure in result["figures"] if figure["passed"] is False}
    assert failed >= {"rmsnorm, float32", "layernorm, float32"}
    assert "rmsnorm, bfloat16" not in failed
    assert "something FAILED" in gpu.show(result)


def test_a_part_that_raises_is_a_failure_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(device: torch.device, sizes: gpu.Sizes) -> Iterator[gpu.Figure]:
        raise RuntimeError("out of memory\nand a long trace")
        yield

    monkeypatch.setattr(gpu, "_accuracy", broken)
    monkeypatch.setattr(gpu, "PARTS", ("accuracy", "norm speed"))
    monkeypatch.setattr(gpu, "CPU_SIZES", TINY)
    monkeypatch.setattr(gpu, "GPU_SIZES", TINY)
    monkeypatch.setattr(gpu.bench, "__defaults__", ((1,), None, ("accuracy", "norm speed")))
    file = tmp_path / "gpu.json"
    with pytest.raises(MinillamaError, match="a check failed"):
        bench.run("gpu", str(file))
    first, *others = json.loads(file.read_text())["figures"]
    assert (first["error"], first["passed"]) == ("RuntimeError: out of memory", False)
    assert {figure["part"] for figure in others} == {"norm speed"}


def test_a_run_that_is_resumed_has_the_same_bits() -> None:
    result = gpu.bench(sizes=TINY, parts=("resume",))
    (figure,) = result["figures"]
    assert (figure["value"], figure["passed"]) == (0, True), gpu.show(result)


@pytest.mark.slow
def test_all_parts_pass(tmp_path: Path) -> None:
    table = bench.run("gpu", str(tmp_path / "gpu.json"))
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert {figure["part"] for figure in result["figures"]} == set(gpu.PARTS), table
