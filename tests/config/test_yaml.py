"""YAML as a config reads and writes it, and dotted overrides.  What is checked: test_reading.py."""

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from minillama.config.loading import (
    Owned,
    dump_yaml,
    json_copy,
    override,
    parse_overrides,
    read_yaml,
)
from minillama.errors import ConfigError


def read(tmp_path, text):
    file = tmp_path / "file.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(file)


# ---------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("3E4", 3e4),
        ("-1e3", -1000.0),
        ("1.5e-3", 1.5e-3),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("-7", -7),
        ("+7", 7),
        ("0", 0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("yes", "yes"),
        ("off", "off"),
        ("on", "on"),
        ("y", "y"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("0b1", "0b1"),
        ("1:30", "1:30"),
        ("12e", "12e"),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
        ("2024-01-01", "2024-01-01"),
        ("'3e-4'", "3e-4"),
        ("[1, 1e1, no]", [1, 10.0, "no"]),
        ("{a: {b: 1e-2}}", {"a": {"b": 0.01}}),
    ],
)
def test_scalars_are_read_as_yaml_1_2_has_them(tmp_path, text, value):
    got = read(tmp_path, f"key: {text}\n")["key"]
    assert got == value
    assert type(got) is type(value)
    assert parse_overrides([f"key={text}"]) == {"key": value}


def test_not_a_number_is_one(tmp_path):
    assert math.isnan(read(tmp_path, "key: .nan\n")["key"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1, 2\n", "line 3, column 1: not valid YAML"),
        ("\ta: 1\n", "line 1, column 1: not valid YAML"),
        ("a: 1\na: 2\n", "line 2, column 1: not valid YAML: the key 'a' appears twice"),
        ("x:\n  a: 1\n  'a': 2\n", "line 3, column 3: not valid YAML: the key 'a' appears twice"),
        ("x: {a: {b: 1, b: 2}}\n", "the key 'b' appears twice"),
        ("? [1, 2]\n: 3\n", "unhashable key"),
        ("? {a: 1}\n: 3\n", "unhashable key"),
        ("a: &a [*a]\n", "not valid YAML: nested too deeply, or holds itself"),
        ("a: &a\n  b: *a\n", "not valid YAML: nested too deeply, or holds itself"),
        ("a: *nowhere\n", "undefined alias"),
        ("a: !!timestamp x\n", "not valid YAML"),
        ("a: !!bool x\n", "not valid YAML"),
        ("a: !!int ''\n", "not valid YAML"),
        ("a: !!float x\n", "not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("a: !mine x\n", "could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "another document"),
        (f"a: {'9' * 5000}\n", "not valid YAML: Exceeds the limit"),
        (f"a: {'[' * 3000}\n", "not valid YAML: nested too deeply"),
        ("a: @x\n", "not valid YAML"),
        ("<<: 3\na: 1\n", "not valid YAML"),
        ("a: \0\n", "not valid YAML"),
        ("- a\n", "holds a list, not a mapping of config fields"),
        ("words\n", "holds a str, not a mapping"),
        (b"a: \xff\n", "cannot be read as a config"),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert message in str(error.value)
    assert str(tmp_path / "file.yaml") in str(error.value)


@pytest.mark.parametrize("text", ["", "# nothing but words\n", "---\n", "null\n"])
def test_an_empty_file_is_an_empty_mapping(tmp_path, text):
    assert read(tmp_path, text) == {}


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    assert read(tmp_path, "\ufeffa: 1\r\nb:\r\n  c: é\r\n") == {"a": 1, "b": {"c": "é"}}


def test_a_run_folder_stands_for_its_config(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1\n")
    assert read_yaml(tmp_path) == read_yaml(str(tmp_path)) == {"a": 1}


@pytest.mark.parametrize("name", ["nowhere.yaml", "nowhere/at/all.yaml", "folder"])
def test_a_missing_file_is_refused(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"no config at .*; name a YAML file, or a run folder"):
        read_yaml(tmp_path / name)


def test_anchors_and_merges_are_read_and_may_be_overridden(tmp_path):
    text = """
base: &base {kind: 1, mode: 1}
deep: {inner: &inner {<<: *base, kind: 2}}
top: {<<: *inner, mode: 3}
"""
    assert read(tmp_path, text) == {
        "base": {"kind": 1, "mode": 1},
        "deep": {"inner": {"kind": 2, "mode": 1}},
        "top": {"kind": 2, "mode": 3},
    }
    with pytest.raises(ConfigError, match="'<<' appears twice"):
        read(tmp_path, "b: &b {k: 1}\nx: {<<: *b, <<: *b}\n")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
tricky = (
    st.sampled_from(
        ["1e3", "3e-4", "no", "yes", "true", "null", "~", "010", "0x10", "1:30", "1_000", "1.", "."]
    )
    | st.sampled_from(
        ["=", "<<", "-", "- a", "a: b", "# c", "é", "2024-01-01", "", " ", "'", '"', "\n", "\t"]
    )
    | st.sampled_from(["\x85", "\u2028", "a\x85b", "\ufeff"])
)


@given(st.dictionaries(st.text() | tricky, plain | tricky, max_size=5))
@settings(max_examples=300, deadline=None)
def test_what_is_written_is_read_back_equal(tmp_path_factory, value):
    # One file for all examples: hypothesis runs this function many times.
    file = tmp_path_factory.getbasetemp() / "round.yaml"
    file.write_text(dump_yaml(value), encoding="utf-8")
    assert read_yaml(file) == value


def test_other_readers_of_yaml_read_it_too():
    value = {"a": "no", "b": "1e3", "c": 1e-08, "d": "010", "e": True, "f": [1, 2.5]}
    assert yaml.safe_load(dump_yaml(value)) == value


# ---------------------------------------------------------------- overrides


def test_overrides_are_read_as_yaml():
    arguments = ["a=1", "b.c=3e-4", "b.d=[x, 'y z']", "e={f: no}", "g=", "h=a=b", "i.j-k_2=true"]
    assert parse_overrides(arguments) == {
        "a": 1,
        "b.c": 3e-4,
        "b.d": ["x", "y z"],
        "e": {"f": "no"},
        "g": None,
        "h": "a=b",
        "i.j-k_2": True,
    }
    assert parse_overrides(["a=1", "a=2"]) == {"a": 2}


@pytest.mark.parametrize("argument", ["a", "", "=1", "a..b=1", ".a=1", "a.=1", "a b=1", "--a=1 "])
def test_what_is_no_override_says_how_to_write_one(argument):
    if argument.startswith("--"):
        assert parse_overrides([argument]) == {"--a": 1}  # argparse, not this, sorts out flags
        return
    with pytest.raises(ConfigError, match=r"is not an override; write a\.b=value"):
        parse_overrides([argument])


def test_an_override_that_is_no_yaml_is_named():
    with pytest.raises(ConfigError, match=r"override a\.b, line 1, column 2: not valid YAML"):
        parse_overrides(["a.b=["])


def test_overrides_reach_into_sections_and_make_missing_ones():
    raw = {"name": "a", "inner": {"depth": 2, "free": {"x": 1}}, "none": None}
    out = override(
        raw, {"inner.depth": 3, "inner.free.y": 2, "new.deep.leaf": [1], "none.k": 1}, {}
    )
    assert out == {
        "name": "a",
        "inner": {"depth": 3, "free": {"x": 1, "y": 2}},
        "new": {"deep": {"leaf": [1]}},
        "none": {"k": 1},
    }
    assert raw == {"name": "a", "inner": {"depth": 2, "free": {"x": 1}}, "none": None}


def test_a_section_can_be_replaced_whole_and_lists_are():
    raw = {"inner": {"depth": 2, "words": ["left"]}}
    assert override(raw, {"inner": {"depth": 5}}, {}) == {"inner": {"depth": 5}}
    assert override(raw, {"inner.words": ["right"]}, {})["inner"]["words"] == ["right"]


def test_an_override_does_not_share_its_value_with_the_result():
    value = {"x": [1]}
    out = override({}, {"inner.free": value}, {})
    out["inner"]["free"]["x"].append(2)
    assert value == {"x": [1]}


@pytest.mark.parametrize(("raw", "value"), [({"a": 3}, "3"), ({"a": {"b": [1]}}, r"\[1\]")])
def test_an_override_through_something_that_is_no_section_is_refused(raw, value):
    with pytest.raises(
        ConfigError, match=rf"override a\.b\.c: a(\.b)? is {value}, which has no fie"
    ):
        override(raw, {"a.b.c": 1}, {})


OWNED = {"inner.shape": Owned(None, "disc"), "inner": Owned(("free",), "plain")}
SQUARE = {"inner": {"shape": {"kind": "box", "width": 2, "height": 1}, "free": {"x": 1}}}


def test_another_kind_drops_what_belonged_to_the_old_one():
    out = override(SQUARE, {"inner.shape.kind": "disc"}, OWNED)
    assert out["inner"]["shape"] == {"kind": "disc"}
    out = override(SQUARE, {"inner.kind": "fancy"}, OWNED)
    assert out["inner"] == {"shape": SQUARE["inner"]["shape"], "kind": "fancy"}


def test_the_same_kind_keeps_its_settings():
    assert override(SQUARE, {"inner.shape.kind": "box"}, OWNED) == SQUARE
    assert override(SQUARE, {"inner.kind": "plain"}, OWNED)["inner"]["free"] == {"x": 1}


def test_a_section_without_a_kind_has_its_default_kind():
    raw = {"inner": {"shape": {"radius": 3.0}, "free": {"x": 1}}}
    out = override(raw, {"inner.shape.kind": "box", "inner.kind": "fancy"}, OWNED)
    assert out == {"inner": {"shape": {"kind": "box"}, "kind": "fancy"}}
    out = override(raw, {"inner.shape.kind": "disc", "inner.kind": "plain"}, OWNED)
    assert out["inner"]["shape"] == {"radius": 3.0, "kind": "disc"}
    assert out["inner"]["free"] == {"x": 1}


@given(st.permutations(["inner.shape.kind", "inner.shape.radius", "inner.free.y", "inner.kind"]))
def test_the_order_of_overrides_does_not_matter(names):
    values = {
        "inner.shape.kind": "disc",
        "inner.shape.radius": 2.0,
        "inner.free.y": 1,
        "inner.kind": "fancy",
    }
    out = override(SQUARE, {name: values[name] for name in names}, OWNED)
    assert out["inner"] == {
        "shape": {"kind": "disc", "radius": 2.0},
        "free": {"y": 1},
        "kind": "fancy",
    }


@given(st.permutations(["inner", "inner.depth", "inner.shape"]))
def test_a_section_goes_before_its_fields(names):
    values = {"inner": {"depth": 5, "words": []}, "inner.depth": 6, "inner.shape": {"kind": "disc"}}
    out = override(SQUARE, {name: values[name] for name in names}, OWNED)
    assert out["inner"] == {"depth": 6, "words": [], "shape": {"kind": "disc"}}


def test_json_copy_copies_at_every_depth():
    value = {"a": [1, {"b": (2, [3])}]}
    copy = json_copy(value)
    assert copy == {"a": [1, {"b": [2, [3]]}]}
    copy["a"][1]["b"][1].append(4)
    assert value == {"a": [1, {"b": (2, [3])}]}
