"""Checkpoints in the background: training changes none of their bytes, and a failure or a kill costs no earlier one."""

import signal
import threading

import pytest
import torch

from ropewalk.errors import RopewalkError
from ropewalk.io.files import remove_left_overs
from ropewalk.training.checkpoint.files import Position, latest_whole
from ropewalk.training.checkpoint.sharded import load_checkpoint
from ropewalk.training.checkpoint.single import WholeCheckpoints, save_checkpoint
from tests.disk_cases import files_no_larger_than
from tests.programs import run_program
from tests.training.checkpoint.checkpoint_cases import held_back
from tests.training.checkpoint.rank_cases import ALONE, Trainee, files_of


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_background_writes_what_was_there_when_it_was_told_to(
    tied_llama, rows, tmp_path, monkeypatch, precision
):
    """Two checkpoints, the second in the memory of the first: training changes weights, moments and random numbers."""
    one = Trainee(tied_llama, rows, precision)
    torch.manual_seed(3)
    release = held_back(monkeypatch)
    with in_the_background(one, tmp_path / "later") as writing:
        for step in (1, 2):
            one.train(1)
            at_once = save_checkpoint(
                tmp_path / "at once", one.model.model, None, one.optimizer, Position(0, step, 9), 2
            )
            release.clear()
            later = writing.save(Position(0, step, 9))
            torch.rand(3)
            one.train(1)
            assert not later.exists()
            release.set()
            writing.wait()
            assert files_of(later) == files_of(at_once)
    other = Trainee(tied_llama, rows, precision)
    load_checkpoint(later, other.model, other.optimizer, ALONE)
    other.train(1)
    # Which trained on from that checkpoint while it was written.
    assert other.fingerprint() == one.fingerprint()


def in_the_background(one, folder, keep=2):
    return WholeCheckpoints(folder, one.model.model, one.optimizer, None, keep, asynchronous=True)


def test_only_one_checkpoint_is_written_at_a_time(tied_llama, rows, tmp_path, monkeypatch):
    release = held_back(monkeypatch)
    release.clear()
    with in_the_background(Trainee(tied_llama, rows), tmp_path) as writing:
        first = writing.save(Position(0, 1, 0))
        threading.Timer(0.2, release.set).start()
        second = writing.save(Position(0, 2, 0))
        assert first.is_dir()
    assert second.is_dir()


def test_seconds_of_waiting_and_writing_are_told_once(tied_llama, rows, tmp_path, monkeypatch):
    release = held_back(monkeypatch)
    release.clear()
    with in_the_background(Trainee(tied_llama, rows), tmp_path) as writing:
        assert writing.seconds() == {}
        writing.save(Position(0, 1, 0))
        copied = writing.seconds()
        assert copied.keys() == {"checkpoint_wait"}
        assert writing.seconds() == {}
        threading.Timer(0.2, release.set).start()
        writing.wait()
        waited = writing.seconds()
        assert waited.keys() == {"checkpoint_wait", "checkpoint_write"}
        assert waited["checkpoint_wait"] >= 0.2 > copied["checkpoint_wait"]
    with WholeCheckpoints(tmp_path, writing._model, writing._optimizer, None, 2) as at_once:
        at_once.save(Position(0, 2, 0))
        assert at_once.seconds().keys() == {"checkpoint_wait"}


def test_a_failed_write_is_an_error_at_the_next_checkpoint_and_at_the_end(tied_llama, rows, tmp_path):
    one = Trainee(tied_llama, rows)

    def fails(save_again):
        with in_the_background(one, tmp_path) as writing:
            writing.save(Position(0, 1, 0))
            writing.wait()
            with files_no_larger_than(4000):
                writing.save(Position(0, 2, 0))
                # Until the thread has met the limit.
                writing._thread.submit(lambda: None).result()
            if save_again:
                writing.save(Position(0, 3, 0))

    for save_again in (True, False):
        with pytest.raises(RopewalkError, match=r"cannot write .*stage0-step000002"):
            fails(save_again)
        assert [path.name for path in tmp_path.iterdir()] == ["stage0-step000001"]


def test_the_error_of_a_stage_is_not_replaced_by_that_of_its_checkpoint(tied_llama, rows, tmp_path):
    def stopped():
        with files_no_larger_than(4000), in_the_background(Trainee(tied_llama, rows), tmp_path) as writing:
            writing.save(Position(0, 1, 0))
            raise InterruptedError

    with pytest.raises(InterruptedError):
        stopped()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import ropewalk.training.checkpoint.single as single
from ropewalk.training.checkpoint.files import Position
from ropewalk.training.checkpoint.single import WholeCheckpoints
from tests.training.checkpoint.rank_cases import Trainee
from tests.training.sharded_cases import packed_rows

model, out, name = sys.argv[1:]
one = Trainee(model, packed_rows(4))
with WholeCheckpoints(Path(out), one.model.model, one.optimizer, None, 1, asynchronous=True) as writing:
    one.train(1)
    writing.save(Position(0, 1, 0))
    writing.wait()
    after = getattr(single, name)
    def killed(*arguments):
        after(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(single, name, killed)
    writing.save(Position(0, 2, 0))
    one.train(1)
"""


@pytest.mark.parametrize("after", ["save_model", "save_file", "write_record"])
def test_a_process_killed_while_it_writes_leaves_the_last_checkpoint(tied_llama, rows, tmp_path, after):
    assert run_program(KILLED, tied_llama, tmp_path, after).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    path = latest_whole(tmp_path)
    assert path == tmp_path / "stage0-step000001"
    one, other = Trainee(tied_llama, rows), Trainee(tied_llama, rows)
    load_checkpoint(path, one.model, one.optimizer, ALONE)
    other.train(1)
    assert (one.train(1), one.fingerprint()) == (other.train(1), other.fingerprint())
    remove_left_overs(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
