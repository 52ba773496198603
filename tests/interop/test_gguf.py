"""Against llama.cpp itself, which the xllamacpp wheel contains."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from minillama.data.tokenizer import SentencePieceTokenizer
from minillama.errors import ConfigError
from minillama.interop.gguf import deinterleave, export, interleave
from minillama.interop.sentencepiece_proto import read_pieces, write_pieces
from minillama.sampling import generate
from minillama.training.checkpoint import load_checkpoint, save_checkpoint

architectures = pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2", "olmo"])
LLAMA3 = {"kind": "llama3", "factor": 4.0, "original_max_seq_len": 64}


class LlamaCpp:
    """llama.cpp's server on this machine, with a float32 cache."""

    def __init__(self, file: Path) -> None:
        xllamacpp = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel = 256, 1
        params.n_gpu_layers, params.fit_params = 0, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup, params.verbosity = False, -1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(params)

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.server.listening_address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def complete(self, prompt: list[int], n: int, **more: Any) -> Any:
        settings = {"temperature": 0, "cache_prompt": False, "return_tokens": True}
        return self.post("/completion", prompt=prompt, n_predict=n, **settings | more)

    def tokenize(self, text: str, *, bos: bool = False) -> list[int]:
        body = {"content": text, "add_special": bos, "parse_special": False}
        ids: list[int] = self.post("/tokenize", **body)["tokens"]
        return ids

    def log_probabilities(self, prompt: list[int], vocab_size: int, plain_id: int) -> torch.Tensor:
        """Return log p of every id after ``prompt``.

        The server returns them only for an id that is text by itself, hence the bias to one.
        """
        bias = {"n_probs": vocab_size, "logit_bias": [[plain_id, 1000]]}
        answer = self.complete(prompt, 1, **bias)["completion_probabilities"][0]
        out = torch.full((vocab_size,), torch.nan)
        for entry in answer["top_logprobs"]:
            out[entry["id"]] = entry["logprob"]
        return out


def random_prompt(vocab_size: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return [1, *torch.randint(3, vocab_size, (length - 1,), generator=generator).tolist()]


@torch.no_grad()
def difference(ours: Any, theirs: LlamaCpp, plain_id: int) -> float:
    """Return the largest difference of log p at several lengths, past position 100 too."""
    vocab_size = ours.config.vocab_size
    worst = 0.0
    for length in (1, 2, 60, 130):
        prompt = random_prompt(vocab_size, length)
        exact = ours(torch.tensor([prompt]))[0, -1].log_softmax(-1)
        found = theirs.log_probabilities(prompt, vocab_size, plain_id)
        worst = max(worst, float((found - exact).abs().max()))
    return worst


@architectures
@pytest.mark.parametrize("tokenizer", ["bpe", "byte"])
def test_llama_cpp_computes_the_same(architecture, tokenizer, save, tmp_path, hard_texts):
    folder = save(architecture, tokenizer)
    export(folder, tmp_path / "m.gguf")
    ours, our_tokenizer, _ = load_checkpoint(folder)
    theirs = LlamaCpp(tmp_path / "m.gguf")
    for text in hard_texts:
        assert theirs.tokenize(text) == our_tokenizer.encode(text), text
    assert theirs.tokenize("x", bos=True) == our_tokenizer.encode("x", bos=True)
    assert difference(ours, theirs, our_tokenizer.encode("a")[0]) < 2e-5
    prompt = random_prompt(ours.config.vocab_size, 40)
    new = generate(ours, prompt, 100, temperature=0, stop_ids={our_tokenizer.eos_id})
    assert theirs.complete(prompt, 100)["tokens"][: len(new)] == new


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("llama", {"tie_embeddings": False, "head_dim": 32}),
        ("qwen3", {"tie_embeddings": False, "head_dim": 32, "n_kv_heads": 4}),
        ("olmo2", {"tie_embeddings": False, "rope_theta": 500.0}),
        ("llama", {"rope_scaling": {"kind": "linear", "factor": 2.0}}),
        ("olmo", {"rope_scaling": {"kind": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0}),
        ("llama", {"norm": {"options": {"unit_offset": True}, "placement": "scaled"}}),
        ("qwen3", {"norm": {"qk_norm": "head", "qk_unit_offset": True}, "embed_scale": "fixed"}),
        (
            "llama",
            {
                "parametrization": "mup",
                "mup": {"base_dim": 8, "base_head_dim": 4, "base_n_layers": 1},
            },
        ),
        ("llama", {"vocab_size": 390}),  # rows of the embedding that no id of the tokenizer has
    ],
)
def test_other_shapes(architecture, shape, save, tmp_path):
    folder = save(architecture, **shape)
    export(folder, tmp_path / "m.gguf")
    ours, tokenizer, _ = load_checkpoint(folder)
    theirs = LlamaCpp(tmp_path / "m.gguf")
    assert difference(ours, theirs, tokenizer.encode("a")[0]) < 2e-5
    assert theirs.tokenize("some text") == tokenizer.encode("some text")


@pytest.mark.parametrize(("dtype", "within"), [("f16", 0.02), ("q8_0", 0.3)])
def test_smaller_types_are_close(dtype, within, save, tmp_path):
    folder = save(dim=64, ffn_dim=96)
    said = export(folder, tmp_path, dtype)
    file = tmp_path / f"run-{dtype}.gguf"
    assert str(file) in said
    ours, tokenizer, _ = load_checkpoint(folder)
    assert 0 < difference(ours, LlamaCpp(file), tokenizer.encode("a")[0]) < within


def test_a_space_prefix_is_exported(save, bpe, tmp_path, hard_texts):
    ours, _, config = load_checkpoint(save())
    prefixed = write_pieces(read_pieces(bpe.read_bytes()).pieces, (0, 1, 2), add_dummy_prefix=True)
    tokenizer = SentencePieceTokenizer(prefixed)
    save_checkpoint(tmp_path / "prefixed", ours, tokenizer, config)
    export(tmp_path / "prefixed", tmp_path / "m.gguf")
    theirs = LlamaCpp(tmp_path / "m.gguf")
    for text in hard_texts:
        assert theirs.tokenize(text) == tokenizer.encode(text), text


def test_metadata_are_what_the_gguf_package_reads(save, bpe, tmp_path):
    export(save(), tmp_path / "m.gguf", "q8_0")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")

    value = {key: field.contents() for key, field in reader.fields.items()}
    assert value["general.architecture"] == "llama"
    assert value["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert value["llama.attention.head_count_kv"] == 2
    assert value["llama.context_length"] == 256
    assert value["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    pieces = read_pieces(bpe.read_bytes()).pieces
    assert value["tokenizer.ggml.model"] == "llama"
    assert value["tokenizer.ggml.tokens"] == [piece.text for piece in pieces]
    assert value["tokenizer.ggml.scores"] == [piece.score for piece in pieces]
    assert value["tokenizer.ggml.token_type"] == [piece.kind for piece in pieces]
    assert value["tokenizer.ggml.add_space_prefix"] is False
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == "Q8_0"
    assert kinds["output_norm.weight"] == "F32"


def test_rows_of_partial_blocks_stay_f16(save, tmp_path):
    export(save(ffn_dim=80), tmp_path / "m.gguf", "q8_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"


def test_rows_that_rotate_together_become_neighbours():
    weight = np.arange(16, dtype=np.float32).reshape(16, 1)
    turned = interleave(weight, 8)
    assert turned[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert np.array_equal(deinterleave(turned, 8), weight)


@pytest.fixture
def refused(save, tmp_path) -> Iterator[Any]:
    def check(match: str, dtype: str | None = None, **model: Any) -> None:
        folder = save(name=f"c{len(list(tmp_path.iterdir()))}", **model)
        with pytest.raises(ConfigError, match=match):
            export(folder, tmp_path / "m.gguf", dtype)
        assert not (tmp_path / "m.gguf").exists()

    return check


def test_what_llama_cpp_cannot_compute_is_refused(refused):
    refused("f32, f16, q8_0", dtype="float32")
    refused(r"llama: model\.norm\.placement = 'peri', not 'pre'", norm={"placement": "peri"})
    refused(
        r"qwen3: model\.rope_scaling\.kind = 'llama3'", architecture="qwen3", rope_scaling=LLAMA3
    )
    refused(r"olmo2: model\.head_dim = 8, not dim / n_heads", architecture="olmo2", head_dim=8)


def test_nothing_is_overwritten_or_left_half_written(save, tmp_path, monkeypatch):
    folder = save()
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        export(folder, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_text() == "mine"

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(folder, tmp_path / "other.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "ours"]
