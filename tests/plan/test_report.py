import json
from pathlib import Path
from typing import Any

import pytest

from minillama.cli import main
from minillama.config import load_config
from minillama.errors import ConfigError
from minillama.plan.report import plan

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "n_params"),
    [
        ("llama-160m", 162_417_408),  # as the models of these names on the hub
        ("llama-1b", 1_100_048_384),
        ("llama-7b", 6_738_415_616),
    ],
)
def test_the_shipped_shapes_have_the_size_of_their_models(name: str, n_params: int) -> None:
    figures = plan(load_config(CONFIGS / f"{name}.yaml"), gpu="h100")
    assert figures["parameters"]["total"] == n_params
    assert figures["tokens_per_parameter"] == pytest.approx(20, rel=0.05)


def modes(name: str, n_gpus: int, gpu: str = "h100") -> dict[str, Any]:
    figures = plan(load_config(CONFIGS / f"{name}.yaml"), gpu=gpu, n_gpus=n_gpus)
    return {row["parallel"]: row for row in figures["memory"]}


def test_memory_of_each_parallel_mode() -> None:
    rows = modes("llama-7b", 64)
    n = 6_738_415_616
    one, ddp, fsdp = rows["none"], rows["ddp"], rows["fsdp"]
    assert (one["weights"], one["gradients"], one["optimizer"]) == (4 * n, 4 * n, 8 * n)
    assert (ddp["weights"], ddp["optimizer"]) == (4 * n, 8 * n)
    assert ddp["peak"] == one["peak"]
    assert fsdp["weights"] == fsdp["gradients"] == fsdp["optimizer"] // 2 == -(-n // 64) * 4
    assert fsdp["gathered"] > 0 == ddp["gathered"] == one["gathered"]
    assert [row["fits"] for row in (one, ddp, fsdp)] == [False, False, True]
    assert list(modes("llama-7b", 1)) == ["none"]


def test_ranks_share_the_batch() -> None:
    rows = modes("llama-160m", 64)
    assert rows["none"]["micro_batch_size"] == 16
    assert rows["ddp"]["micro_batch_size"] == rows["fsdp"]["micro_batch_size"] == 4
    assert rows["ddp"]["activations"] * 4 == rows["none"]["activations"]


def test_more_gpus_or_a_higher_mfu_take_less_time() -> None:
    config = load_config(CONFIGS / "llama-1b.yaml")
    eight = plan(config, gpu="h200", n_gpus=8)
    assert plan(config, gpu="h200", n_gpus=16)["seconds"] == eight["seconds"] / 2
    assert plan(config, gpu="h200", n_gpus=8, mfu=0.5)["seconds"] == pytest.approx(
        eight["seconds"] * 0.4 / 0.5
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"n_gpus": 0}, "--gpus = 0"),
        ({"n_gpus": 257}, "is less than one window for each"),
        ({"mfu": 0.0}, "--mfu = 0"),
        ({"mfu": 40.0}, "--mfu = 40"),
        ({"gpu": "h20"}, "unknown GPU"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(load_config(CONFIGS / "llama-160m.yaml"), **{"gpu": "h100"} | arguments)


def test_the_command_prints_for_people_and_for_programs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["plan", str(CONFIGS / "llama-7b.yaml"), "--gpus", "64", "--gpu", "h100"]
    assert main(command) == 0
    text = capsys.readouterr().out
    for part in ("6,738,415,616 parameters", "64 × h100 at 40%", "2204.02311", " of training"):
        assert part in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    assert lines["none"].endswith("does not fit")
    assert lines["fsdp"].endswith(" fits")

    assert main([*command, "--json", "model.n_layers=16"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["parameters"]["mlp"] == 16 * 3 * 4096 * 11008
    assert {row["parallel"] for row in figures["memory"]} == {"none", "ddp", "fsdp"}

    assert main([*command, "--mfu", "7"]) == 2
    assert "--mfu" in capsys.readouterr().err


def test_a_tiny_run_fits_this_machine() -> None:
    figures = plan(load_config(CONFIGS / "tiny.yaml"), gpu="cpu")
    assert figures["device"]["name"] == "cpu"
    assert figures["seconds"] > 0
    (row,) = figures["memory"]
    assert row["fits"] is True


def test_recomputing_takes_less_memory_and_more_time() -> None:
    path = CONFIGS / "llama-1b.yaml"
    whole, again = (
        plan(load_config(path, [f"train.recompute={value}"]), gpu="h100")
        for value in ("false", "true")
    )
    assert again["memory"][0]["activations"] < whole["memory"][0]["activations"] / 5
    assert 1.2 < again["seconds"] / whole["seconds"] < 4 / 3
