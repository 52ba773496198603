"""Continuing from another model's weights, its norm kept or swapped."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillama.config import RunConfig, load_config
from minillama.errors import CheckpointError, ConfigError
from minillama.model.norms import norm_parameter_names
from minillama.model.transformer import Transformer
from minillama.training.assemble import assemble
from minillama.training.checkpoint import initialise_from, load_checkpoint
from minillama.training.trainer import train

MODEL = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 48}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog.\n" * 120)
    return file


@pytest.fixture
def write(corpus, tmp_path):
    """Return a function that writes a run config with the given lines, and loads it."""

    def write(lines, name, *overrides):
        file = tmp_path / f"{name}.yaml"
        file.write_text(
            f"name: {name}\nout_dir: {tmp_path / name}\n"
            f"data: {{source: {{kind: files, files: [{corpus}]}}, seq_len: 24}}\n"
            f"train: {{steps: 3, batch_size: 4}}\n{lines}"
        )
        return assemble(load_config(file, overrides))

    return write


@pytest.fixture
def parent(write, tmp_path):
    train(write(f"model: {MODEL}\ntokenizer: {{kind: byte}}\n", "parent"), progress=False)
    return tmp_path / "parent"


@pytest.mark.parametrize(
    "nested",
    [
        {},
        {"parametrization": "mup", "mup": {"base_dim": 16, "base_n_layers": 1}},
        {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    ],
    ids=["plain", "mup", "rope_scaling"],
)
def test_model_and_tokenizer_come_from_the_checkpoint(nested, write, tmp_path):
    train(write(f"model: {MODEL | nested}\ntokenizer: {{kind: byte}}\n", "parent"), progress=False)
    parent = tmp_path / "parent"
    config = write(f"init_from: {parent}\n", "child")
    saved = load_checkpoint(parent)[2]
    assert config.model == saved.model
    assert config.tokenizer.kind == "byte"
    assert assemble(config) == config


def test_training_begins_from_the_checkpoints_weights(parent, write):
    first = train(write(f"init_from: {parent}\n", "child"), progress=False)
    last = load_checkpoint(parent)[0]
    fresh = Transformer(last.config, seed=0)
    assert initialise_from(fresh, parent) == []
    for name, weight in last.state_dict().items():
        assert torch.equal(weight, fresh.state_dict()[name])
    parent_summary = train(
        write(f"model: {MODEL}\ntokenizer: {{kind: byte}}\n", "again"), progress=False
    )
    assert first["init_val_loss"] == pytest.approx(parent_summary["val_loss"], abs=1e-6)


def test_a_swapped_norm_is_reinitialised_and_all_else_is_kept(parent, write):
    lines = f"init_from: {parent}\nmodel: {{norm: {{kind: layernorm, placement: peri}}}}\n"
    config = write(lines, "swapped")
    assert (config.model.dim, config.model.max_seq_len) == (32, 48)
    model = Transformer(config.model, seed=5)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    new = initialise_from(model, parent)
    saved = load_checkpoint(parent)[0].state_dict()
    norms = norm_parameter_names(model)
    assert sorted(new) == sorted(norms)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name] if name in norms else saved[name])
    assert train(config, progress=False)["steps"] == 3


def test_the_context_may_change_and_the_shape_may_not(parent, write):
    assert (
        write(f"init_from: {parent}\nmodel: {{max_seq_len: 96}}\n", "long").model.max_seq_len == 96
    )
    with pytest.raises(ConfigError) as caught:
        write(
            f"init_from: {parent}\nmodel: {{dim: 64, n_layers: 2}}\ntokenizer: {{kind: bpe}}\n",
            "no",
        )
    message = str(caught.value)
    assert "model.dim = 64: the checkpoint of init_from has 32" in message
    assert "tokenizer.kind = 'bpe'" in message
    assert "n_layers" not in message
    with pytest.raises(ConfigError, match=r"data.seq_len = 50: is above model.max_seq_len = 48"):
        write(f"init_from: {parent}\n", "no", "data.seq_len=50")


def test_an_interrupted_child_needs_its_parent_no_more(parent, write, tmp_path):
    config = write(
        f"init_from: {parent}\n", "child", "train.save_every=1", "optim.schedule=constant"
    )
    train(config, progress=False)
    parent.rename(tmp_path / "moved")
    longer = assemble(
        config.model_copy(update={"train": config.train.model_copy(update={"steps": 5})})
    )
    assert train(longer, resume=True, progress=False)["steps"] == 5


def test_no_checkpoint_is_refused_before_any_work(write, tmp_path):
    with pytest.raises(ConfigError, match=r"no checkpoint at .*nowhere"):
        write(f"init_from: {tmp_path / 'nowhere'}\n", "child")


def test_a_bpe_checkpoint_brings_its_tokenizer(write, tmp_path):
    train(write(f"model: {MODEL}\ntokenizer: {{vocab_size: 290}}\n", "bpe"), progress=False)
    config = write(f"init_from: {tmp_path / 'bpe'}\n", "child")
    assert config.tokenizer.vocab_size == 290
    train(config, progress=False)
    ids = [load_checkpoint(tmp_path / n)[1].encode("The fox") for n in ("bpe", "child")]
    assert ids[0] == ids[1]


def test_other_weights_that_do_not_fit_are_refused_by_name(parent):
    config = load_checkpoint(parent)[2].model
    wider = Transformer(config.model_copy(update={"ffn_dim": 64}))
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight"):
        initialise_from(wider, parent)


def test_a_child_that_is_no_better_than_its_parent_has_not_diverged(write, tmp_path):
    lines = f"model: {MODEL}\ntokenizer: {{kind: byte}}\n"
    good = train(write(lines, "good", "train.steps=60", "optim.lr=0.01"), progress=False)
    assert good["fate"] == "ok"
    config = write(f"init_from: {tmp_path / 'good'}\n", "worse", "optim.lr=0.03")
    summary = train(config, progress=False)
    assert summary["val_loss"] > summary["init_val_loss"]
    assert summary["fate"] == "ok"


@pytest.mark.parametrize(
    ("damage", "rule"),
    [("[1]", "is not a config"), ("{", "it is not JSON"), ('{"modle": 1}', "modle = 1")],
)
def test_what_cannot_be_begun_from_is_refused_as_a_fault_of_init_from(
    parent, damage, rule, tmp_path
):
    for file in (parent / "checkpoints").glob("step-*/config.json"):
        file.write_text(damage)
        with pytest.raises(ConfigError, match="its checksum does not match"):
            assemble(RunConfig(init_from=str(parent)))
        weights = file.with_name("model.safetensors")
        save_file(load_file(weights), weights)  # another program writes no checksums
    for path, said in ((parent, rule), ("\0", "no checkpoint at"), (tmp_path, "no checkpoint at")):
        with pytest.raises(ConfigError) as caught:
            assemble(RunConfig(init_from=str(path)))
        [error] = caught.value.field_errors
        assert (error.path, error.value) == ("init_from", str(path))
        assert said in error.rule


def test_an_empty_name_of_a_checkpoint_is_a_fault_of_init_from(write):
    with pytest.raises(ConfigError) as caught:
        write("init_from: ''\n", "child")
    assert caught.value.field_errors[0].path == "init_from"
