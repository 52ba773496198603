"""Imports point downwards and are at the top of a file: read from the source, nothing is run."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import minillama

PACKAGE = Path(minillama.__file__).parent

LAYERS = [
    ("errors",),
    ("arguments",),
    ("files", "registry", "launch", "formatting"),
    ("plugins", "progress"),
    ("config",),
    ("model", "data"),
    ("evaluation", "sampling", "plan"),
    ("training",),
    ("interop",),
    ("ablation",),
    ("bench",),
    ("commands",),
    ("watch",),
    ("cli",),
    ("__main__",),
]
"""From the ground up.  A part may import from itself and from lower layers, not from beside it."""

RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
IMPORTS_IN_FUNCTIONS = {
    "__main__.py",
    "ablation/stages.py",
    "bench/__init__.py",
    "cli.py",
    "data/files.py",
    "data/sources.py",
    "training/assemble.py",
    "training/checkpoint.py",
    "training/trainer.py",
}
"""The entry point handles a Ctrl-C before it loads the command line; a command loads what it needs;
a run of one process, nothing of torch.distributed's engines; a config is assembled without torch
unless it begins from a checkpoint; prepared data is used without `datasets` or pyarrow; a grid
without a second stage runs without scipy."""
UNKNOWN_TO_THE_MODEL = {"RunConfig", "TrainConfig", "OptimConfig", "DataConfig", "TokenizerConfig"}


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_in(tree, *, in_function=False):
    """Yield (import, whether it is in a function), those for type checkers aside."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, in_function
        elif is_type_checking(node):
            for other in node.orelse:
                yield from imports_in(ast.Module([other], []), in_function=in_function)
        else:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_in(node, in_function=in_function or function)


def targets(node):
    """Yield the parts of the package that an import statement leads to, '' for the package."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif node.module == "minillama":
        names = [f"minillama.{alias.name}" for alias in node.names]
    else:
        names = [node.module or ""]
    for name in names:
        top, _, rest = name.partition(".")
        if top == "minillama":
            part = rest.split(".")[0]
            yield part if part in RANK else ""


def field_errors(package):
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place == Path("__init__.py"):
            part = ""
        else:
            part = place.parts[0].removesuffix(".py")
            if part not in RANK:
                yield f"{place}: is in no layer"
                continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for argument in called_names(tree):
            name = beginning(argument)
            target = name.split(".")[1] if name.startswith("minillama.") else ""
            if name == "minillama." and part:
                yield f"{place}:{argument.lineno}: imports a module whose name is put together"
            elif target in RANK and target != part and RANK[target] >= RANK.get(part, -1):
                yield f"{place}:{argument.lineno}: {part} imports {target}"
        for node, in_function in imports_in(tree):
            where = f"{place}:{node.lineno}"
            if in_function and str(place) not in IMPORTS_IN_FUNCTIONS:
                yield f"{where}: imports in a function"
            if isinstance(node, ast.ImportFrom) and node.level:
                yield f"{where}: imports relatively"
                continue
            for target in targets(node):
                if not part and target:
                    yield f"{where}: the package itself imports {target}"
                elif target not in ("", part) and RANK[target] >= RANK[part]:
                    yield f"{where}: {part} imports {target}"
            names = {alias.name for alias in node.names}
            if part == "model" and names & UNKNOWN_TO_THE_MODEL:
                yield f"{where}: the model knows {names & UNKNOWN_TO_THE_MODEL}"


def test_imports_point_downwards_and_stand_at_the_top():
    assert list(field_errors(PACKAGE)) == []


# ------------------------------------------------------------------------------------------ circles


def called_names(tree):
    """Yield the argument of each import_module() and __import__() in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            if name in ("import_module", "__import__"):
                yield node.args[0]


def beginning(argument):
    """Return the part of a call's argument that is known: all of a string, an f-string's start."""
    first = argument.values[0] if isinstance(argument, ast.JoinedStr) else argument
    return first.value if isinstance(first, ast.Constant) else ""


def import_graph(package):
    """Return the modules of a package, each with those that it imports, in functions as well."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        modules[".".join(("minillama", *(p for p in parts if p != "__init__")))] = path
    graph = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = []
        for node, _ in imports_in(tree):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            else:
                both = [f"{node.module}.{alias.name}" for alias in node.names]
                names += [name if name in modules else node.module for name in both]
        if module != "minillama":  # its public names load on first use
            for start in map(beginning, called_names(tree)):
                names += [
                    m
                    for m in modules
                    if m == start or (start.endswith(".") and m.startswith(start))
                ]
        graph[module] = {name for name in names if name in modules} - {module}
    return graph


def circle(package):
    try:
        graphlib.TopologicalSorter(import_graph(package)).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other_in_a_circle():
    assert len(import_graph(PACKAGE)) > 80
    assert circle(PACKAGE) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from minillama.data import a",
        "import minillama.data.a",
        "from minillama.data.a import f",
        "def f():\n    from minillama.data.a import g",
        "import importlib\nimportlib.import_module('minillama.data.a')",
        "from importlib import import_module\ndef f():\n    import_module('minillama.data.a')",
        "__import__('minillama.data.a')",
    ],
)
def test_a_planted_circle_is_found(tmp_path, statement):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.py").write_text("from minillama.data.b import f")
    (tmp_path / "data" / "b.py").write_text("from minillama.data.c import f")
    (tmp_path / "data" / "c.py").write_text("")
    assert circle(tmp_path) == []
    (tmp_path / "data" / "c.py").write_text(statement)
    assert set(circle(tmp_path)) == {"minillama.data.a", "minillama.data.b", "minillama.data.c"}


def test_the_walk_sees_the_package():
    files = list(PACKAGE.rglob("*.py"))
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in files}
    assert {"config", "model", "data", "training", "cli"} <= parts
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    found = {target for tree in trees for node, _ in imports_in(tree) for target in targets(node)}
    assert {"errors", "config", "model", "data", "training"} <= found


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("config.py", "from minillama.model.norms import RMSNorm", "config imports model"),
        ("config.py", "import minillama.training.trainer", "config imports training"),
        ("config.py", "from minillama import sampling", "config imports sampling"),
        ("model/x.py", "from minillama.data import batches", "model imports data"),
        ("model/x.py", "from minillama.evaluation import evaluate", "model imports evaluation"),
        ("model/x.py", "from minillama.config import ModelConfig, RunConfig", "the model knows"),
        ("data/x.py", "from minillama.model.norms import RMSNorm", "data imports model"),
        ("errors.py", "from minillama.registry import nearest", "errors imports registry"),
        ("data/x.py", "import_module('minillama.training.trainer')", "data imports training"),
        ("data/x.py", "__import__('minillama.cli')", "data imports cli"),
        ("data/x.py", "import_module(f'minillama.{x}')", "whose name is put together"),
        ("training/x.py", "if True:\n    from minillama.ablation import grid", "imports ablation"),
        ("training/x.py", "from ..ablation import grid", "imports relatively"),
        ("training/x.py", "def f():\n    import os", "x.py:2: imports in a function"),
        (
            "training/x.py",
            "class A:\n    async def f(self):\n        if self:\n            import os",
            "x.py:4: imports in a function",
        ),
        ("training/cli.py", "def f():\n    import os", "imports in a function"),
        (
            "config.py",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    pass\nelse:\n    from minillama.model import norms",
            "config imports model",
        ),
        ("__init__.py", "from minillama.config import RunConfig", "the package itself imports"),
        ("utils.py", "", "utils.py: is in no layer"),
    ],
)
def test_a_planted_error_is_found(tmp_path, file, source, expected):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    found = list(field_errors(tmp_path))
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cli.py", "def f():\n    from minillama.training.trainer import train"),
        ("training/x.py", "from minillama import __version__, config\nimport minillama"),
        ("training/x.py", "from minillama.training.y import z\nfrom torch import nn"),
        (
            "config.py",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from minillama.model.norms import RMSNorm",
        ),
        ("__init__.py", "import typing\nif typing.TYPE_CHECKING:\n    import minillama.config"),
    ],
)
def test_what_is_allowed_is_no_error(tmp_path, file, source):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    assert list(field_errors(tmp_path)) == []


SLOW_PARTS_OF_TORCH = {"torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("minillama", {"torch", "pydantic", "transformers"}),
        ("minillama.config", {"torch", "transformers", "datasets", "numpy"}),
        ("minillama.cli", {"torch", "transformers", "datasets", "matplotlib"}),
        ("minillama.training.trainer", {"transformers", "matplotlib", "plotly", "tensorboard"}),
        ("minillama.training.trainer", SLOW_PARTS_OF_TORCH),
        ("minillama.ablation.runner", {"ray", "matplotlib"}),
        # A report reads the files of finished runs, and needs no model for it.
        ("minillama.ablation.report", {"torch", "transformers", "minillama.model.transformer"}),
    ],
)
def test_what_a_module_does_not_load(module, absent):
    code = f"import sys, {module}; print(*sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


def test_a_run_starts_without_the_slow_parts_of_torch(tmp_path):
    """Each takes its share of a second, which every short cell of an ablation would pay."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh " * 99)
    config = {
        "out_dir": str(tmp_path / "run"),
        "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 16},
        "tokenizer": {"kind": "byte"},
        "data": {"source": {"kind": "files", "files": [str(text)]}, "seq_len": 16},
        "optim": {"warmup_steps": 0},
        "train": {"steps": 2, "batch_size": 2, "eval_every": 0, "device": "cpu"},
    }
    code = (
        "import sys; from minillama.config.run import parse_run; "
        "from minillama.training.trainer import train; "
        f"train(parse_run({config!r}, 'test'), progress=False); "
        f"print(*sorted({SLOW_PARTS_OF_TORCH!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == ""
