import pickle
import sys

import pytest

from minillama import plugins
from minillama.errors import ConfigError
from minillama.plugins import load_plugins, plugin_source_hash


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """Leave neither plugins nor their modules behind."""
    monkeypatch.setattr(plugins, "_LOADED_PLUGINS", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_is_run_once_a_process_by_whatever_path_it_is_named(tmp_path, monkeypatch):
    file = write(tmp_path / "count.py", "import sys\nsys.seen = getattr(sys, 'seen', 0) + 1\n")
    monkeypatch.setattr(sys, "seen", 0, raising=False)
    monkeypatch.chdir(tmp_path)
    load_plugins([file, file])
    load_plugins(["count.py", "./count.py"])
    assert sys.seen == 1


def test_a_module_is_seen_from_the_current_folder(tmp_path, monkeypatch):
    write(tmp_path / "my_plugin_module.py", "value = 3\n")
    monkeypatch.chdir(tmp_path)
    load_plugins(["my_plugin_module"])
    assert sys.modules["my_plugin_module"].value == 3


def test_two_files_of_one_name_are_two_plugins(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "norm.py", f"name = {folder!r}\n")
    load_plugins([str(tmp_path / "a" / "norm.py"), str(tmp_path / "b" / "norm.py")])
    assert [module.name for module in plugins._LOADED_PLUGINS.values()] == ["a", "b"]


def test_dataclasses_and_pickle_work_in_a_plugin_file(tmp_path):
    file = write(
        tmp_path / "my-norm.v2.py",
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "@dataclass\n"
        "class Spec:\n"
        "    size: int = 3\n"
        "    kind: ClassVar[str] = 'x'\n",
    )
    load_plugins([file])
    (module,) = plugins._LOADED_PLUGINS.values()
    assert pickle.loads(pickle.dumps(module.Spec(4))) == module.Spec(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n\ny = 1 / 0\n", "ZeroDivisionError: division by zero (line 3)"),
        ("def f():\n    raise KeyError('k')\n\nf()\n", "KeyError: 'k' (line 2)"),
        ("x = = 1\n", "SyntaxError: invalid syntax"),
        ("import no_such_module_at_all\n", "No module named 'no_such_module_at_all' (line 1)"),
        ("from minillama.errors import ConfigError\nraise ConfigError('mine')\n", ": mine"),
    ],
)
def test_a_plugin_that_raises_is_named_with_the_line(tmp_path, text, message):
    good = write(tmp_path / "good.py", "")
    file = write(tmp_path / "bad.py", text)
    with pytest.raises(ConfigError) as error:
        load_plugins([good, file])
    assert str(error.value).startswith(f"plugins.1 = {file!r}: ")
    assert message in str(error.value)
    assert not any("bad" in name for name in sys.modules if name.startswith("minillama_plugin"))


def test_a_plugin_can_be_mended_and_loaded_again(tmp_path):
    file = write(tmp_path / "mended.py", "1 / 0\n")
    with pytest.raises(ConfigError):
        load_plugins([file])
    write(tmp_path / "mended.py", "value = 1\n")
    load_plugins([file])
    assert [module.value for module in plugins._LOADED_PLUGINS.values()] == [1]


@pytest.mark.parametrize(
    "plugin", ["nowhere.py", "no_such_module_at_all", "", ".", ".x", "a..b", "a b", ".py", "\0"]
)
def test_a_plugin_that_is_not_there_is_refused(plugin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_plugins([plugin])
    assert str(error.value).startswith(f"plugins.0 = {plugin!r}: ")


def test_a_folder_is_no_plugin_file(tmp_path):
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match="no such file"):
        load_plugins([str(tmp_path / "folder.py")])


@pytest.mark.parametrize("status", [0, 1, "'some reason'"])
def test_a_plugin_that_exits_is_an_error(tmp_path, status):
    plugin = tmp_path / "leaves.py"
    plugin.write_text(f"import sys\nsys.exit({status})\n")
    with pytest.raises(ConfigError, match=r"plugins\.0 = .*leaves\.py.*SystemExit.*\(line 2\)"):
        load_plugins([str(plugin)])


def test_a_plugin_that_exits_or_reads_stdin_is_a_config_error(tmp_path):
    for body, said in (("import sys; sys.exit()", "SystemExit"), ("input()", "EOFError")):
        file = write(tmp_path / f"{said}.py", body)
        with pytest.raises(ConfigError, match=rf"{said}.*\(line 1\)"):
            load_plugins([file])


def test_the_hash_of_plugins_is_that_of_their_source(tmp_path, monkeypatch):
    def hash_of(*names):
        monkeypatch.setattr(plugins, "_LOADED_PLUGINS", {})
        return plugin_source_hash([str(tmp_path / name) for name in names])

    write(tmp_path / "a.py", "x = 1\n")
    write(tmp_path / "b.py", "y = 1\n")
    assert plugin_source_hash([]) == ""
    first, both = hash_of("a.py"), hash_of("a.py", "b.py")
    assert first != both
    assert first == hash_of("a.py")
    write(tmp_path / "a.py", "x = 2\n")
    assert first != hash_of("a.py")
    write(tmp_path / "a.py", "x = 1\n")
    assert both == hash_of("a.py", "b.py")


def test_the_hash_of_a_package_covers_all_of_its_files(tmp_path, monkeypatch):
    package = tmp_path / "hashed_package"
    package.mkdir()
    write(package / "__init__.py", "")
    write(package / "part.py", "x = 1\n")
    monkeypatch.chdir(tmp_path)
    first = plugin_source_hash(["hashed_package"])
    write(package / "part.py", "x = 2\n")
    assert plugin_source_hash(["hashed_package"]) == first  # of what is loaded
    monkeypatch.setattr(plugins, "_LOADED_PLUGINS", {})
    assert plugin_source_hash(["hashed_package"]) != first
