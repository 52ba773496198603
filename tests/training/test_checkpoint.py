import json
import os
import random
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillama.data.tokenizer import ByteTokenizer, train_tokenizer
from minillama.errors import CheckpointError, ConfigError, RunFolderError
from minillama.model.transformer import Transformer
from minillama.training.assemble import assemble
from minillama.training.checkpoint import (
    CONFIG,
    TOKENIZER,
    TRAINER_STATE,
    WEIGHTS,
    hash_tensors,
    load_checkpoint,
    read_checkpoint,
    resolve_checkpoint,
    save_checkpoint,
    step_folders,
)

STATE = {"progress": {"step": 3, "best": None}, "optimizer": {0: {"step": torch.tensor(3.0)}}}
TOKENS = torch.tensor([[5, 17, 90, 3]])


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def bpe():
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 8))) for _ in range(500)]
    return train_tokenizer([" ".join(words)], 300)


@pytest.fixture
def saved(tiny, tmp_path, bpe):
    """A checkpoint with a BPE tokenizer, and the model that is in it."""
    config = tiny(**{"tokenizer.kind": "bpe", "tokenizer.vocab_size": 300})
    model = Transformer(config.model, seed=1)
    folder = tmp_path / "step-000003"
    save_checkpoint(folder, model, bpe, config, STATE)
    return folder, model, config


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_is_loaded(tiny, tmp_path, tied):
    config = tiny(**{"model.tie_embeddings": tied, "model.norm.kind": "layernorm"})
    model = Transformer(config.model, seed=1)
    save_checkpoint(tmp_path / "step-000001", model, ByteTokenizer(), config)
    assert names_in(tmp_path / "step-000001") == [CONFIG, WEIGHTS]
    loaded, tokenizer, loaded_config = load_checkpoint(tmp_path / "step-000001")
    assert loaded_config == config
    assert isinstance(tokenizer, ByteTokenizer)
    assert not loaded.training
    assert torch.equal(loaded(TOKENS), model(TOKENS))


def test_a_bpe_tokenizer_and_the_trainers_state_come_along(saved, bpe):
    folder, _, config = saved
    assert names_in(folder) == [CONFIG, WEIGHTS, TOKENIZER, TRAINER_STATE]
    _, tokenizer, _ = load_checkpoint(folder)
    assert tokenizer.sha256 == bpe.sha256
    resumed = read_checkpoint(folder, for_resume=True)
    assert resumed.config == config
    assert resumed.state["progress"] == STATE["progress"]
    assert torch.equal(resumed.state["optimizer"][0]["step"], torch.tensor(3.0))


def test_other_programs_can_read_the_files(saved):
    folder, model, config = saved
    weights = load_file(folder / WEIGHTS)
    assert set(weights) == set(dict(model.named_parameters()))
    assert json.loads((folder / CONFIG).read_text()) == config.model_dump(mode="json")
    torch.load(folder / TRAINER_STATE, weights_only=True)


@pytest.mark.parametrize("default", ["meta", torch.float64, torch.bfloat16])
def test_torchs_default_device_and_dtype_change_no_loaded_model(tiny, tmp_path, default):
    config = tiny()
    model = Transformer(config.model)
    save_checkpoint(tmp_path / "step-000001", model, ByteTokenizer(), config)
    tokens = torch.arange(6)[None]
    expected = model(tokens)
    try:
        if default == "meta":
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        loaded = load_checkpoint(tmp_path / "step-000001")[0]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert {w.dtype for w in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded(tokens), expected)


def test_a_tokenizer_that_moved_since_the_run_is_not_needed(tiny, tmp_path, bpe):
    bpe.save(tmp_path / "mine.model")
    path = str(tmp_path / "mine.model")
    config = assemble(tiny(**{"tokenizer.kind": "bpe", "tokenizer.path": path}))
    save_checkpoint(tmp_path / "step-000001", Transformer(config.model), bpe, config)
    (tmp_path / "mine.model").unlink()
    assert load_checkpoint(tmp_path / "step-000001")[1].sha256 == bpe.sha256


# ----------------------------------------------------------------------------------------- damage


def empty(file):
    file.write_bytes(b"")


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    file.write_bytes(data)


def remove(file):
    file.unlink()


@pytest.mark.parametrize("damage", [empty, truncate, flip_a_bit, remove])
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, TOKENIZER, TRAINER_STATE])
def test_a_damaged_file_is_refused_by_name_and_a_sound_checkpoint_offered(saved, name, damage):
    folder, _, _ = saved
    sound = shutil.copytree(folder, folder.with_name("step-000002"))
    damage(folder / name)
    shutil.copytree(folder, folder.with_name("step-000001"))
    pattern = rf"step-000003/{name} is .*sound checkpoint beside it is .*{sound.name}$"
    with pytest.raises(CheckpointError, match=pattern):
        read_checkpoint(folder, for_resume=True)
    if name != TRAINER_STATE:
        with pytest.raises(CheckpointError, match=pattern):
            load_checkpoint(folder)


def test_a_bit_flipped_anywhere_is_refused_or_does_no_harm(saved):
    flip_bits_of(saved, 20)


@pytest.mark.slow
def test_any_of_thousands_of_flipped_bits_is_refused_or_does_no_harm(saved):
    flip_bits_of(saved, 1000)


def flip_bits_of(saved, n_flips):
    folder, model, config = saved
    draw = random.Random(n_flips)
    for name in (CONFIG, WEIGHTS, TOKENIZER, TRAINER_STATE):
        sound = (folder / name).read_bytes()
        header = 3000 if name == WEIGHTS else len(sound)  # half of the flips go to the header
        outcomes = []
        for limit in [header, len(sound)] * (n_flips // 2):
            data = bytearray(sound)
            data[draw.randrange(limit)] ^= 1 << draw.randrange(8)
            (folder / name).write_bytes(data)
            try:
                resumed = read_checkpoint(folder, for_resume=True)
            except CheckpointError as error:
                outcomes.append(str(error))
            else:
                assert resumed.config == config
                assert hash_tensors(resumed.weights) == hash_tensors(model.state_dict())
                assert str(resumed.state) == str(STATE)
        wrong = [said for said in outcomes if f"{folder}/{name} is " not in said]
        assert not wrong
        (folder / name).write_bytes(sound)


@pytest.mark.slow
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, TOKENIZER, TRAINER_STATE])
def test_a_truncated_file_is_refused_and_a_sound_checkpoint_offered(saved, name):
    folder, _, _ = saved
    for step in (1, 2):
        shutil.copytree(folder, folder.with_name(f"step-{step:06d}"))
    (folder.with_name("step-000002") / WEIGHTS).write_bytes(b"")  # newer, and as bad
    sound, draw = (folder / name).read_bytes(), random.Random(0)
    for _ in range(100):
        (folder / name).write_bytes(sound[: draw.randrange(len(sound))])
        with pytest.raises(CheckpointError, match=rf"step-000003/{name} is .*step-000001$"):
            read_checkpoint(folder, for_resume=True)


def test_without_another_checkpoint_none_is_offered(saved):
    folder, _, _ = saved
    empty(folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="there is no other beside it"):
        load_checkpoint(folder)


def test_weights_of_another_shape_are_refused_by_name(saved):
    folder, model, _ = saved
    weights = dict(model.state_dict())
    weights["blocks.0.mlp.up_proj.weight"] = torch.zeros(3, 32)
    weights["stray"] = weights.pop("final_norm.weight")
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    for part in (
        "blocks.0.mlp.up_proj.weight is (3, 32), the model needs (96, 32)",
        "final_norm.weight is missing",
        "stray is not in the model",
    ):
        assert part in str(caught.value)


def test_a_tokenizer_of_another_size_is_refused(saved):
    folder, model, _ = saved
    save_file(dict(model.state_dict()), folder / WEIGHTS)  # without checksums
    raw = json.loads((folder / CONFIG).read_text())
    raw["tokenizer"]["vocab_size"] = 299
    (folder / CONFIG).write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"has 300 ids, but config\.json says 299"):
        load_checkpoint(folder)


def test_nothing_is_unpickled_that_is_not_data(saved):
    folder, model, _ = saved
    save_file(dict(model.state_dict()), folder / WEIGHTS)  # without checksums
    torch.save({"progress": os.system}, folder / TRAINER_STATE)
    with pytest.raises(CheckpointError, match=r"trainer_state\.pt is damaged"):
        read_checkpoint(folder, for_resume=True)


def test_a_transformers_folder_is_recognised(saved):
    folder, model, _ = saved
    save_file(dict(model.state_dict()), folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text('{"model_type": "llama", "hidden_size": 32}')
    with pytest.raises(CheckpointError, match="minillama import"):
        load_checkpoint(folder)


# ----------------------------------------------------------------------------------------- writing


def test_a_save_that_is_killed_leaves_nothing(saved, tmp_path, bpe, monkeypatch):
    _, model, config = saved
    before = names_in(tmp_path)

    def kill(self, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(bpe), "save", kill)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "step-000004", model, bpe, config)
    assert names_in(tmp_path) == before


@pytest.mark.parametrize("limit", [100, 5_000, 120_000])
def test_a_full_disk_is_one_clear_line_whichever_file_it_meets(saved, tmp_path, bpe, limit):
    _, model, config = saved
    before = names_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(RunFolderError, match="step-000004 cannot be written: File too large"):
            save_checkpoint(tmp_path / "step-000004", model, bpe, config, STATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names_in(tmp_path) == before


def test_trainer_state_that_outgrows_the_disk_is_the_same_line(saved, tmp_path, bpe):
    _, model, config = saved
    big = {"optimizer": torch.zeros(100_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(RunFolderError, match="cannot be written: File too large"):
            save_checkpoint(tmp_path / "step-000004", model, bpe, config, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_that_is_there_or_has_no_parent_is_refused(saved, tmp_path, bpe):
    folder, model, config = saved
    with pytest.raises(RunFolderError, match="already exists"):
        save_checkpoint(folder, model, bpe, config)
    with pytest.raises(RunFolderError, match="No such file"):
        save_checkpoint(tmp_path / "no" / "step-000001", model, bpe, config)


def test_the_hash_of_tensors_covers_all_but_their_order():
    a, b = torch.arange(6.0), torch.ones(2)
    whole = hash_tensors({"a": a, "b": b})
    assert whole == hash_tensors({"b": b, "a": a})
    others = [
        {"a": a, "c": b},
        {"a": a.view(2, 3), "b": b},
        {"a": a.double(), "b": b},
        {"a": a + 1, "b": b},
        {"a": a},
    ]
    assert whole not in {hash_tensors(other) for other in others}
    assert hash_tensors({"a": a.view(2, 3).T}) == hash_tensors({"a": a.view(2, 3).T.contiguous()})


# ----------------------------------------------------------------------------------------- finding


@pytest.fixture
def run(tmp_path):
    """A run folder with three empty checkpoints."""
    for step in (5, 10, 1_000_000):
        (tmp_path / "run" / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / ".unfinished-1").mkdir()
    (tmp_path / "run" / "checkpoints" / "step-notes").mkdir()
    return tmp_path / "run"


def test_steps_are_found_in_their_order(run):
    names = [folder.name for folder in step_folders(run / "checkpoints")]
    assert names == ["step-000005", "step-000010", "step-1000000"]
    assert step_folders(run / "nowhere") == []


def test_a_run_folder_stands_for_its_best_else_its_last_else_its_newest(run):
    checkpoints = run / "checkpoints"

    def found(path=run):
        return resolve_checkpoint(path).resolve().name

    assert found() == found(checkpoints) == "step-1000000"
    (checkpoints / "last").symlink_to("step-000010")
    assert found() == "step-000010"
    (checkpoints / "best").symlink_to("step-000005")
    assert found() == found(checkpoints) == "step-000005"
    assert found(checkpoints / "last") == "step-000010"
    assert found(checkpoints / "step-1000000") == "step-1000000"
    shutil.rmtree(checkpoints / "step-000005")  # a link that leads nowhere is passed over
    assert found() == "step-000010"


def test_the_error_for_a_wrong_path_lists_the_folder(run, tmp_path):
    (run / "config.yaml").write_text("name: x\n")
    for path, said in (
        (tmp_path / "rum", "no such folder.*holds.* run"),
        (run / "config.yaml", f"it is a file; name the folder, {run}"),
        (tmp_path, "the folder holds.* run"),
        (run / "checkpoints" / "step-notes", "the folder holds nothing"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_checkpoint(path)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ConfigError, match="this run has written none yet"):
        resolve_checkpoint(run)


def test_a_path_that_can_be_no_checkpoint_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for path, said in (
        (os.devnull, "it is a file"),
        (tmp_path / "file" / "run", "holds file"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(ConfigError, match=f"no checkpoint at .*: .*{said}"):
            load_checkpoint(path)
