"""What the README shows works as it stands there."""

import re
from pathlib import Path

import pytest
import torch

from minillama import build_norm, load_config, train
from minillama.ablation.grid import cells
from minillama.config.ablation import load_ablation

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def own_norm(tmp_path_factory):
    """Return the file that holds the README's norm: one for all tests, as it is registered once."""
    [code] = [block for block in blocks("python") if block.startswith("# mynorm.py")]
    path = tmp_path_factory.mktemp("own") / "mynorm.py"
    path.write_text(code, encoding="utf-8")
    return path


def test_a_norm_of_ones_own_is_trained_like_the_others(own_norm, tmp_path):
    small = ["model.dim=32", "model.n_layers=1", "tokenizer.kind=byte", "train.sample_prompt=null"]
    config = load_config(
        ROOT / "configs" / "tiny.yaml",
        [
            f"plugins=[{own_norm}]",
            "model.norm.kind=absnorm",
            "model.norm.options={power: 0.9}",
            f"out_dir={tmp_path / 'run'}",
            "optim.warmup_steps=1",
            "train.steps=3",
            "data.val_fraction=0.001",
            *small,
        ],
    )
    assert train(config, progress=False)["steps"] == 3
    norm = build_norm(config.model.norm, 8)
    x = torch.tensor([[1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0]])
    torch.testing.assert_close(norm(x), x / 4.5**0.9)


def test_a_norm_of_ones_own_is_swept_beside_the_others(own_norm):
    config = load_ablation(
        ROOT / "configs" / "ablations" / "quick.yaml",
        [f"base.plugins=[{own_norm}]", "arms.absnorm={model.norm.kind: absnorm}"],
    )
    kinds = {cell.arm: cell.config.model.norm.kind for cell in cells(config)}
    assert kinds == {"rmsnorm": "rmsnorm", "layernorm": "layernorm", "absnorm": "absnorm"}


def test_the_block_that_is_used_alone_runs():
    [code] = [block for block in blocks("python") if "norm = RMSNorm(512)" in block]
    exec(compile(code, "README.md", "exec"), {})


def test_the_first_steps_in_chinese_run():
    text = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    [code] = blocks("python", text)
    exec(compile(code, "README.zh-CN.md", "exec"), {})


def test_the_config_shown_is_one(tmp_path):
    [shown, _] = [block for block in blocks("yaml") if block.startswith("name: ")]
    path = tmp_path / "shown.yaml"
    path.write_text(shown, encoding="utf-8")
    assert load_config(path).train == load_config(ROOT / "configs" / "tiny.yaml").train.model_copy(
        update={"eval_every": 100, "sample_prompt": None}
    )


@pytest.mark.parametrize("path", re.findall(r"\((configs/[^)]+)\)", README))
def test_files_that_are_pointed_to_are_there(path):
    assert (ROOT / path).is_file()
