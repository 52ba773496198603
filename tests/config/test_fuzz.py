"""Any config is either accepted, and then stays what it is, or refused as a ConfigError."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillama.config import RunConfig, load_config
from minillama.config import loading as reading
from minillama.config.ablation import AblationConfig, load_ablation
from minillama.config.run import OWNED_BY_KIND, parse_run, to_yaml
from minillama.errors import ConfigError

even = st.integers(1, 8).map(lambda n: 2 * n)
positive = st.floats(1e-30, 1e30)
words = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12
) | st.sampled_from(["no", "1e3", "~", "a: b", "# x", " ", "\n", "\x85", "0x10", "'"])
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,8}", fullmatch=True)


@st.composite
def valid_models(draw):
    n_kv_heads, group, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(even)
    kind = draw(st.sampled_from(["rmsnorm", "layernorm", "dyt", "none"]))
    options = {
        "rmsnorm": {"affine": st.just(True), "partial": st.floats(0.01, 1)},
        "layernorm": {"affine": st.booleans(), "bias": st.booleans()},
        "dyt": {"alpha": positive, "alpha_attention": st.none() | positive},
        "none": {},
    }[kind]
    norm = {
        "eps": st.floats(0, 1),
        "placement": st.sampled_from(["pre", "post", "peri", "reordered", "rezero"]),
        "qk_norm": st.sampled_from(["none", "head", "full"]),
        "embed_norm": st.booleans(),
        "final_norm": st.none() | st.booleans(),
        "options": st.fixed_dictionaries({}, optional=options),
    }
    fields = {
        "n_layers": st.integers(1, 99),
        "ffn_dim": st.none() | st.integers(1, 999),
        "rope_theta": positive,
        "rope_scaling": st.none()
        | st.fixed_dictionaries({"kind": st.just("linear"), "factor": st.floats(1, 99)})
        | st.just({"kind": "llama3"}),
        "tie_embeddings": st.booleans(),
        "init": st.sampled_from(["normal", "fan_in"]),
        "vocab_size": st.none() | st.integers(5000, 9999),
        "norm": st.fixed_dictionaries({"kind": st.just(kind)}, optional=norm),
    }
    heads = {"n_heads": n_kv_heads * group, "n_kv_heads": n_kv_heads}
    if draw(st.booleans()):
        heads |= {"head_dim": head_dim, "dim": draw(st.integers(1, 99))}
    else:
        heads |= {"dim": head_dim * n_kv_heads * group}
    return heads | draw(st.fixed_dictionaries({}, optional=fields))


sources = (
    st.just({"kind": "pydocs"})
    | st.fixed_dictionaries(
        {"kind": st.just("files"), "files": st.lists(words, min_size=1, max_size=3)},
        optional={"format": st.sampled_from(["text", "csv"]), "text_field": words},
    )
    | st.fixed_dictionaries(
        {"kind": st.just("hub"), "path": words},
        optional={"streaming": st.booleans(), "max_documents": st.none() | st.integers(1, 9)},
    )
)


@st.composite
def valid_configs(draw):
    steps, micro = draw(st.integers(1, 10**6)), draw(st.integers(1, 8))
    seq_len = draw(st.integers(1, 999))
    optim = {
        "lr": positive,
        "min_lr_ratio": st.floats(0, 1),
        "warmup_steps": st.integers(0, steps),
        "betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)).map(list),
        "schedule": st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    }
    train = {
        "micro_batch_size": st.just(micro),
        "seed": st.integers(0, 2**63 - 1),
        "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:3", "mps"]),
        "sample_prompt": st.none() | words,
        "compile": st.booleans(),
    }
    tokenizer = {"kind": "byte"}
    if draw(st.booleans()):
        tokenizer = {"kind": "bpe", "vocab_size": draw(st.none() | st.integers(270, 5000))}
    return {
        "name": draw(names),
        "out_dir": draw(st.none() | words.filter(bool)),
        "model": draw(valid_models()) | {"max_seq_len": seq_len + draw(st.integers(0, 99))},
        "tokenizer": tokenizer,
        "data": {"source": draw(sources), "seq_len": seq_len},
        "optim": draw(st.fixed_dictionaries({}, optional=optim)),
        "train": {"steps": steps, "batch_size": micro * draw(st.integers(1, 4))}
        | draw(st.fixed_dictionaries({}, optional=train)),
    }


@given(valid_configs())
@settings(max_examples=100, deadline=None)
def test_a_valid_config_is_accepted_and_stays_what_it_is(tmp_path_factory, raw):
    config = parse_run(raw, "raw")
    assert parse_run(config.model_dump(), "dump") == config
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(file) == config
    # Each field it holds, set once more by name, changes nothing.
    dotted = [f"{name}={value!r}" for name, value in raw["train"].items() if type(value) is int]
    assert load_config(file, [f"train.{override}" for override in dotted]) == config


PATHS = sorted({path for path, _ in reading.fields_of(RunConfig)} - {"plugins"})
ABLATION_PATHS = sorted(path for path, _ in reading.fields_of(AblationConfig))
numbers = ["0", "1", "2", "3", "-1", "7", "128", "1e-3", ".nan", ".inf", "1e400", "9" * 20]
kinds = ["rmsnorm", "dyt", "byte", "hybrid", "head", "fan_in", "linear", "llama3", "files", "hub"]
plain = ["", "true", "null", "no", "x", "?", "="]
nested = ["[]", "{}", "[1]", "[x]", "[[]]", "{a: {b: 1}}", "{1: 2}", "{kind: 3}"]
nested += [f"{{kind: {kind}}}" for kind in kinds]
junk = st.one_of(*map(st.sampled_from, (numbers, kinds, plain, nested)), st.text(max_size=6))
more = st.sampled_from(["", "", "", ".kind", ".x", ".options", ".options.alpha", ".0", "s"])


@st.composite
def overrides_of(draw, paths):
    chosen = draw(st.lists(st.tuples(st.sampled_from(paths), more, junk), max_size=4))
    return [f"{path}{rest}={value}" for path, rest, value in chosen]


def accepts_or_refuses(file, overrides, load):
    try:
        config = load(file, overrides)
    except ConfigError as refused:
        error = refused
    else:
        file.write_text(to_yaml(config), encoding="utf-8")
        assert to_yaml(load(file)) == to_yaml(config)  # a number that is none equals nothing
        return
    assert error.exit_status == 2
    paths = [expected.path for expected in error.field_errors]
    assert len(set(paths)) == len(paths), str(error)
    assert "minillama" not in str(error)


@given(valid_configs() | st.just({}), overrides_of(PATHS))
@settings(max_examples=150, deadline=None)
def test_any_overrides_are_accepted_or_refused(tmp_path_factory, raw, overrides):
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_text(reading.dump_yaml(raw), encoding="utf-8")
    accepts_or_refuses(file, overrides, load_config)


@given(overrides_of(ABLATION_PATHS + [f"base.{path}" for path in PATHS]))
@settings(max_examples=60, deadline=None)
def test_any_overrides_of_an_ablation_are_accepted_or_refused(tmp_path_factory, overrides):
    raw = {"base": {}, "arms": {"a": {}, "b": {"optim.eps": 1}}, "baseline": "a", "lr": [1e-3]}
    file = tmp_path_factory.getbasetemp() / "fuzz-ablation.yaml"
    file.write_text(reading.dump_yaml(raw), encoding="utf-8")
    accepts_or_refuses(file, overrides, load_ablation)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["kind", "norm", "dim", "source", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["name", *RunConfig.model_fields]), anything, max_size=5))
@settings(max_examples=200, deadline=None)
def test_any_mapping_is_accepted_or_refused(raw):
    raw.pop("plugins", None)
    try:
        parse_run(raw, "raw")
    except ConfigError as refused:
        error = refused
    else:
        return
    assert error.field_errors


FIELDS = [path for path in PATHS if path.rpartition(".")[2] != "kind"]


def with_field(path, value):
    """Return a config with that field, in a section of a kind that has it."""
    raw = reading.override({}, {path: value}, OWNED_BY_KIND)
    sections = path.split(".")
    if sections[:2] == ["data", "source"] and len(sections) > 2:
        kind = {"files": "files", "format": "files"}.get(sections[-1], "hub")
        raw["data"]["source"].setdefault("kind", kind)
    if sections[:2] == ["model", "rope_scaling"] and len(sections) > 2:
        raw["model"]["rope_scaling"].setdefault("kind", "llama3")
    return raw


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_refuses_nonsense_under_its_own_name(path):
    with pytest.raises(ConfigError) as error:
        parse_run(with_field(path, {"no": {"such": ["thing"]}}), "raw")
    assert any(expected.path.startswith(path) for expected in error.value.field_errors), str(
        error.value
    )


@pytest.mark.parametrize("path", FIELDS)
def test_no_field_takes_true_for_a_number(path):
    try:
        value = parse_run(with_field(path, True), "raw").model_dump()
    except ConfigError:
        return
    for name in path.split("."):
        value = value[name]
    assert value is True
