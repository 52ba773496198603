"""The README's commands and code work as they are written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minillama import build_norm, load_config, train
from minillama.ablation.grid import cells
from minillama.cli import COMMANDS, main
from minillama.config.ablation import load_ablation

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "configs/**/*.md", "minillama/**/*.md")
    for path in ROOT.glob(pattern)
)


def read(document):
    return (ROOT / document).read_text(encoding="utf-8")


README = read("README.md")


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


def test_the_python_of_the_chinese_readme_prints_what_it_says(capsys):
    [code] = blocks("python", read("README.zh-CN.md"))
    names = {}
    exec(compile(code, "README.zh-CN.md", "exec"), names)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert re.findall(r"# (torch\.Size.*)", code) == [first, last]
    rms = names["y"].square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms), atol=1e-3, rtol=0)


def test_the_config_shown_is_that_of_tiny(tmp_path):
    [shown] = blocks("yaml")
    path = tmp_path / "shown.yaml"
    path.write_text(shown, encoding="utf-8")
    assert load_config(path).train == load_config("tiny").train.model_copy(
        update={"eval_every": 100, "sample_prompt": None}
    )


def test_the_first_page_is_short():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document):
    links = re.findall(r"\]\(([^)#]+)\)", read(document))
    folder = (ROOT / document).parent
    assert [link for link in links if "://" not in link and not (folder / link).exists()] == []


# ----------------------------------------------------------------------- command blocks

TINY = [
    "model.dim=32",
    "model.n_layers=1",
    "tokenizer.vocab_size=400",
    "data.seq_len=32",
    "optim.warmup_steps=1",
    "train.steps=3",
]
SHORTER = {
    "train": TINY,
    "ablate": ["lr=[1e-3]", *(f"base.{override}" for override in TINY)],
    "generate": ["--max-new-tokens", "5"],
}
"""What is added to a command, so that it takes seconds."""


def commands(text):
    """Yield the words of each command in the bash blocks, without comments."""
    for block in blocks("bash", text):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def run_command(words):
    """Run a shortened command; one that loads a plugin or trains in parallel as a process."""
    program, name = words[0], next(w for w in words if w in COMMANDS)
    words = [*words, *SHORTER.get(name, [])]
    if program == "minillama" and not any("mynorm.py" in word for word in words):
        assert main(words[1:]) == 0, words
        return
    module = ["minillama"] if program == "minillama" else ["torch.distributed.run"]
    done = subprocess.run(
        [sys.executable, "-m", *module, *words[1:]], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "document", ["README.md", "README.zh-CN.md", "minillama/interop/README.md"]
)
def test_every_command_runs(document, own_norm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mybook.txt").write_text(5 * README, encoding="utf-8")
    (tmp_path / "mynorm.py").write_bytes(own_norm.read_bytes())
    if "interop" in document:  # which begins where the first page ends
        run_command(["minillama", "train", "tiny"])
        run_command(
            ["minillama", "train", "tiny", "model.norm.kind=layernorm", "name=tiny-layernorm"]
        )
    n_run = 0
    for words in commands(read(document)):
        if words[0] in ("minillama", "torchrun"):
            run_command(words)
            n_run += 1
        elif words[0] in ("bash", "pytest"):
            assert (ROOT / words[1]).is_file()
        else:
            assert words[0] in ("source", "lm_eval")
    assert n_run >= 4
    if "interop" in document:
        [continued] = blocks("yaml", read(document))
        (tmp_path / "continued.yaml").write_text(continued, encoding="utf-8")
        assert (
            main(
                [
                    "train",
                    "continued.yaml",
                    "data.seq_len=32",
                    "train.steps=2",
                    "optim.warmup_steps=1",
                ]
            )
            == 0
        )
    if document == "README.md":
        [code] = [block for block in blocks("python") if "load_checkpoint" in block]
        exec(compile(code, document, "exec"), {})
        assert capsys.readouterr().out
