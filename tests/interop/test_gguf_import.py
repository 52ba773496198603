import os
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minillama.data.tokenizer import ByteTokenizer
from minillama.errors import CheckpointError, ConfigError
from minillama.interop.gguf import export, import_model
from minillama.training.checkpoint import load_checkpoint


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2", "olmo"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"tie_embeddings": False}, {"rope_scaling": {"kind": "linear", "factor": 2.0}}],
    ids=["tied", "untied", "linear"],
)
def test_export_import_is_the_identity(architecture, shape, save, tmp_path, hard_texts):
    folder = save(architecture, init="normal", vocab_size=390, **shape)
    export(folder, tmp_path / "m.gguf")
    import_model(tmp_path / "m.gguf", tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    _, tokenizer, config = load_checkpoint(folder)
    _, tokenizer_back, config_back = load_checkpoint(tmp_path / "back")
    assert config_back.model == config.model
    assert tokenizer_back.vocab_size == tokenizer.vocab_size
    for text in hard_texts:
        assert tokenizer_back.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_smaller_types_are_read_as_the_gguf_package_reads_them(dtype, save, tmp_path):
    export(save("qwen3", "byte"), tmp_path / "m.gguf", dtype)
    import_model(tmp_path / "m.gguf", tmp_path / "back")
    model, tokenizer, _ = load_checkpoint(tmp_path / "back")
    assert isinstance(tokenizer, ByteTokenizer)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    tensor = tensors["blk.1.attn_q.weight"]
    exact = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert np.array_equal(model.blocks[1].attention.q_proj.weight.detach().numpy(), exact)


def write(path: Any, architecture: str = "llama", tokenizer: str = "gpt2", **fields: Any) -> None:
    """Write a file of one tensor, with metadata as given: ``a__b`` means ``a.b``."""
    writer = gguf.GGUFWriter(path, architecture)
    settings = {
        "embedding_length": 16,
        "block_count": 1,
        "feed_forward_length": 32,
        "attention__head_count": 2,
        "context_length": 64,
        "attention__layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in (settings | fields).items():
        dotted = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, float):
            writer.add_float32(dotted, value)
        elif isinstance(value, str):
            writer.add_string(dotted, value)
        elif value is not None:
            writer.add_uint32(dotted, value)
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((300, 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architecture": "gemma2"}, "general.architecture = 'gemma2': must be one of llama"),
        ({"expert_count": 8}, "expert_count = 8: not supported"),
        ({"attention__sliding_window": 512}, "attention.sliding_window = 512: not supported"),
        ({"rope__scaling__type": "yarn"}, "only linear is supported"),
        ({"attention__head_count": None}, "attention.head_count = None: is missing"),
        ({"attention__layer_norm_rms_epsilon": None}, "attention.layer_norm_rms_epsilon"),
        ({"attention__key_length": 8, "attention__value_length": 16}, "must have the same size"),
        ({"rope__dimension_count": 4, "attention__key_length": 8}, "must have the same size"),
        ({"embedding_length": 0}, "embedding_length = 0: should be greater than 0"),
        (
            {"tokenizer": "llama"},
            "its numbers of tokens, of their types and of their scores differ",
        ),
    ],
)
def test_what_cannot_be_imported_is_named(fields, said, tmp_path):
    write(tmp_path / "m.gguf", **fields)
    with pytest.raises(CheckpointError) as caught:
        import_model(tmp_path / "m.gguf", tmp_path / "out")
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_llama_3_scaling_is_not_guessed(save, tmp_path):
    scaling = {"kind": "llama3", "original_max_seq_len": 64}
    export(save(rope_scaling=scaling), tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        import_model(tmp_path / "m.gguf", tmp_path / "out")


def test_tensors_that_do_not_fit_are_named(save, tmp_path, monkeypatch):
    original = gguf.GGUFWriter.add_tensor

    def other(self: Any, name: str, tensor: Any, **more: Any) -> None:
        name = {"blk.0.ffn_up.weight": "blk.0.ffn_up.bias"}.get(name, name)
        original(self, name, tensor[:-1] if name == "blk.1.attn_k.weight" else tensor, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", other)
    export(save(), tmp_path / "m.gguf")
    with pytest.raises(CheckpointError) as caught:
        import_model(tmp_path / "m.gguf", tmp_path / "out")
    said = str(caught.value)
    assert "blk.0.ffn_up.weight is missing" in said
    assert "blk.0.ffn_up.bias is not in the model" in said
    assert "blk.1.attn_k.weight is (31, 64), the model needs (32, 64)" in said


def test_a_type_that_cannot_be_read_is_named(save, tmp_path, monkeypatch):
    original = gguf.GGUFWriter.add_tensor

    def other(self: Any, name: str, tensor: Any, **more: Any) -> None:
        if name == "blk.0.ffn_up.weight":
            kind = gguf.GGMLQuantizationType.Q4_0
            more["raw_dtype"], tensor = kind, gguf.quants.quantize(tensor, kind)
        original(self, name, tensor, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", other)
    export(save(), tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight is of type Q4_0; only F32"):
        import_model(tmp_path / "m.gguf", tmp_path / "out")


def test_an_unsupported_tokenizer_is_left_out(save, tmp_path, monkeypatch):
    pieces = ["<unk>", "<s>", "</s>", "a"]
    with monkeypatch.context() as patch:
        patch.setattr("minillama.interop.gguf.byte_pieces", lambda: pieces)
        export(save(tokenizer="byte"), tmp_path / "m.gguf")
    assert "it takes token ids only" in import_model(tmp_path / "m.gguf", tmp_path / "out")
    model, tokenizer, config = load_checkpoint(tmp_path / "out")
    assert (config.tokenizer.kind, tokenizer.vocab_size) == ("none", model.config.vocab_size)


def test_no_such_file(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        import_model(tmp_path / "m.gguf", tmp_path / "out")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ConfigError, match="not a regular file"):
        import_model(tmp_path / "pipe.gguf", tmp_path / "out")
