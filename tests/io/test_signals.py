"""What SIGTERM and SIGUSR1 do in a block that is to end in order, and in one that is to complete its work first."""

import signal
import threading
import time

import pytest

from ropewalk.io.signals import ENDING, Ended, ended_by_signals, noted_signals


def handlers():
    return [signal.getsignal(each) for each in ENDING]


@pytest.fixture(autouse=True)
def unchanged():
    before = handlers()
    yield
    left = handlers()
    for each, handler in zip(ENDING, before, strict=True):
        signal.signal(each, handler)
    assert left == before


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_ends_the_block_by_its_name(number):
    with pytest.raises(Ended) as caught, ended_by_signals(restore=True):
        signal.raise_signal(number)
    assert caught.value.name == number.name


class Finalised:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def finalised():
    with ended_by_signals(restore=True):
        Finalised()
        time.sleep(20)


def test_a_signal_during_a_finaliser_ends_the_block_soon_after():
    """Python discards exceptions of finalisers."""
    with pytest.raises(Ended, match="SIGTERM"):
        finalised()


def interrupted_twice(cleaned):
    with ended_by_signals(restore=True):
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned.append(True)


def test_a_second_signal_does_not_interrupt_the_cleanup():
    cleaned = []
    with pytest.raises(Ended, match="SIGUSR1"):
        interrupted_twice(cleaned)
    assert cleaned


def test_signals_stay_ignored_while_an_error_is_reported():
    before = handlers()
    with pytest.raises(KeyError), ended_by_signals():
        raise KeyError
    assert handlers() == [signal.SIG_IGN] * len(ENDING)
    for each, handler in zip(ENDING, before, strict=True):
        signal.signal(each, handler)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_is_noted_and_the_work_goes_on(number):
    with noted_signals() as noted:
        assert noted() == 0
        signal.raise_signal(number)
        assert noted() == number


def test_the_second_signal_ends_the_block_as_it_would_have_without():
    with ended_by_signals(restore=True), noted_signals() as noted:
        signal.raise_signal(signal.SIGUSR1)
        assert noted()
        with pytest.raises(Ended):
            signal.raise_signal(signal.SIGUSR1)


def test_other_threads_leave_signals_as_they_are():
    before, seen = handlers(), []

    def run():
        with ended_by_signals(), noted_signals() as noted:
            seen.extend([handlers(), noted()])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, 0]
