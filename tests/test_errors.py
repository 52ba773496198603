import inspect
import pickle
import re

import pytest

from minillama import errors
from minillama.errors import ConfigError, FieldError, MinillamaError

CLASSES = {
    name: cls
    for name, cls in vars(errors).items()
    if inspect.isclass(cls) and issubclass(cls, Exception)
}


def test_every_error_is_in_the_diagram_with_exit_status_and_parent():
    assert errors.__doc__ is not None
    drawn, parents = {}, {}
    line_of = re.compile(r"^ *((?:│   )*)([├└]── )?(\w+Error)\b.*?\s(\d+)\s", re.MULTILINE)
    trail = {}
    for stems, branch, name, status in line_of.findall(errors.__doc__):
        depth = len(stems) // 4 + bool(branch)
        trail[depth] = name
        drawn[name], parents[name] = int(status), trail.get(depth - 1)
    assert drawn == {name: cls.exit_status for name, cls in CLASSES.items()}
    for name, cls in CLASSES.items():
        assert cls.__base__ is not None
        parent = cls.__mro__[1].__name__
        assert parents[name] == (parent if parent in CLASSES else None)
    assert issubclass(ConfigError, ValueError)


def test_one_except_clause_catches_all():
    assert all(issubclass(cls, MinillamaError) for cls in CLASSES.values())


def test_a_error_is_one_line():
    assert str(FieldError("a.b", 3, "must be even")) == "a.b = 3: must be even"
    assert str(FieldError("", 3, "must be even")) == "must be even"
    assert str(FieldError("a", "x\ny", "is odd")) == "a = 'x\\ny': is odd"
    long = str(FieldError("a", "x" * 1000, "is long"))
    assert len(long) < 80
    assert long.startswith("a = 'xxx")
    assert long.endswith("...: is long")


def test_a_config_error_lists_every_error():
    errors_in = [FieldError("a", 1, "is odd"), FieldError("b.c", 2, "is even")]
    one, two = (
        ConfigError.of("f.yaml", errors_in[:1]),
        ConfigError.of("f.yaml", errors_in),
    )
    assert str(one) == "f.yaml: a = 1: is odd"
    assert str(two) == "f.yaml: 2 errors\n  a = 1: is odd\n  b.c = 2: is even"
    assert one.field_errors == tuple(errors_in[:1])
    assert two.field_errors == tuple(errors_in)
    assert ConfigError("no such file").field_errors == ()


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_errors_cross_process_borders(cls):
    error = pickle.loads(pickle.dumps(cls("what is wrong")))
    assert type(error) is cls
    assert str(error) == "what is wrong"


def test_field_errors_cross_process_borders():
    error = ConfigError.of(
        "f.yaml", [FieldError("a", 1, "is odd"), FieldError("b", 2, "is even", "a")]
    )
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.field_errors == error.field_errors
