"""From YAML to a checked section, on sections of this file's own.  The fields: test_config.py."""

from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from minillama.config.loading import (
    NotBool,
    Section,
    check,
    refuse,
)
from minillama.errors import ConfigError, FieldError


class Disc(Section):
    kind: Literal["disc"]
    radius: Annotated[float, NotBool, Field(gt=0)] = 1.0


class Box(Section):
    kind: Literal["box"]
    width: Annotated[int, NotBool, Field(gt=0)]
    height: Annotated[int, NotBool, Field(gt=0)] = 1

    @model_validator(mode="after")
    def _check(self):
        if self.height > self.width:
            refuse([FieldError("height", self.height, f"is above width = {self.width}", "width")])
        return self


class Inner(Section):
    depth: int = 1
    shape: Annotated[Disc | Box, Field(discriminator="kind")] = Disc(kind="disc")
    words: tuple[Literal["left", "right"], ...] = ()
    free: dict[str, Any] = Field(default_factory=dict)


class Outer(Section):
    name: str = "x"
    limit: Annotated[int, NotBool, Field(ge=0)] = 10
    inner: Inner = Inner()

    @model_validator(mode="after")
    def _check(self):
        if self.inner.depth > self.limit:
            rule = f"is above limit = {self.limit}"
            refuse([FieldError("inner.depth", self.inner.depth, rule, "limit")])
        return self


def errors_in(raw):
    with pytest.raises(ConfigError) as error:
        check(Outer, raw, "here")
    assert str(error.value).startswith("here: ")
    return [str(expected) for expected in error.value.field_errors]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_a_sound_mapping_becomes_a_frozen_section():
    section = check(Outer, {"inner": {"depth": 2, "shape": {"kind": "box", "width": 2}}}, "here")
    assert section.inner.shape.width == 2
    for change in (
        lambda: setattr(section, "limit", 3),
        lambda: setattr(section.inner, "depth", 3),
        lambda: setattr(section, "new", 3),
        lambda: delattr(section, "limit"),
    ):
        with pytest.raises(ValidationError):
            change()


def test_all_errors_are_reported_at_once_with_path_value_and_rule():
    raw = {
        "name": 3,
        "limt": 1,
        "inner": {
            "depth": "deep",
            "shape": {"kind": "box", "hight": 2},
            "words": ["left", "rihgt"],
        },
    }
    assert errors_in(raw) == [
        "name = 3: should be a valid string",
        "inner.depth = 'deep': should be a valid integer, unable to parse string as an integer",
        "inner.shape.width = None: is required",
        "inner.shape.hight = 2: no such field; did you mean height? "
        "valid here: height, kind, width",
        "inner.words.1 = 'rihgt': unknown choice 'rihgt'; did you mean 'right'? valid: left, right",
        "limt = 1: no such field; did you mean limit? valid here: inner, limit, name",
    ]


def test_rules_about_two_fields_are_checked_despite_other_errors():
    raw = {"name": 3, "inner": {"depth": 20, "shape": {"kind": "box", "width": 1, "height": 2}}}
    assert errors_in(raw) == [
        "name = 3: should be a valid string",
        "inner.shape.height = 2: is above width = 1",
        "inner.depth = 20: is above limit = 10",
    ]


def test_a_missing_field_does_not_hide_the_other_errors():
    assert errors_in({"limit": 1, "inner": {"depth": 3, "shape": {"kind": "box"}}}) == [
        "inner.shape.width = None: is required",
        "inner.depth = 3: is above limit = 1",
    ]


def test_a_field_at_error_starts_no_second_complaint():
    # With limit dropped, its default 10 would be compared with the depth.
    assert errors_in({"limit": -1, "inner": {"depth": 20}}) == [
        "limit = -1: should be greater than or equal to 0"
    ]
    assert errors_in({"inner": {"shape": {"kind": "box", "width": -3, "height": 2}}}) == [
        "inner.shape.width = -3: should be greater than 0"
    ]


def test_a_field_of_another_section_is_pointed_to():
    assert "did you mean inner.depth?" in errors_in({"depth": 3})[0]
    assert "did you mean inner.shape.width?" in errors_in({"inner": {"width": 3}})[0]
    # Not to itself, where only the kind is wrong for it.
    assert errors_in({"inner": {"shape": {"kind": "disc", "width": 3}}}) == [
        "inner.shape.width = 3: no such field; valid here: kind, radius"
    ]


def test_a_dotted_name_in_a_file_is_told_how_to_nest():
    assert errors_in({"inner.depth": 3}) == [
        "inner.depth = 3: no such field; in a file, sections are nested: inner: {depth: ...}"
    ]
    assert "nested: inner: {shape: {kind: ...}}" in errors_in({"inner.shape.kind": "box"})[0]


def test_an_unknown_kind_is_the_only_error_of_its_section():
    assert errors_in({"inner": {"shape": {"kind": "bxo", "width": 3}}}) == [
        "inner.shape = {'kind': 'bxo', 'width': 3}: unknown kind 'bxo'; did you mean 'box'? "
        "valid: box, disc"
    ]
    assert "needs a `kind`" in errors_in({"inner": {"shape": {"width": 3}}})[0]


@pytest.mark.parametrize("value", [None, 3, "words", [1]])
def test_a_section_that_is_no_mapping_is_told_so(value):
    assert errors_in({"inner": value}) == [f"inner = {value!r}: must be a mapping of fields"]
    assert "must be a mapping of fields" in errors_in({"inner": {"shape": value}})[0]


def test_bytes_that_are_not_utf_8_are_refused_with_the_other_errors():
    assert errors_in({"name": "caf\udce9", "limit": -1}) == [
        "name = 'caf\\udce9': holds bytes that are not UTF-8; rename it, or set LC_ALL=C.UTF-8",
        "limit = -1: should be greater than or equal to 0",
    ]


@pytest.mark.parametrize("value", [True, False])
def test_truth_is_no_number(value):
    assert errors_in({"limit": value}) == [f"limit = {value}: must be a number"]
    assert (
        "must be a number" in errors_in({"inner": {"shape": {"kind": "disc", "radius": value}}})[0]
    )


@pytest.mark.parametrize(
    "raw", [{1: 2}, {None: 2}, {True: 2}, {"inner": {1: 2}}, {"inner": {"": 2}}]
)
def test_names_that_are_no_words_are_refused(raw):
    with pytest.raises(ConfigError):
        check(Outer, raw, "here")


def test_braces_in_a_value_do_no_harm():
    class Odd(Section):
        text: str

        @model_validator(mode="after")
        def _check(self):
            refuse([FieldError("text", self.text, "holds {braces} {0} {{}}")])

    with pytest.raises(ConfigError) as error:
        check(Odd, {"text": "{x} {} {0}"}, "here")
    assert str(error.value) == "here: text = '{x} {} {0}': holds {braces} {0} {{}}"


def test_refuse_nothing_is_nothing():
    assert refuse([]) is None


@given(st.dictionaries(st.sampled_from(["name", "limit", "inner", "x", ""]), plain, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_mapping_is_accepted_or_refused_with_its_errors(raw):
    try:
        check(Outer, raw, "here")
    except ConfigError as refused:
        error = refused
    else:
        return
    assert error.field_errors
    assert len({expected.path for expected in error.field_errors}) == len(error.field_errors)
