import io
import sys

import pytest

from minillama import progress
from minillama.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, steps=5, show=True):
    monkeypatch.setattr(sys, "stderr", stream)
    with ProgressBar("name", steps, done=2, show=show) as bar:
        for step in range(2, steps):
            bar.update(f"loss {step}")


def test_a_terminal_shows_a_bar(monkeypatch):
    stream = Terminal()
    shown(monkeypatch, stream)
    assert "\r" in stream.getvalue()
    assert "5/5" in stream.getvalue()
    assert "loss 4" in stream.getvalue()


def test_a_log_gets_one_plain_line_at_the_end_of_short_work(monkeypatch):
    stream = io.StringIO()
    shown(monkeypatch, stream)
    assert stream.getvalue() == "name: step 5/5, loss 4\n"


def test_a_log_gets_a_line_each_time_the_interval_has_passed(monkeypatch):
    clock = iter([0.0, 10.0, 20.0, 29.0, 36.0])  # at the start, then at each step
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    shown(monkeypatch, stream, steps=6)
    assert stream.getvalue() == ("name: step 4/6, loss 3, 20.0 s left\nname: step 6/6, loss 5\n")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal(), None])
def test_nothing_is_shown_if_not_asked_for_or_without_a_stream(monkeypatch, stream):
    shown(monkeypatch, stream, show=stream is None)
    assert stream is None or stream.getvalue() == ""


def test_a_stream_that_fails_does_not_end_the_work(monkeypatch):
    attempts = []

    class Full(Terminal):
        def write(self, text):
            attempts.append(text)
            raise OSError(28, "No space left on device")

    shown(monkeypatch, Full())
    assert attempts  # it was tried, and shown() still came to its end
