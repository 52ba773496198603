"""Tiny random checkpoints of every architecture that can be exported."""

import pydoc_data.topics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minillama.config import RunConfig
from minillama.data.tokenizer import SentencePieceTokenizer, load_tokenizer, train_tokenizer
from minillama.model.transformer import Transformer
from minillama.training.assemble import assemble
from minillama.training.checkpoint import save_checkpoint

NORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"placement": "reordered", "qk_norm": "full", "eps": 1e-5},
    "olmo": {"kind": "layernorm", "options": {"affine": False}, "eps": 1e-5},
}
"""The norm section that makes each architecture."""

SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "init": "fan_in"}

HARD_TEXTS = (
    "",
    " ",
    "   ",
    " leading",
    "trailing ",
    "two  spaces,   three",
    "\n\n\ttabs\tand\r\nnewlines\n",
    "digits 0 12 345.678",
    "emoji 🙂 👩‍👩‍👧 🇩🇪",
    "中文，日本語",
    "unseen \x01\x7f ßøŁ ⅷ①½ ﬁ",
    "e\u0301 \u00a0\u200b",
    "<s>typed</s> <unk> <0x41>",
    "def f(x):\n    return x\n",
)
"""Texts on which tokenizers often differ."""

Save = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small sentencepiece model, as its file."""
    topics = list(pydoc_data.topics.topics.values())[::6]
    path = tmp_path_factory.mktemp("bpe") / "bpe.model"
    train_tokenizer(topics, 384).save(path)
    return path


@pytest.fixture(scope="session")
def pieces(bpe: Path) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(bpe.read_bytes())


@pytest.fixture(scope="session")
def hard_texts() -> tuple[str, ...]:
    return HARD_TEXTS


@pytest.fixture
def save(tmp_path: Path, bpe: Path) -> Save:
    """Write a random checkpoint: ``save("llama", tokenizer="byte", **fields of model)``."""

    def write(
        architecture: str = "llama", tokenizer: str = "bpe", name: str = "ours", **model: Any
    ) -> Path:
        path = {"kind": "bpe", "path": str(bpe)} if tokenizer == "bpe" else {"kind": "byte"}
        config = assemble(
            RunConfig.model_validate(
                {"model": SHAPE | {"norm": NORMS[architecture]} | model, "tokenizer": path}
            )
        )
        torch.manual_seed(0)
        built = Transformer(config.model)
        for parameter in built.parameters():
            if parameter.ndim == 1:  # gains that are all 1 would hide a swap
                torch.nn.init.normal_(parameter, 1, 0.2)
        folder = tmp_path / name
        save_checkpoint(folder, built, load_tokenizer(config.tokenizer, None), config)
        return folder

    return write
