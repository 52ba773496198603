"""`minillama generate --interactive`: a prompt, its continuation, the next prompt.

A model that was trained on plain text continues text; it answers nothing.  So the context is one
text that grows: each prompt is added on a line of its own, and each continuation after it.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from minillama.commands.models import Continuation
from minillama.errors import ConfigError
from minillama.sampling import SamplingOptions
from minillama.training.checkpoint import load_checkpoint

with suppress(ImportError):  # arrow keys and history, where Python has them
    import readline  # noqa: F401

HELP = """\
an empty line  continue the text
/reset         forget the text so far
/text          show it
/help          show this
/quit          leave, as Ctrl-D does
Ctrl-C         end a continuation"""


def converse(
    checkpoint: str,
    prompt: str,
    max_new_tokens: int,
    options: SamplingOptions,
    write: Callable[[str], None],
) -> None:
    """Continue prompts from standard input until it ends.

    Args:
        checkpoint: a checkpoint or a run folder.
        prompt: continued first, if it is not empty.
        max_new_tokens: of each continuation, at most.
        options: of the sampling; continuation i, from 0, is drawn with ``seed + i``.
        write: shows text at once.

    Raises:
        ConfigError: standard input is not UTF-8.
    """
    model, tokenizer, _ = load_checkpoint(checkpoint)
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{checkpoint}; each prompt continues the text so far\n{HELP}", file=sys.stderr)
    text, seed = "", options.get("seed")
    first = [prompt] if prompt else []
    with _interruptible():
        for line in _lines(first, terminal):
            if line in ("/help", "/text", "/reset", "/quit"):
                if line == "/quit":
                    return
                text = "" if line == "/reset" else text
                answer = {"/help": HELP, "/text": text, "/reset": "the text is empty again"}[line]
                print(answer, file=sys.stderr, flush=True)
                continue
            if line.startswith("/"):
                print(f"unknown command {line.split()[0]}; see /help", file=sys.stderr, flush=True)
                continue
            text += "\n" * bool(text and line) + line
            continuation = Continuation(model, tokenizer, text, max_new_tokens, options)
            with suppress(KeyboardInterrupt):
                for piece in continuation:
                    write(piece)
            text = continuation.text
            write("\n")
            if seed is not None:
                seed += 1
                options = {**options, "seed": seed}


def _lines(first: list[str], terminal: bool) -> Iterator[str]:
    """Yield ``first`` and then the lines of standard input, without their ends."""
    yield from first
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("\nCtrl-D leaves", file=sys.stderr)
            continue
        except UnicodeDecodeError:
            raise ConfigError("standard input is not UTF-8; save the prompts as UTF-8") from None
        if not line and not terminal:
            return
        yield line.rstrip("\r\n")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let each Ctrl-C raise KeyboardInterrupt; the command line ignores all but the first."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
