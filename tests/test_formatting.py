import math

import pytest

from minillama.errors import EXTRAS, ConfigError, missing_extra
from minillama.formatting import (
    format_bytes,
    format_duration,
    format_number,
    format_si,
    join_words,
    pluralize,
    text_table,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (86400, "1 day 0 h"),
        (190000, "2 days 4 h"),
        (-3, "0.0 s"),
        (math.inf, "–"),
        (math.nan, "–"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (950, "950"), (1234, "1.23 k"), (3.12e14, "312 T"), (math.nan, "–")],
)
def test_si_numbers_have_three_digits_and_a_prefix(value, text):
    assert format_si(value) == text


def test_an_si_number_joins_prefix_and_unit():
    assert format_si(6.7e13, "FLOP/s") == "67 TFLOP/s"
    assert format_si(6.7, "FLOP/s") == "6.7 FLOP/s"


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (3 << 29, "1.50 GiB")],
)
def test_bytes_are_in_binary_units(n_bytes, text):
    assert format_bytes(n_bytes) == text


def test_numbers_have_a_true_minus_and_signs_for_what_is_not_finite():
    assert [format_number(x) for x in (-0.1256, math.inf, -math.inf, math.nan)] == [
        "−0.126",
        "∞",
        "–",
        "–",
    ]
    assert format_number(1.0, 1) == "1.0"


def test_counts_agree_with_their_noun():
    assert pluralize(1, "seed") == "1 seed"
    assert pluralize(0, "seed") == "0 seeds"
    assert pluralize(1200, "loss", "losses") == "1,200 losses"


def test_words_are_joined_as_in_prose():
    assert join_words([]) == ""
    assert join_words(["a"]) == "a"
    assert join_words(["a", "b", "c"]) == "a, b and c"
    assert join_words(iter("ab"), "or") == "a or b"


def test_columns_of_a_table_are_as_wide_as_their_widest_entry():
    assert text_table([("a", "long", "x"), ("abc", "b", "")]) == "a    long  x\nabc  b"


def test_a_missing_package_is_named_with_its_extra():
    error = missing_extra("plotly", "the report")
    assert isinstance(error, ConfigError)
    assert str(error) == "the report needs plotly; install it: pip install 'minillama[report]'"
    assert "[bench]" in str(missing_extra("transformers", "bench step", "bench"))
    loggers = {"tensorboard", "trackio", "wandb"}
    assert set(EXTRAS.values()) == {"report", "hf", "gguf", "ray"} | loggers
