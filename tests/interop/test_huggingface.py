import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from minillama.data.tokenizer import ByteTokenizer, SentencePieceTokenizer
from minillama.errors import CheckpointError, ConfigError
from minillama.evaluation import evaluate
from minillama.interop.gguf import export as export_gguf
from minillama.interop.huggingface import export, import_model
from minillama.sampling import generate
from minillama.training.checkpoint import load_checkpoint

architectures = pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2", "olmo"])
LLAMA3 = {"kind": "llama3", "factor": 4.0, "original_max_seq_len": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied, long heads": {"tie_embeddings": False, "head_dim": 24},
    "linear": {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
}
shapes = pytest.mark.parametrize("shape", SHAPES)

transformers.utils.logging.disable_progress_bar()


def open_model(folder: Path, **options: Any) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model


def random_ids(vocab_size: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(0))


@architectures
@shapes
@torch.no_grad()
def test_exported_logits_are_equal_past_position_100(architecture, shape, save, tmp_path):
    folder = save(architecture, **SHAPES[shape])
    said = export(folder, tmp_path / "hf")
    ours, tokenizer, _ = load_checkpoint(folder)
    theirs = open_model(tmp_path / "hf")
    assert type(theirs).__name__ in said
    ids = random_ids(tokenizer.vocab_size, 2, 200)
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-5, atol=1e-5)
    names = load_file(tmp_path / "hf" / "model.safetensors")
    assert ("lm_head.weight" in names) == (not ours.config.tie_embeddings)


FOLDED = {
    "zero-centred": {"norm": {"options": {"unit_offset": True}}},
    "zero-centred with QK norm": {
        "norm": {"options": {"unit_offset": True}, "qk_norm": "head", "qk_unit_offset": True}
    },
    "no gain": {"norm": {"options": {"affine": False}}},
    "LayerNorm scaling": {"norm": {"placement": "scaled"}, "embed_scale": "learned"},
    "maximal update parametrization": {
        "norm": {"qk_norm": "head"},
        "parametrization": "mup",
        "mup": {"base_dim": 8, "base_head_dim": 4, "base_n_layers": 1},
    },
}


@pytest.mark.parametrize("model", FOLDED.values(), ids=FOLDED)
@torch.no_grad()
def test_scales_that_transformers_lacks_are_folded_in(model, save, tmp_path):
    folder = save(**model)
    export(folder, tmp_path / "hf")
    ours, tokenizer, _ = load_checkpoint(folder)
    ids = random_ids(tokenizer.vocab_size, 2, 60)
    logits, expected = open_model(tmp_path / "hf")(ids).logits, ours(ids)
    scale = expected.abs().max()  # gains near 2 make logits, and their rounding, larger
    torch.testing.assert_close(logits / scale, expected / scale, rtol=0, atol=1e-5)


@architectures
@torch.no_grad()
def test_bfloat16_logits_are_within_its_rounding(architecture, save, tmp_path):
    folder = save(architecture)
    export(folder, tmp_path / "hf", "bfloat16")
    theirs = open_model(tmp_path / "hf")
    assert theirs.dtype == torch.bfloat16
    ours, tokenizer, _ = load_checkpoint(folder)
    ids = random_ids(tokenizer.vocab_size, 2, 120)
    exact = ours(ids)
    rounding = (ours.to(torch.bfloat16)(ids).float() - exact).abs().max()
    assert (theirs(ids).logits.float() - exact).abs().max() < 2 * rounding


@architectures
def test_greedy_text_is_equal_for_200_tokens(architecture, save, tmp_path):
    folder = save(architecture)
    export(folder, tmp_path / "hf")
    ours, tokenizer, _ = load_checkpoint(folder)
    theirs = open_model(tmp_path / "hf")
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = their_tokenizer("The quick brown", return_tensors="pt")
    ids = theirs.generate(**prompt, max_new_tokens=200, do_sample=False)[0]
    expected = generate(ours, tokenizer.encode("The quick brown", bos=True), 200, temperature=0)
    new = ids[prompt.input_ids.shape[1] :].tolist()
    if tokenizer.eos_id in new:
        new, expected = new[: new.index(tokenizer.eos_id)], expected[: new.index(tokenizer.eos_id)]
    assert new == expected


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_the_tokenizer_is_exported_without_a_warning(
    kind, save, tmp_path, hard_texts, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    folder = save(tokenizer=kind)
    export(folder, tmp_path / "hf")
    with caplog.at_level(logging.WARNING):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
        open_model(tmp_path / "hf")
    assert not caplog.records
    _, ours, config = load_checkpoint(folder)
    assert theirs.model_max_length == config.model.max_seq_len
    for text in hard_texts:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)


def test_log_likelihoods_equal_those_of_transformers(save, tmp_path):
    """As lm-evaluation-harness has them: the sum over a continuation's tokens."""
    folder = save()
    export(folder, tmp_path / "hf")
    ours, tokenizer, _ = load_checkpoint(folder)
    theirs = open_model(tmp_path / "hf")
    ids = tokenizer.encode("the result of a function is its value", bos=True)
    with torch.no_grad():
        theirs_loss = theirs(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert evaluate(ours, ids)["loss"] == pytest.approx(theirs_loss.item(), rel=1e-6)


def test_the_card_shows_norm_data_and_metrics(save, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    folder = save("qwen3", name="run/checkpoints/step-000050")
    lines = [
        {"step": 50, "val_loss": 3.25, "val_bits_per_byte": 1.5},
        {"step": 60, "val_loss": 1.0},
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"torn')
    export(folder, tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
    assert "| Norm | rmsnorm, placement pre, qk_norm head, eps 1e-06" in card
    assert '| Data | {"kind": "pydocs"} |' in card
    assert "| Validation loss | 3.2500 nats per token |" in card
    assert "| Bits per byte | 1.5000 |" in card
    assert "| Step | 50 |" in card


def test_an_export_is_refused_before_anything_is_written(save, tmp_path):
    folder = save(norm={"placement": "post"})
    with pytest.raises(ConfigError, match=r"model\.norm\.placement = 'post', not 'pre'"):
        export(folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        export(save(name="other"), tmp_path / "hf", "q8_0")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(ConfigError, match="already exists"):
        export(tmp_path / "other", tmp_path / "full")
    (tmp_path / "empty").mkdir()
    export(tmp_path / "other", tmp_path / "empty")


# ----------------------------------------------------------------------------------------- import


def theirs(tmp_path: Path, bpe: Path, kind: str, **fields: Any) -> tuple[Any, Path]:
    """Save a random model of transformers, with our small sentencepiece model."""
    settings = {
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": None,
        "initializer_range": 0.2,
    }
    if kind == "qwen3":
        settings["head_dim"] = 16
    config = transformers.AutoConfig.for_model(kind, **settings | fields)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1, 0.2)
    folder = tmp_path / "theirs"
    model.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(bpe.read_bytes())
    return model.eval(), folder


@architectures
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True, "rms_norm_eps": 3e-5},
        {"num_key_value_heads": 1, "head_dim": 20},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=["plain", "tied, eps", "one kv head, head_dim", "linear", "llama3"],
)
@torch.no_grad()
def test_imported_logits_are_equal(architecture, fields, tmp_path, bpe):
    if architecture == "olmo":  # which has no such key
        fields = {key: value for key, value in fields.items() if key != "rms_norm_eps"}
    model, folder = theirs(tmp_path, bpe, architecture, **fields)
    said = import_model(folder, tmp_path / "ours")
    assert type(model).__name__ in said
    ours, tokenizer, config = load_checkpoint(tmp_path / "ours")
    assert isinstance(tokenizer, SentencePieceTokenizer)
    if architecture != "olmo":
        assert config.model.norm.eps == model.config.rms_norm_eps
    ids = random_ids(400, 2, 200)
    torch.testing.assert_close(ours(ids), model(ids).logits, rtol=1e-5, atol=2e-5)


@architectures
def test_import_export_import_is_the_identity(architecture, tmp_path, bpe):
    _, folder = theirs(tmp_path, bpe, architecture)
    import_model(folder, tmp_path / "a")
    export(tmp_path / "a", tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "b")
    export(tmp_path / "b", tmp_path / "hf2")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [load_checkpoint(tmp_path / name)[2] for name in "ab"]
    assert configs[0].model == configs[1].model
    assert (tmp_path / "a" / "tokenizer.model").read_bytes() == bpe.read_bytes()
    for file in (tmp_path / "hf").iterdir():
        if file.name != "README.md":  # which has the folder's name
            assert file.read_bytes() == (tmp_path / "hf2" / file.name).read_bytes()


def test_shards_are_read_by_their_index(tmp_path, bpe):
    model, folder = theirs(tmp_path, bpe, "llama")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    import_model(folder, tmp_path / "ours")
    ours, _, _ = load_checkpoint(tmp_path / "ours")
    ids = random_ids(400, 1, 20)
    torch.testing.assert_close(ours(ids), model(ids).logits, rtol=1e-5, atol=1e-5)

    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    for bad in ("../model-00001.safetensors", "gone.safetensors"):
        index.write_text(json.dumps({"weight_map": weight_map | {"lm_head.weight": bad}}))
        with pytest.raises(CheckpointError, match="which is not there"):
            import_model(folder, tmp_path / "other")


def test_half_precision_becomes_float32_without_loss(tmp_path, bpe):
    model, folder = theirs(tmp_path, bpe, "llama")
    model.to(torch.bfloat16).save_pretrained(folder)
    import_model(folder, tmp_path / "ours")
    ours, _, _ = load_checkpoint(tmp_path / "ours")
    assert ours.embed.weight.dtype == torch.float32
    assert torch.equal(ours.embed.weight, model.get_input_embeddings().weight.float())


def test_a_byte_model_is_imported_as_one(save, tmp_path):
    export(save(tokenizer="byte"), tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "back")
    assert isinstance(load_checkpoint(tmp_path / "back")[1], ByteTokenizer)


def test_a_model_without_a_tokenizer_takes_ids(tmp_path, bpe):
    model, folder = theirs(tmp_path, bpe, "llama", vocab_size=64)
    (folder / "tokenizer.model").unlink()
    assert "it takes token ids only" in import_model(folder, tmp_path / "ours")
    ours, tokenizer, config = load_checkpoint(tmp_path / "ours")
    assert (config.tokenizer.kind, tokenizer.vocab_size) == ("none", 64)
    ids = random_ids(64, 1, 20)
    torch.testing.assert_close(ours(ids), model(ids).logits, rtol=1e-5, atol=1e-5)
    export(tmp_path / "ours", tmp_path / "hf")
    assert not list((tmp_path / "hf").glob("tokenizer*"))
    import_model(tmp_path / "hf", tmp_path / "again")
    with pytest.raises(ConfigError, match="no tokenizer"):
        export_gguf(tmp_path / "ours", tmp_path / "m.gguf")


def test_another_tokenizer_json_is_kept_as_it_is(tmp_path, bpe, hard_texts):
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["the cat sat on the mat"] * 9, 300, special_tokens=["<|end|>"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    _, folder = theirs(tmp_path, bpe, "qwen3")
    (folder / "tokenizer.model").unlink()
    fast.save_pretrained(folder)
    assert "json tokenizer of" in import_model(folder, tmp_path / "ours")
    _, ours, _ = load_checkpoint(tmp_path / "ours")
    assert (ours.bos_id, ours.eos_id) == (0, 0)
    export(tmp_path / "ours", tmp_path / "hf")
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert back.eos_token == "<|end|>"
    for text in hard_texts:
        expected = fast.encode(text)
        assert ours.encode(text) == expected
        assert back.encode(text, add_special_tokens=False) == expected
    import_model(tmp_path / "hf", tmp_path / "again")
    files = [tmp_path / name / "tokenizer.model" for name in ("ours", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    with pytest.raises(ConfigError, match=r"an imported tokenizer\.json"):
        export_gguf(tmp_path / "ours", tmp_path / "m.gguf")


def test_a_tokenizer_that_cannot_be_used_is_reported(tmp_path, bpe):
    _, folder = theirs(tmp_path, bpe, "llama")
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # of tiktoken, as Llama 3 has it
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: not a sentencepiece model"):
        import_model(folder, tmp_path / "ours")


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change weights of a saved model; None removes one."""
    file = folder / "model.safetensors"
    weights = load_file(file) | changes
    save_file({name: w for name, w in weights.items() if w is not None}, file, {"format": "pt"})


def test_weights_that_do_not_fit_are_named(tmp_path, bpe):
    _, folder = theirs(tmp_path, bpe, "llama")
    bias, gate = "model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.gate_proj.weight"
    rewrite(folder, **{bias: torch.zeros(32), gate: None, "lm_head.weight": torch.zeros(400, 31)})
    with pytest.raises(CheckpointError) as caught:
        import_model(folder, tmp_path / "ours")
    said = str(caught.value)
    assert f"{bias} is not in the model" in said
    assert f"{gate} is missing" in said
    assert "lm_head.weight is (400, 31), the model needs (400, 32)" in said
    assert not (tmp_path / "ours").exists()


def test_a_type_that_is_no_float_is_refused(tmp_path, bpe):
    _, folder = theirs(tmp_path, bpe, "llama")
    rewrite(folder, **{"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8"):
        import_model(folder, tmp_path / "ours")


def test_a_tied_head_may_be_saved_again_but_must_be_the_embedding(tmp_path, bpe):
    model, folder = theirs(tmp_path, bpe, "llama", tie_word_embeddings=True)
    head = model.get_input_embeddings().weight.detach().clone()
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(folder, **{"lm_head.weight": head} | old)
    import_model(folder, tmp_path / "ours")
    rewrite(folder, **{"lm_head.weight": head + 1})
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        import_model(folder, tmp_path / "other")


def test_a_pickle_is_never_opened(tmp_path, bpe):
    _, folder = theirs(tmp_path, bpe, "llama")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nabort\n(tR.")
    with pytest.raises(CheckpointError, match=r"only in a pickle \(pytorch_model\.bin\)"):
        import_model(folder, tmp_path / "ours")


def test_a_tokenizer_of_another_model_is_refused(tmp_path, bpe):
    _, folder = theirs(tmp_path, bpe, "llama", vocab_size=300)
    with pytest.raises(
        CheckpointError, match="has 384 ids, more than the model's vocabulary of 300"
    ):
        import_model(folder, tmp_path / "ours")


def test_a_folder_that_is_not_from_transformers_is_refused(tmp_path, save):
    with pytest.raises(ConfigError, match="no such folder"):
        import_model(tmp_path / "nowhere", tmp_path / "ours")
    (tmp_path / "some").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json.*contains nothing"):
        import_model(tmp_path / "some", tmp_path / "ours")
    with pytest.raises(CheckpointError, match="model_type = None"):
        import_model(save(), tmp_path / "imported")
