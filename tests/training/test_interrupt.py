import os
import signal
import threading

import pytest

from minillama.training import interrupt
from minillama.training.interrupt import SIGNALS, StopSignal, SyncedStopSignal


def send(number=signal.SIGINT):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_handlers_are_restored(number):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.requested
        send(number)
        assert stop.requested
    assert signal.getsignal(number) is before


def test_a_later_signal_ends_at_once_and_further_ones_are_ignored(monkeypatch):
    monkeypatch.setattr(interrupt, "_REPEAT_SECONDS", 0.0)
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignal():
        send()
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGTERM)
        for number in SIGNALS:
            send(number)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_signal_that_is_passed_on_twice_is_one_request():
    with StopSignal() as stop:
        for number in SIGNALS:
            send(number)
        assert stop.requested


def test_a_breakable_body_is_left_at_once_and_other_bodies_are_not():
    reached = []
    with StopSignal() as stop:
        with stop.breakable():
            send()
            reached.append("after the signal, in the breakable body")
        reached.append("after the breakable body")
    assert reached == ["after the breakable body"]


def test_no_handler_is_set_outside_of_the_main_thread():
    def work():
        with StopSignal():
            seen.append(signal.getsignal(signal.SIGINT))

    seen = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            send()
            assert not stop.requested
    finally:
        signal.signal(signal.SIGINT, before)


def test_ranks_stop_together_and_ignore_a_second_signal():
    heard = []
    with SyncedStopSignal(lambda flag: heard.append(flag) or flag) as stop:
        stop.sync()
        send()
        send(signal.SIGTERM)
        assert not stop.requested  # until all have been asked
        stop.sync()
        assert stop.requested
        stop.sync()  # no other rank is asked again
    assert heard == [False, True]


def test_a_signal_that_another_process_got_leaves_the_breakable_body():
    with SyncedStopSignal(lambda flag: True) as stop:
        with stop.breakable():
            stop.check()
            raise AssertionError("the body went on")
        assert stop.requested


def test_a_rank_that_leaves_with_an_error_outlives_a_sigterm():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with pytest.raises(ValueError, match="lost"), SyncedStopSignal(lambda flag: flag):
            raise ValueError("lost")
        send(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])
