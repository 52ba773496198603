"""The command line as a process: encodings, closed and full outputs, help, exit statuses."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minillama
from minillama.cli import COMMANDS, main
from minillama.formatting import finite_json

SMALL = [
    "model.dim=16",
    "model.n_layers=1",
    "model.n_heads=2",
    "tokenizer.kind=byte",
    "train.steps=2",
    "train.batch_size=2",
    "data.seq_len=16",
    "optim.warmup_steps=0",
    "train.sample_prompt=null",
]
NEEDS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


def run(arguments, *, shell_suffix="", timeout=300, **environment):
    """Run the command in a shell, so that a suffix can close or redirect its outputs."""
    words = [sys.executable, "-m", "minillama", *arguments]
    return subprocess.run(
        ["bash", "-c", f'"$@" {shell_suffix}', "bash", *words],
        capture_output=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([*name.split(), "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"example:\n  minillama {name}" in shown
    assert "--quiet" in shown


QUICK = [["--help"], ["train", "--help"], ["config", "show", "tiny"], ["train", "tiny", "steps=1"]]


SMALL_LIBRARIES = {
    *("annotated_types", "cython_runtime", "pydantic", "pydantic_core", "sentencepiece"),
    *("typing_extensions", "typing_inspection", "yaml"),
}
"""Together they take a tenth of a second to import; torch alone takes ten times as long."""


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_help_the_config_and_its_errors_load_small_libraries_only(arguments):
    code = (
        "import sys\nfrom minillama.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    loaded = {name for name in done.stderr.splitlines()[-1].split() if not name.startswith("_")}
    assert loaded - sys.stdlib_module_names - {"minillama"} <= SMALL_LIBRARIES
    assert "minillama" in loaded


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["ablate", "--help"], ["norms"], ["norms", "rmsnorm"], ["configs"]],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["ascii", "C"],
)
def test_a_terminal_without_unicode_gets_escapes(arguments, environment):
    done = run(arguments, **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_a_plan_is_printed_in_ascii():
    done = run(["plan", "tiny", "--gpu", "h100", "--gpus", "2"], PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"2 \\xd7 h100" in done.stdout


@NEEDS_FULL
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [["norms"], ["config", "schema"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_line(arguments, unbuffered):
    done = run(arguments, shell_suffix=">/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    [line] = done.stderr.decode().splitlines()
    assert line.startswith("minillama: the output cannot be written")


@NEEDS_FULL
def test_help_on_a_full_disk_is_one_line():
    done = run(["--help"], shell_suffix=">/dev/full", PYTHONUNBUFFERED="")  # else argparse hides it
    assert done.returncode == 1
    assert done.stderr.startswith(b"minillama: the output cannot be written")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("suffix", ["| true", ">&-"], ids=["closed pipe", "closed"])
def test_a_closed_stdout_ends_a_listing_quietly(suffix):
    done = run(["norms"], shell_suffix=suffix)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "suffix",
    ["2>&-", pytest.param("2>/dev/full", marks=NEEDS_FULL), "2> >(exec true)", "-q >&- 2>&-"],
)
def test_training_survives_a_lost_stderr(suffix, tmp_path):
    out = tmp_path / "run"
    done = run(["train", "tiny", *SMALL, f"out_dir={out}"], shell_suffix=suffix)
    assert done.returncode == 0
    assert json.loads((out / "summary.json").read_bytes())["finished"] is True
    assert (out / "checkpoints" / "last" / "model.safetensors").is_file()


def test_figures_that_are_not_finite_are_null_in_strict_json():
    text = finite_json({"loss": 800.0, "perplexity": float("inf"), "n_bytes": 3})
    figures = json.loads(text, parse_constant=pytest.fail)
    assert figures == {
        "loss": 800.0,
        "perplexity": None,
        "n_bytes": 3,
        "not_finite": {"perplexity": "inf"},
    }
    assert finite_json({"loss": 1.0}) == '{"loss": 1.0}'


def test_eval_of_a_model_that_is_far_off_prints_strict_json(tmp_path, capsys):
    import torch

    from minillama import load_checkpoint
    from minillama.training.checkpoint import save_checkpoint

    out, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("some words " * 20, encoding="utf-8")
    assert main(["train", "tiny", *SMALL, f"out_dir={out}", "-q"]) == 0
    model, tokenizer, config = load_checkpoint(out)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1000)
    save_checkpoint(tmp_path / "far", model, tokenizer, config)
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "far"), "--text", str(text), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert figures["perplexity"] is None
    assert figures["not_finite"] == {"perplexity": "inf"}
    assert figures["loss"] > 700


def test_eval_names_its_own_option_where_the_text_is_wrong(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "tiny", *SMALL, f"out_dir={out}", "-q"]) == 0
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("empty.txt", "no text in"), ("pipe", "is a pipe"), ("gone", "no such")):
        assert main(["eval", str(out), "--text", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert said in error.splitlines()[-1]
        assert "--text" in error
        assert "data.source" not in error
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n' * 9, encoding="utf-8")
    assert main(["eval", str(out), "--text", str(tmp_path / "rows.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_bytes"] == 9 * len("some words")


def test_a_warm_up_that_is_too_long_names_the_override_that_fits(capsys):
    assert main(["config", "show", "tiny", "train.steps=5"]) == 2
    assert "set optim.warmup_steps=0 too" in capsys.readouterr().err
    assert main(["config", "show", "tiny", "train.steps=5", "optim.warmup_steps=0"]) == 0


def test_a_plugin_that_exits_is_no_success(tmp_path, capsys):
    plugin = tmp_path / "leaves.py"
    plugin.write_text("raise SystemExit(0)\n", encoding="utf-8")
    out = tmp_path / "run"
    assert main(["train", "tiny", *SMALL, f"out_dir={out}", f"plugins=[{plugin}]", "-q"]) != 0
    assert "exit" in capsys.readouterr().err
    assert not out.exists()


OTHER_PROGRAMS = {"--nproc-per-node", "--standalone", "--version", "--head"}
"""Of torchrun, compilers and ray."""


def test_every_option_that_a_message_names_is_one_of_a_command():
    ours = {
        name
        for command in COMMANDS.values()
        for argument in command.arguments
        for name in argument.names
    }
    named = {
        option
        for file in Path(minillama.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", node.value)
    }
    assert "--resume-from" in named
    assert named <= ours | {"--help", "--quiet"} | OTHER_PROGRAMS


def test_an_unknown_argument_is_named_with_the_usage_of_its_command(capsys):
    with pytest.raises(SystemExit) as left:
        main(["train", "tiny", "--frob"])
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert "unknown argument '--frob'" in shown
    assert "minillama train" in shown


def test_an_override_may_follow_an_option(capsys):
    assert main(["config", "show", "tiny", "-q", "optim.lr=1e-4"]) == 0
    assert "lr: 0.0001" in capsys.readouterr().out


def test_a_config_is_found_by_its_name_and_a_path_wins(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "show", "tiny"]) == 0
    assert "name: tiny" in capsys.readouterr().out
    (tmp_path / "tiny").write_text("name: mine\n", encoding="utf-8")
    assert main(["config", "show", "tiny"]) == 0
    assert "name: mine" in capsys.readouterr().out
    assert main(["config", "show", "tny"]) == 2
    assert "did you mean 'tiny'?" in capsys.readouterr().err


def test_configs_lists_every_shipped_config(capsys):
    assert main(["configs"]) == 0
    listed = capsys.readouterr().out
    for command in ("train tiny", "train llama-7b", "ablate norms", "ablate quick", "train base"):
        assert f"minillama {command}\n" in listed


# ------------------------------------------------------------------------------------------ Ctrl-C

INTERRUPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, module, path=None, target=None):
        if module == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            for _ in range(int(os.environ["INTERRUPTS"])):
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("module", ["minillama.cli", "yaml", "torch", "minillama.training.trainer"])
@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupt_during_imports_leaves_no_traceback(module, count, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run(
        ["train", "tiny", *SMALL, f"out_dir={tmp_path / 'run'}"],
        PYTHONPATH=paths,
        INTERRUPT_AT=module,
        INTERRUPTS=str(count),
    )
    assert done.returncode == 130
    assert done.stderr in (b"", b"minillama: interrupted\n")
    assert not (tmp_path / "run").exists()
