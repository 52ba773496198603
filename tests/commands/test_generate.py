import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from minillama.cli import main
from minillama.commands.models import Continuation, read_prompt
from minillama.errors import ConfigError
from minillama.training.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, trained):
    return trained(tmp_path_factory.mktemp("runs") / "run", **{"train.steps": 30})


def generate(*arguments, stdin=b""):
    command = [sys.executable, "-m", "minillama", "generate", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120)


def test_a_prompt_comes_from_a_file_less_its_last_line_end(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes("\ufeffGrün\r\nzwei\n\n".encode())
    assert read_prompt(None, str(path)) == "Grün\nzwei\n"
    assert read_prompt("text", None) == "text"
    assert read_prompt(None, None) == ""


def test_a_prompt_that_cannot_be_read_is_one_line(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("Grün".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8 at byte 2"):
        read_prompt(None, str(path))
    with pytest.raises(ConfigError, match="No such file"):
        read_prompt(None, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="exclude each other"):
        read_prompt("text", str(path))


def test_a_continuation_collects_what_it_yields(run_folder):
    model, tokenizer, _ = load_checkpoint(run_folder)
    continuation = Continuation(model, tokenizer, "the norm", 20, {"seed": 1})
    pieces = list(continuation)
    assert continuation.text == "the norm" + "".join(pieces)
    assert continuation.n_new == 20


def test_standard_input_is_continued_like_the_same_prompt(run_folder, capsys):
    options = [run_folder, "--max-new-tokens", "12", "--seed", "3"]
    assert main(["generate", *map(str, options), "--prompt", "the norm"]) == 0
    expected = capsys.readouterr().out
    assert len(expected) > len("the norm\n")
    for source in (["--prompt", "-"], ["--prompt-file", "-"]):
        done = generate(*options, *source, stdin=b"the norm\n")
        assert (done.returncode, done.stdout.decode()) == (0, expected)


@pytest.fixture
def converse(run_folder):
    def run(lines, *arguments):
        options = ("-i", "--max-new-tokens", "12", "--temperature", "0", *arguments)
        done = generate(run_folder, *options, stdin="".join(f"{line}\n" for line in lines).encode())
        assert done.returncode == 0, done.stderr
        return done.stdout.decode(), done.stderr.decode()

    return run


def test_a_piped_conversation_keeps_its_text_until_it_is_reset(converse, run_folder):
    out, err = converse(["the norm", "", "/text", "/reset", "the norm", "/frob", "/quit", "more"])
    model, tokenizer, _ = load_checkpoint(run_folder)
    first = Continuation(model, tokenizer, "the norm", 12, {"temperature": 0})
    one = "".join(first)
    two = "".join(Continuation(model, tokenizer, first.text, 12, {"temperature": 0}))
    assert out == f"{one}\n{two}\n{one}\n"
    assert err.startswith(f"{first.text}{two}\n")  # /text
    assert "unknown command /frob; see /help" in err


def test_interactive_takes_no_prompt_from_standard_input(run_folder, capsys):
    assert main(["generate", str(run_folder), "-i", "--prompt", "-"]) == 2
    assert "reads standard input itself" in capsys.readouterr().err


def test_ctrl_c_ends_a_continuation_and_ctrl_d_leaves(run_folder):
    terminal, side = pty.openpty()
    command = [sys.executable, "-m", "minillama", "generate", str(run_folder), "-i"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "100000000"],
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
    )
    os.close(side)
    shown = b""

    def wait_for(what, more):
        nonlocal shown
        end = time.monotonic() + 60
        while what not in shown or len(shown) < more:
            assert time.monotonic() < end, shown[-500:]
            shown += os.read(terminal, 4096)

    try:
        for _ in range(2):  # the second Ctrl-C works as well
            wait_for(b"> ", 0)
            shown = b""
            os.write(terminal, b"the norm\n")
            wait_for(b"the norm", 200)
            os.kill(process.pid, signal.SIGINT)
            wait_for(b"\n> ", 0)
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
