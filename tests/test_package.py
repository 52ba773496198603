import ast
import importlib
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import minillama


@pytest.mark.parametrize("name", minillama.__all__)
def test_a_public_name_is_what_its_module_has(name):
    home = importlib.import_module(f"minillama.{minillama._HOME[name]}")
    assert getattr(minillama, name) is getattr(home, name)
    assert callable(getattr(minillama, name))
    assert getattr(minillama, name).__doc__


def test_public_names_are_listed_once_and_the_same_everywhere():
    assert sorted(minillama.__all__) == sorted(set(minillama.__all__)) == sorted(minillama._HOME)
    tree = ast.parse(Path(minillama.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module.removeprefix("minillama.")
        for node in block.body
        for alias in node.names
    }
    assert typed == minillama._HOME
    assert set(minillama.__all__) <= set(dir(minillama))


def test_a_star_import_brings_the_public_names():
    names = {}
    exec("from minillama import *", names)
    assert set(minillama.__all__) <= names.keys()


def test_the_modules_do_not_hide_the_functions():
    from minillama import evaluate, generate
    from minillama.sampling import generate_batch, stream

    assert minillama.generate is generate
    assert inspect.isfunction(evaluate)
    assert inspect.isfunction(generate)
    assert inspect.isfunction(generate_batch)
    assert inspect.isgeneratorfunction(stream)


def test_the_function_is_there_though_its_module_was_imported_first():
    code = (
        "import minillama.sampling, minillama.evaluation\n"
        "for name in ('generate', 'evaluate'):\n"
        "    assert type(getattr(minillama, name)).__name__ == 'function', name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'minillama' has no attribute 'Trainer'"):
        _ = minillama.Trainer
    assert not hasattr(minillama, "__wrapped__")


def test_the_version_is_that_of_the_installed_package():
    assert importlib.metadata.version("minillama") == minillama.__version__


def test_the_package_is_typed():
    assert (Path(minillama.__file__).parent / "py.typed").is_file()
