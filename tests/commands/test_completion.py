import shutil
import subprocess

import pytest

from minillama.cli import COMMANDS, _parser
from minillama.commands.completion import completion_script


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory):
    path = tmp_path_factory.mktemp("bash") / "minillama.bash"
    path.write_text(completion_script(_parser(), "bash"), encoding="utf-8")
    return path


@pytest.fixture
def complete(bash_script, tmp_path):
    """Return a function from the words of a command line to what bash offers for the last."""
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "notes.txt").touch()
    for name in ("tiny", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "config.yaml").touch()

    def offered(*words):
        code = (
            f'source "{bash_script}"; COMP_WORDS=(minillama "$@"); COMP_CWORD=$#; '
            '_shtab_minillama; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", code, "bash", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return offered


def test_bash_completes_every_command(complete):
    assert {name.split()[0] for name in COMMANDS} <= set(complete(""))
    assert complete("gene") == ["generate"]
    assert set(complete("config", "s")) == {"show", "schema"}


def test_bash_completes_the_names_of_configs_and_yaml_files(complete):
    assert "tinystories" in complete("train", "tiny")
    assert "mine.yaml" in complete("train", "m")
    assert "norms" in complete("ablate", "n")
    assert "notes.txt" not in complete("train", "n")


def test_bash_completes_run_folders_from_their_names(complete):
    assert "runs/tiny" in complete("generate", "t")
    assert "runs/tiny" in complete("report", "runs/")
    assert "runs/other" not in complete("generate", "o")  # there is no run in it


def test_bash_completes_options_and_files(complete):
    assert "--prompt-file" in complete("generate", "--p")
    assert "notes.txt" in complete("generate", "--prompt-file", "no")


def test_the_script_for_zsh_names_configs_and_commands():
    script = completion_script(_parser(), "zsh")
    assert script.startswith("#compdef minillama")
    assert "compadd -- llama-160m" in script
    if (zsh := shutil.which("zsh")) is not None:
        subprocess.run([zsh, "-n"], input=script, text=True, check=True, timeout=60)
