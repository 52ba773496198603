"""The fields of a config: what is refused, what follows.  Any config: test_config_fuzz.py."""

import json
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from minillama.ablation.grid import cells
from minillama.config import ModelConfig, RunConfig, load_config
from minillama.config.ablation import load_ablation
from minillama.config.loading import get_path
from minillama.config.run import (
    DEFAULT_BPE_VOCAB_SIZE,
    OWNED_BY_KIND,
    deciding_fields,
    json_schema,
    to_yaml,
    token_fields,
)
from minillama.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def load(tmp_path):
    def load(text="", *overrides):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return load


@pytest.fixture
def errors_in(load):
    def errors_in(text="", *overrides):
        with pytest.raises(ConfigError) as error:
            load(text, *overrides)
        assert error.value.exit_status == 2
        return [str(expected) for expected in error.value.field_errors]

    return errors_in


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.dim=130", "model.dim = 130: is not divisible by n_heads = 4; change one"),
        ("model.dim=12", "model.head_dim = 3: must be even, since RoPE rotates pairs of features"),
        ("model.head_dim=7", "model.head_dim = 7: must be even"),
        ("model.n_kv_heads=3", "model.n_heads = 4: is not divisible by n_kv_heads = 3"),
        ("data.seq_len=257", "data.seq_len = 257: is above model.max_seq_len = 256"),
        (
            "optim.warmup_steps=1001",
            "optim.warmup_steps = 1001: the warm-up is longer than the run",
        ),
        ("train.micro_batch_size=5", "does not divide train.batch_size = 16"),
        *(
            (f"{field}={2**63}", f"{field} = {2**63}: must be at most 9,223,372,036,854,775,807")
            for field in ("train.seed", "train.steps", "model.dim")
        ),
        (
            f"train.seed={10**30}",
            f"train.seed = {10**30}: must be at most 9,223,372,036,854,775,807",
        ),
        ("optim.lr=-1e-3", "optim.lr = -0.001: should be greater than 0"),
        ("optim.lr=0", "optim.lr = 0: should be greater than 0"),
        ("optim.lr=.nan", "optim.lr = nan"),
        ("optim.lr=.inf", "optim.lr = inf: should be a finite number"),
        ("optim.lr=fast", "optim.lr = 'fast': should be a valid number"),
        ("optim.min_lr_ratio=1.1", "optim.min_lr_ratio = 1.1: should be less than or equal to 1"),
        ("optim.betas=[0.9, 1.0]", "optim.betas.1 = 1.0: should be less than 1"),
        ("optim.betas=[0.9]", "optim.betas.1 = None: is required"),
        ("optim.weight_decay=-0.1", "optim.weight_decay = -0.1"),
        ("optim.grad_clip=-1", "optim.grad_clip = -1"),
        ("optim.z_loss=-1", "optim.z_loss = -1"),
        ("optim.eps=0", "optim.eps = 0: should be greater than 0"),
        ("optim.kind=adam", "optim.kind = 'adam': unknown choice 'adam'; did you mean 'adamw'?"),
        ("optim.momentum=0.9", "optim.momentum = 0.9: adamw has no such field, but optim.betas"),
        ("optim.groups.embd.lr_factor=1", "optim.groups.embd = {'lr_factor': 1}: no such field"),
        ("optim.groups.head.lr_factor=1", "the head is the embedding (model.tie_embeddings)"),
        ("optim.groups.gains.weight_decay=1", "no norm's gain decays; set optim.decay_norms"),
        ("optim.schedule=cosin", "unknown choice 'cosin'; did you mean 'cosine'? valid: constant"),
        ("model.norm.kind=rmsnrom", "unknown norm kind 'rmsnrom'; did you mean 'rmsnorm'? valid: "),
        ("model.norm.placement=prenorm", "unknown norm placement 'prenorm'; did you mean"),
        ("model.norm.eps=-1", "model.norm.eps = -1: should be greater than or equal to 0"),
        ("model.norm.qk_norm=heads", "unknown choice 'heads'; did you mean 'head'?"),
        ("model.norm.options.beta=true", "model.norm.options.beta = True: no such field"),
        (
            "model.norm.options.partial=0",
            "model.norm.options.partial = 0: should be greater than 0",
        ),
        ("model.norm.options.partial=1.5", "should be less than or equal to 1"),
        ("model.n_layers=0", "model.n_layers = 0: should be greater than 0"),
        ("model.n_layers=2.5", "model.n_layers = 2.5: should be a valid integer"),
        ("model.n_layers=true", "model.n_layers = True: must be a number"),
        ("model.rope_theta=0", "model.rope_theta = 0"),
        ("model.rope_scaling={kind: yarn}", "unknown kind 'yarn'; valid: linear, llama3"),
        ("model.rope_scaling={kind: linear}", "model.rope_scaling.factor = None: is required"),
        ("model.rope_scaling={kind: linear, factor: 0.5}", "factor = 0.5: should be greater than"),
        (
            "model.rope_scaling={kind: llama3, low_freq_factor: 4}",
            "model.rope_scaling.high_freq_factor = 4.0: must exceed low_freq_factor",
        ),
        ("model.vocab_size=100", "model.vocab_size = 100: is smaller than the tokenizer's 512"),
        ("tokenizer.vocab_size=100", "tokenizer.vocab_size = 100: must be at least 270"),
        ("tokenizer={kind: byte, vocab_size: 512}", "a byte tokenizer always has 259 ids"),
        ("tokenizer={kind: byte, path: a.model}", "a byte tokenizer has no file"),
        ("data.source.kind=file", "unknown kind 'file'; did you mean 'files'?"),
        ("data.source.kind=files", "data.source.files = None: is required"),
        ("data.source={kind: files, files: []}", "at least 1 item"),
        ("data.source={kind: hub}", "data.source.path = None: is required"),
        ("data.source={path: x}", "needs a `kind`"),
        ("data.val_fraction=1", "data.val_fraction = 1: should be less than 1"),
        ("data.val_fraction=0", "data.val_fraction = 0: should be greater than 0"),
        ("train.steps=0", "train.steps = 0: should be greater than 0"),
        ("train.batch_size=-2", "train.batch_size = -2"),
        ("train.seed=-1", "train.seed = -1: should be greater than or equal to 0"),
        ("train.device=gpu", "train.device = 'gpu': does not match ^(auto|cpu|mps|cuda"),
        ("train.dtype=float8", "unknown choice 'float8'; did you mean"),
        ("train.compile=maybe", "train.compile = 'maybe': should be a valid boolean"),
        ("train.keep_last=0", "train.keep_last = 0"),
        ("loggers=[tensorbord]", "loggers.0 = 'tensorbord': unknown choice"),
        ("loggers=tensorboard", "loggers = 'tensorboard': should be a valid list"),
        ("name=a/b", "name = 'a/b': does not match"),
        ("name=..", "name = '..': does not match"),
        ("seed=1", "no such field; did you mean train.seed?"),
        ("lr=1", "no such field; did you mean optim.lr?"),
        ("modle.dim=1", "modle = {'dim': 1}: no such field; did you mean model?"),
        ("model.norm=layernorm", "model.norm = 'layernorm': must be a mapping of fields"),
        ("optim.learning_rate=1", "optim.learning_rate = 1: no such field"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_path_value_and_rule(errors_in, override, expected):
    found = errors_in("", override)
    assert len(found) == 1
    assert expected in found[0]


def test_hybrid_placement_refuses_another_norm_of_queries_and_keys(errors_in):
    found = errors_in("", "model.norm.placement=hybrid", "model.norm.qk_norm=head")
    assert found == [
        "model.norm.qk_norm = 'head': the hybrid placement norms q, k and v itself; "
        "leave this at none"
    ]


def test_all_errors_of_all_layers_are_reported_at_once(errors_in, load, tmp_path):
    text = """
model: {dim: 126, n_kv_heads: 3, norm: {kind: rmsnrom, eps: -1}}
data: {seq_len: 1000, source: {kind: files}}
optim: {lr: -1, warmup_steps: 99999, lrr: 3}
train: {micro_batch_size: 5}
"""
    found = errors_in(text, "tokenizer.vocab_size=20")
    assert {expected.split(" = ")[0] for expected in found} == {
        "model.dim",
        "model.n_heads",
        "model.norm.kind",
        "model.norm.eps",
        "data.seq_len",
        "data.source.files",
        "optim.lr",
        "optim.warmup_steps",
        "optim.lrr",
        "train.micro_batch_size",
        "tokenizer.vocab_size",
    }
    with pytest.raises(ConfigError) as error:
        load(text, "tokenizer.vocab_size=20")
    lines = str(error.value).splitlines()
    assert lines[0] == f"{tmp_path / 'config.yaml'}: {len(found)} errors"
    assert lines[1:] == [f"  {expected}" for expected in found]


def test_a_wrong_kind_causes_no_errors_about_the_options(errors_in):
    assert len(errors_in("model: {norm: {kind: layernrm, options: {bias: false}}}")) == 1
    assert len(errors_in("tokenizer: {kind: bytes, vocab_size: 259}")) == 1


def test_unknown_names_are_refused_at_every_level(errors_in):
    text = "data: {source: {kind: hub, path: x}}"
    sections = ["", "model.", "model.norm.", "tokenizer.", "data.", "data.source.", "optim."]
    for section in [*sections, "train.", "model.norm.options."]:
        found = errors_in(text, f"{section}xyzzy=1")
        assert found[0].startswith(f"{section}xyzzy = 1: no such field")
    assert (
        "no such field"
        in errors_in("model: {rope_scaling: {kind: linear, factor: 2, xyzzy: 1}}")[0]
    )


def test_errors_in_python_are_value_errors_that_name_the_rule():
    with pytest.raises(ValueError, match=r"dim = 10: is not divisible by n_heads = 4"):
        ModelConfig(dim=10)


# ---------------------------------------------------------------- defaults, freezing, overrides


def test_an_empty_file_is_the_default_run(load):
    assert load() == RunConfig()
    assert load().data.source.kind == "pydocs"


def test_numbers_are_read_as_people_write_them(load):
    config = load("optim: {lr: 3e-4}\ntrain: {steps: 1e4, batch_size: 1_000}", "optim.eps=1E-6")
    assert (config.optim.lr, config.optim.eps) == (3e-4, 1e-6)
    assert (config.train.steps, config.train.batch_size) == (10_000, 1000)


def test_every_section_is_frozen(load):
    config = load("model: {rope_scaling: {kind: linear, factor: 2}}")
    sections = [config, config.model, config.model.norm, config.model.rope_scaling, config.data]
    sections += [config.data.source, config.optim, config.train, config.tokenizer]
    for section in sections:
        for name in type(section).model_fields:
            with pytest.raises(ValidationError, match="frozen"):
                setattr(section, name, getattr(section, name))


def test_another_optimizer_brings_its_own_defaults(load):
    adamw = "optim: {betas: [0.8, 0.9]}"
    assert load(adamw).optim.betas == (0.8, 0.9)
    assert load(adamw, "optim.kind=lion").optim.betas == (0.9, 0.99)
    assert load(adamw, "optim.kind=muon").optim.momentum == 0.95
    assert load("optim: {kind: sgd}").optim.momentum == 0.9


def test_muon_refuses_to_be_sharded(errors_in):
    (error,) = errors_in("optim: {kind: muon}", "train.parallel=fsdp")
    assert "updates each matrix as a whole, and train.parallel = fsdp splits it; set ddp" in error


def test_overrides_set_fields_lists_and_mappings(load):
    config = load(
        "optim: {lr: 1e-3}\ndata: {source: {kind: pydocs}}",
        "optim.lr=2e-3",
        "optim.betas=[0.8, 0.9]",
        "data.source={kind: files, files: [a.txt, b.txt], format: text}",
        "model.norm={kind: layernorm, options: {bias: false}}",
        "loggers=[tensorboard]",
        "train.sample_prompt=",
    )
    assert config.optim.lr == 2e-3
    assert config.optim.betas == (0.8, 0.9)
    assert config.data.source.files == ["a.txt", "b.txt"]
    assert config.model.norm.options == {"affine": True, "bias": False}
    assert config.loggers == ["tensorboard"]
    assert config.train.sample_prompt is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("out_dir=runs/exp #2", "runs/exp #2"),
        ("out_dir='runs/a b'", "runs/a b"),
        ("train.sample_prompt=Chapter #1", "Chapter #1"),
        ("train.sample_prompt=# Title", "# Title"),
        ("train.sample_prompt='tis the season", "'tis the season"),
        ("train.sample_prompt=[INST] {a: b", "[INST] {a: b"),
        ("train.sample_prompt=true", "true"),
        ("train.sample_prompt=~", None),
        ("train.sample_prompt=null", None),
        ("name=2026", "2026"),
        ("name=1e3", "1e3"),
        ("plugins=[json, string]", ["json", "string"]),
        ("data.source={kind: files, files: a.txt}", ["a.txt"]),
        ("data.source.files=my #1.txt", ["my #1.txt"]),
        ("data.source.files=[a.txt, 'b #2.txt']", ["a.txt", "b #2.txt"]),
    ],
)
def test_an_override_of_a_string_is_kept_as_it_is_written(load, override, expected):
    config = load("data: {source: {kind: files, files: [x]}}", override)
    path = override.partition("=")[0]
    path += ".files" if path == "data.source" else ""
    assert get_path(config.model_dump(), path) == expected


def test_every_path_in_a_config_expands_the_home_folder(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text("")
    text = (
        "out_dir: ~/runs/a\nplugins: [~/mine.py]\ninit_from: ~/parent\n"
        "tokenizer: {path: ~/mine.model}\n"
        "data: {source: {kind: files, files: [~/a.txt, https://x.org/~b.txt]}}"
    )
    overridden = load(
        "data: {source: {kind: files}}",
        "out_dir=~/runs/a",
        "plugins=[~/mine.py]",
        "init_from=~/parent",
        "tokenizer.path=~/mine.model",
        "data.source.files=[~/a.txt, https://x.org/~b.txt]",
    )
    for config in (load(text), overridden):
        assert config.out_dir == str(tmp_path / "runs/a")
        assert config.plugins == [str(tmp_path / "mine.py")]
        assert config.init_from == str(tmp_path / "parent")
        assert config.tokenizer.path == str(tmp_path / "mine.model")
        assert config.data.source.files == [str(tmp_path / "a.txt"), "https://x.org/~b.txt"]


def test_one_file_needs_no_list(load):
    assert load("", "data.source={kind: files, files: a.txt}").data.source.files == ["a.txt"]


@pytest.mark.parametrize(
    ("text", "overrides", "section", "expected"),
    [
        (
            "data: {source: {kind: hub, path: a/b, streaming: true}}",
            ["data.source.kind=files", "data.source.files=[x]"],
            lambda c: c.data.source.files,
            ["x"],
        ),
        (
            "data: {source: {kind: hub, path: a/b}}",
            ["data.source.files=[x]", "data.source.kind=files"],  # the order does not matter
            lambda c: c.data.source.files,
            ["x"],
        ),
        (
            "model: {norm: {kind: rmsnorm, eps: 1e-3, options: {partial: 0.5}}}",
            ["model.norm.kind=layernorm"],
            lambda c: (c.model.norm.options, c.model.norm.eps),
            ({"affine": True, "bias": True}, 1e-3),
        ),
        (
            "model: {norm: {options: {partial: 0.5}}}",
            ["model.norm.kind=layernorm"],
            lambda c: c.model.norm.options,
            {"affine": True, "bias": True},
        ),
        (
            "model: {norm: {options: {partial: 0.5}}}",
            ["model.norm.kind=rmsnorm"],
            lambda c: c.model.norm.options["partial"],
            0.5,
        ),
        (
            "tokenizer: {vocab_size: 700}",
            ["tokenizer.kind=byte"],
            lambda c: c.tokenizer.vocab_size,
            259,
        ),
        (
            "model: {rope_scaling: {kind: llama3, original_max_seq_len: 64}}",
            ["model.rope_scaling.kind=linear", "model.rope_scaling.factor=2"],
            lambda c: c.model.rope_scaling.factor,
            2.0,
        ),
    ],
)
def test_another_kind_drops_the_settings_of_the_kind_before(
    load, text, overrides, section, expected
):
    assert section(load(text, *overrides)) == expected


def test_the_default_kinds_named_for_overrides_are_the_defaults():
    config = RunConfig().model_dump()
    for path, owned in OWNED_BY_KIND.items():
        section = config
        for name in path.split("."):
            section = section[name]
        assert owned.default_kind == (section and section["kind"]), path
        assert not owned.fields or set(owned.fields) < set(section), path


# ---------------------------------------------------------------- resolve


def test_resolving_fills_in_what_follows_from_other_fields(load):
    config = load("name: mine\nmodel: {dim: 96, n_heads: 6}\ntrain: {batch_size: 12}")
    model = config.model
    assert (model.vocab_size, model.n_kv_heads) == (DEFAULT_BPE_VOCAB_SIZE, 6)
    assert (model.head_dim, model.ffn_dim) == (16, 256)
    assert config.tokenizer.vocab_size == DEFAULT_BPE_VOCAB_SIZE
    assert config.out_dir == "runs/mine"
    assert config.train.micro_batch_size == 12
    assert load("out_dir: here").out_dir == "here"
    assert load("tokenizer: {kind: byte}").model.vocab_size == 259
    assert load("tokenizer: {vocab_size: 700}").model.vocab_size == 700
    assert load("model: {vocab_size: 1000}").model.vocab_size == 1000


def test_null_means_derived(load):
    assert load("model: {head_dim: null, ffn_dim: ~, n_kv_heads: , vocab_size: null}") == load()


def test_a_section_alone_is_complete():
    model = ModelConfig(dim=96, n_heads=6)
    assert (model.n_kv_heads, model.head_dim, model.ffn_dim) == (6, 16, 256)
    assert model.vocab_size is None  # a single block needs none
    assert RunConfig(name="mine").out_dir == "runs/mine"
    assert RunConfig().model.vocab_size == DEFAULT_BPE_VOCAB_SIZE


def test_a_config_written_out_and_read_again_is_the_same(load):
    for text in ("", "tokenizer: {kind: byte}", "model: {head_dim: 6, ffn_dim: 7, dim: 13}"):
        config = load(text)
        assert load(to_yaml(config)) == config


def test_plugin_files_are_kept_by_their_whole_path(load, tmp_path, monkeypatch):
    (tmp_path / "nothing.py").write_text("")
    monkeypatch.chdir(tmp_path)
    config = load("plugins: [nothing.py, json]")
    assert config.plugins == [str(tmp_path / "nothing.py"), "json"]


def test_a_missing_plugin_is_refused(load):
    with pytest.raises(ConfigError, match=r"plugins\.0 = 'nowhere\.py'.*no such file"):
        load("plugins: [nowhere.py]")


@pytest.mark.parametrize("value", ["mine.py", "[3]", "{a: 1}"])
def test_plugins_that_are_no_list_of_words_are_refused(errors_in, value):
    assert errors_in(f"plugins: {value}")[0].startswith("plugins")


# ---------------------------------------------------------------- YAML and schema


def test_a_run_folder_stands_for_its_config(load, tmp_path):
    config = load("name: '1e3'\ntrain: {sample_prompt: 'no'}\nmodel: {norm: {kind: dyt}}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    here = config.model_copy(update={"out_dir": str(tmp_path / "run")})
    assert load_config(tmp_path / "run") == here


def test_the_schema_is_json_and_lists_every_field():
    schema = json.loads(json_schema())

    def properties(model):
        name = model.__name__
        return (schema if model is RunConfig else schema["$defs"][name])["properties"]

    def walk(model):
        assert properties(model).keys() == model.model_fields.keys()
        for field in model.model_fields.values():
            for part in _models_in(field.annotation):
                walk(part)

    walk(RunConfig)
    assert {"LinearRopeScaling", "HubSource", "FilesSource", "NormConfig"} <= schema["$defs"].keys()
    assert schema["additionalProperties"] is False


def _models_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models_in(part)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_config_loads_and_documents_time_and_purpose(path):
    assert load_config(path).name == path.stem
    comment = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert "# Takes: " in comment
    assert "# Shows: " in comment


# ------------------------------------------------------------------- a run's own config, overridden


def resolved_file(load, *overrides):
    """Return the text of the config.yaml that a run of these overrides writes."""
    return to_yaml(load("", *overrides))


def test_what_was_filled_in_follows_an_override_of_a_runs_config(load):
    run = resolved_file(load)
    config = load(run, "model.dim=64", "model.n_heads=2", "name=wide", "train.batch_size=8")
    plain = load("", "model.dim=64", "model.n_heads=2", "name=wide", "train.batch_size=8")
    assert config == plain
    assert (config.model.head_dim, config.model.ffn_dim, config.model.n_kv_heads) == (32, 192, 2)
    assert (config.out_dir, config.train.micro_batch_size) == ("runs/wide", 8)
    assert load(run, "tokenizer.kind=byte").model.vocab_size == 259
    assert load(run, "tokenizer.vocab_size=300").model.vocab_size == 300


def test_what_was_set_in_a_run_is_kept_under_an_override(load):
    chosen = ["model.n_kv_heads=2", "model.head_dim=16", "model.ffn_dim=100"]
    chosen += ["train.micro_batch_size=4", "out_dir=mine", "model.vocab_size=700"]
    run = resolved_file(load, *chosen)
    config = load(run, "model.dim=64", "name=other", "train.batch_size=32")
    model = config.model
    assert (model.n_kv_heads, model.head_dim, model.ffn_dim, model.vocab_size) == (2, 16, 100, 700)
    assert (config.out_dir, config.train.micro_batch_size) == ("mine", 4)


def test_a_runs_config_is_unchanged_by_overrides_with_its_values(load):
    config = load("", "model.dim=96", "model.n_heads=3")
    run = to_yaml(config)
    assert load(run) == load(run, "model.dim=96") == load(run, "train.steps=1000") == config


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("name=other", True),
        ("out_dir=elsewhere", True),
        ("loggers=[tensorboard]", True),
        ("train.save_every=1", True),
        ("train.sample_prompt=Once", True),
        ("data.workers=2", True),
        ("train.steps=9", False),
        ("train.device=cuda", False),
        ("data.seq_len=9", False),
        ("model.norm.eps=1e-5", False),
    ],
)
def test_fields_without_effect_are_not_among_the_deciding_ones(load, override, same):
    text = "data: {shard_tokens: 1000}"
    assert (deciding_fields(load(text)) == deciding_fields(load(text, override))) == same


def test_prepared_tokens_depend_on_neither_windows_nor_workers(load):
    text = "data: {shard_tokens: 1000}"
    kept = token_fields(load(text))
    assert kept == {"val_fraction": 0.05, "split_seed": 0, "shard_tokens": 1000}
    assert token_fields(load(text, "data.seq_len=9", "data.workers=2")) == kept


def test_a_users_file_means_what_it_says(load):
    text = "model: {dim: 128, n_heads: 4, head_dim: 32}"
    assert load(text, "model.dim=256").model.head_dim == 32


def test_an_ablation_of_a_runs_config_fills_in_again(load, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load("")))
    file = tmp_path / "ablation.yaml"
    file.write_text("base: run\narms: {a: {}, b: {model.dim: 64}}\nbaseline: a\nlr: [1e-3]\n")
    _, narrow = cells(load_ablation(file))
    assert (narrow.config.model.head_dim, narrow.config.model.ffn_dim) == (16, 192)
    _, narrow = cells(load_ablation(file, ["base.model.n_heads=2"]))
    assert narrow.config.model.head_dim == 32


def test_an_empty_config_of_a_run_is_damage_and_not_a_run_of_defaults(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="is damaged: it is empty"):
        load_config(tmp_path)
    assert load_config(tmp_path / "config.yaml").model.dim == 128


def test_the_format_of_files_follows_their_names(tmp_path):
    source = "data.source={{kind: files, files: {}}}"
    for names, kind in (
        ("[a.txt, b.md]", "text"),
        ("x.jsonl", "json"),
        ("['https://x.org/a.csv.gz?download=true']", "csv"),
        ("'data/*.parquet'", "parquet"),
    ):
        assert load_config("tiny", [source.format(names)]).data.source.format == kind
    with pytest.raises(ConfigError, match=r"several formats: a.txt \(text\) and b.csv \(csv\)"):
        load_config("tiny", [source.format("[a.txt, b.csv]")])
    given = load_config("tiny", [source.format("[a.txt, b.csv], format: text")])
    assert given.data.source.format == "text"
    # In a config that was resolved before, the format follows an override of the files.
    (tmp_path / "config.yaml").write_text(to_yaml(given), encoding="utf-8")
    other = load_config(tmp_path / "config.yaml", ["data.source.files=[x.csv]"])
    assert other.data.source.format == "csv"
