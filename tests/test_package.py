import ast
import importlib
import importlib.metadata
import inspect
import os
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
    assert inspect.isfunction(stream)


def test_the_function_is_there_though_its_module_was_imported_first():
    code = (
        "import minillama.sampling, minillama.evaluation\n"
        "for name in ('generate', 'evaluate'):\n"
        "    assert type(getattr(minillama, name)).__name__ == 'function', name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'minillama' has no attribute 'Trainer'"):
        _ = minillama.Trainer
    assert not hasattr(minillama, "__wrapped__")


def test_the_version_is_that_of_the_installed_package():
    assert importlib.metadata.version("minillama") == minillama.__version__


def test_the_package_is_typed():
    assert (Path(minillama.__file__).parent / "py.typed").is_file()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder into which the wheel has been built and installed, without dependencies."""
    root = Path(minillama.__file__).parents[1]
    wheels, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    subprocess.run(build, cwd=root, check=True, capture_output=True, timeout=300)
    [wheel] = wheels.iterdir()
    install = ["install", "--no-deps", "--no-index", "--quiet", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=300)
    return target


def test_an_installed_wheel_holds_the_package_and_its_configs(installed):
    package = Path(minillama.__file__).parent

    def files(folder, pattern="*"):
        paths = (path.relative_to(folder) for path in folder.rglob(pattern) if path.is_file())
        return {path for path in paths if "__pycache__" not in path.parts}

    configs = files(package.parent / "configs", "*.yaml")
    assert files(installed / "minillama") == files(package) | {"configs" / c for c in configs}
    assert len(configs) > 10


def test_an_installed_wheel_finds_its_configs_by_name(installed, tmp_path):
    code = (
        "import minillama\n"
        "from minillama import load_config\n"
        "from minillama.config.ablation import load_ablation\n"
        "print(minillama.__file__)\n"
        "print(load_config('tiny').name, load_ablation('quick').base['name'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        check=True,
        text=True,
        timeout=300,
    )
    where, names = done.stdout.splitlines()
    assert Path(where).is_relative_to(installed)
    assert names == "tiny tiny"
