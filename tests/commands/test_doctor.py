import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from minillama import __version__
from minillama.cli import main
from minillama.commands import doctor, self_test
from minillama.commands.version import describe_machine
from minillama.errors import MinillamaError
from minillama.model.kernels import library


@pytest.fixture
def kernels(monkeypatch):
    """Let a test change the environment of the kernels."""
    library.forget()
    yield monkeypatch
    library.forget()


def by_name(checks):
    return {check.name: check for check in checks}


def test_everything_works_here_and_no_home_folder_is_shown(monkeypatch, capsys):
    cache = Path(os.environ["MINILLAMA_CACHE"])
    monkeypatch.setenv("HOME", str(cache.parent))  # so that the path of the cache is to be hidden
    assert main(["doctor", "--json"]) == 0
    shown = capsys.readouterr().out
    assert str(cache.parent) not in shown
    report = json.loads(shown)
    assert (report["minillama"], report["works"]) == (__version__, True)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["cache"]["detail"].startswith(f"~/{cache.name}, ")
    assert {"torch", "threads", "memory", "compiler", "kernels"} <= checks.keys()
    assert {checks[name]["state"] for name in ("RMSNorm", "gradients")} == {"ok"}


def test_wrong_numbers_of_a_norm_are_broken(monkeypatch):
    assert self_test._norms().state == "ok"
    right = self_test.rms_norm
    for wrong in (
        lambda *inputs: right(*inputs) * 1.001,
        lambda *inputs: right(*inputs) * torch.nan,
    ):
        monkeypatch.setattr(self_test, "rms_norm", wrong)
        assert self_test._norms().state == "broken"


def test_wrong_gradients_of_a_step_are_broken(monkeypatch):
    assert self_test._gradients().state == "ok"
    right = self_test.Transformer.loss

    def wrong(*arguments):
        return right(*arguments) * 1.001

    monkeypatch.setattr(self_test.Transformer, "loss", wrong)
    assert self_test._gradients().state == "broken"


@pytest.mark.parametrize(
    ("compiler", "states"),
    [("no-such-compiler", ("note", "note")), ("false", ("broken", "broken"))],
)
def test_no_compiler_is_slow_and_a_bad_one_broken(kernels, compiler, states):
    kernels.setenv("CC", compiler)
    assert (self_test._compiler().state, self_test._kernels().state) == states


def test_kernels_that_are_off_are_a_note(kernels):
    kernels.setenv("MINILLAMA_KERNELS", "0")
    assert self_test._kernels().state == "note"
    assert "MINILLAMA_KERNELS=0" in self_test._kernels().detail
    assert "kernels: off" in describe_machine()


def test_a_cache_that_cannot_be_written_is_broken(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path / "file"))
    check = doctor._cache()
    assert check.state == "broken"
    assert "MINILLAMA_CACHE" in check.detail


def test_requirements_are_those_of_the_package_and_its_extras():
    needed, extras = doctor.requirements()
    assert {"torch", "pydantic"} <= {each.name for each in needed}
    assert {each.name for each in extras["hf"]} == {"transformers"}
    assert "dev" not in extras


def test_a_package_that_is_old_or_missing_is_named():
    needed = [Requirement(text) for text in ("torch>=1", "pydantic>=99", "no-such-package")]
    old, missing = doctor.unmet(needed)
    assert old.startswith("pydantic is 2")
    assert old.endswith(">=99")
    assert missing == "no-such-package is missing"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
    ids=["killed", "import"],
)
def test_a_self_test_that_dies_is_a_broken_check(monkeypatch, code, expected):
    first = '{"name": "torch", "state": "ok", "detail": "here"}'
    command = [sys.executable, "-c", f"print({first!r}, flush=True)\n{code}"]
    monkeypatch.setattr(doctor, "module_command", lambda module: command)
    before, died = doctor._self_test()
    assert before.detail == "here"
    assert died.state == "broken"
    assert expected in died.detail


def test_what_is_broken_ends_with_status_one_after_the_list(monkeypatch, capsys):
    broken = doctor.Check("gradients", "broken", "off by 1")
    monkeypatch.setattr(doctor, "_self_test", lambda: iter([broken]))
    assert main(["doctor"]) == MinillamaError.exit_status == 1
    shown = capsys.readouterr()
    assert "broken  gradients  off by 1" in shown.out
    assert shown.err == "minillama: gradients does not work; see above\n"


def test_version_shows_torch_and_the_state_of_the_kernels(tmp_path):
    command = [sys.executable, "-m", "minillama", "--version"]
    environment = {**os.environ, "MINILLAMA_CACHE": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    first, second, _, kernels = done.stdout.splitlines()
    assert first == f"minillama {__version__}"
    assert f"torch {torch.__version__}" in second
    assert kernels.startswith("kernels: n")  # not compiled yet, or none: nothing is compiled
    assert list(tmp_path.iterdir()) == []


def test_version_sees_that_the_kernels_are_compiled():
    if library.load(torch.float32) is None:
        pytest.skip("no C compiler here")
    assert describe_machine().splitlines()[-1].startswith("kernels: compiled, vectors of ")
    assert library.is_compiled(torch.float32)
