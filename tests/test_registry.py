import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillama.errors import ConfigError, UnknownNameError
from minillama.registry import Registry, nearest, unknown_name


@pytest.fixture
def colours():
    registry = Registry("colour")
    for name in ("red", "green", "dark green"):
        registry.register(name, name.upper())
    return registry


def test_what_is_registered_is_found(colours):
    assert colours.get("red") == "RED"
    assert colours.names() == list(colours) == ["dark green", "green", "red"]
    assert "red" in colours
    assert "blue" not in colours
    assert 3 not in colours
    assert Registry("empty").names() == []


def test_an_unknown_name_lists_the_valid_ones_and_the_nearest(colours):
    with pytest.raises(UnknownNameError) as error:
        colours.get("gren")
    assert str(error.value) == (
        "unknown colour 'gren'; did you mean 'green'? valid: dark green, green, red"
    )
    assert isinstance(error.value, ConfigError)
    with pytest.raises(UnknownNameError) as error:
        colours.get("xylophone")
    assert str(error.value) == "unknown colour 'xylophone'; valid: dark green, green, red"


def test_a_name_is_registered_once_but_the_same_entry_may_come_again(colours):
    entry = colours.get("red")
    colours.register("red", entry)
    with pytest.raises(ConfigError, match="colour 'red' is registered already; give yours another"):
        colours.register("red", "another red")
    assert colours.get("red") == "RED"


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("rmsnrom", "rmsnorm"),
        ("RMSNorm", "rmsnorm"),
        ("layer_norm", "layernorm"),
        ("LN", None),
        ("", None),
    ],
)
def test_nearest_guesses_slips_and_case(name, guess):
    assert nearest(name, ["rmsnorm", "layernorm", "none"]) == guess


def test_nearest_keeps_the_case_of_the_valid_name():
    assert nearest("fooo", ["Foo", "Bar"]) == "Foo"
    assert nearest("x", []) is None


@given(st.text(), st.lists(st.text(min_size=1)))
def test_no_name_breaks_the_complaint(name, valid):
    text = unknown_name("thing", name, valid)
    assert text.startswith(f"unknown thing {name!r}; ")
    assert all(v in text for v in valid)
