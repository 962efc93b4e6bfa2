"""How checks run in processes that nobody starts anew: what all know goes on, what one alone knows ends it."""

import os
import uuid
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ropewalk.errors import RopewalkError
from ropewalk.parallel import MeshShape, World
from ropewalk.parallel.rank_pool import _serve
from ropewalk.verification import Planned, run_checks, run_in
from ropewalk.verification import run as running
from ropewalk.verification.checks import Claim
from tests.verification.verification_cases import (
    failing_alone,
    failing_on_all,
    failing_unheard,
    groups_after,
    once_on_some,
)


def test_what_one_rank_alone_knows_leaves_its_process(two_ranks):
    """It does not go to a barrier, where it would wait for ranks that wait for it in a collective."""
    assert two_ranks.run(failing_alone, None) == [
        ("", [0]),
        ("left with MemoryError: none left on this rank", []),
    ]


def test_a_refusal_of_one_rank_that_the_others_do_not_know_leaves_its_process(two_ranks):
    first, second = two_ranks.run(failing_unheard, None)
    assert first == ("left with RopewalkError: rank 0 alone has no such engine", [])
    assert second == ("", [1])


def test_what_all_ranks_know_is_a_failed_check_and_the_next_one_runs(two_ranks):
    told = [two_ranks.run(failing_on_all, None)[rank] for rank in (0, 1)]
    for rank, outcomes in enumerate(told):
        assert outcomes == (
            ("stopped: no such model", [rank]),
            ("stopped: the disk is full", [rank]),
        )


def test_what_rank_0_does_alone_may_fail_in_any_way(monkeypatch):
    def check(case):
        raise MemoryError("too large")

    monkeypatch.setattr(running, "claims", lambda: {"labels": Claim("labels", 0, "", "", check)})
    found = run_in(Planned("labels", "", ""), None, World(), "cpu")
    assert (found.passed, found.note) == (False, "stopped: MemoryError: too large")


def test_an_error_that_is_no_pools_leaves_verify():
    def call(planned):
        raise RopewalkError("one rank alone")

    with pytest.raises(RopewalkError, match=r"one rank alone"):
        run_checks([Planned("labels", "", "")], call)


def test_what_ranks_compute_together_all_of_them_compute(two_ranks, case):
    fresh = replace(case, key=uuid.uuid4().hex)
    assert two_ranks.run(once_on_some, fresh) == [[1, 1], [1, 1]]


def test_checks_leave_no_process_groups(two_ranks, case):
    planned = [Planned("shards", "", "", shape) for shape in (MeshShape(ring=2), MeshShape(sequence=2))]
    counts = [two_ranks.run(groups_after, each, case) for each in (*planned, *planned, *planned)]
    assert counts[1:] == [counts[1]] * 5


@pytest.mark.parametrize("lost", [EOFError, ConnectionResetError, BrokenPipeError])
def test_a_process_whose_pool_has_gone_ends_in_silence(monkeypatch, lost):
    calls = []

    def gone(*_):
        raise lost

    def asked():
        calls.append("asked")
        return (len, ("abc",))

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: calls.append("started"))
    before = torch.get_num_threads()
    try:
        _serve(SimpleNamespace(recv=gone), 0, 1, "")
        if issubclass(lost, OSError):
            _serve(SimpleNamespace(recv=asked, send=gone), 0, 1, "")
            assert calls == ["started", "started", "asked"]
    finally:
        torch.set_num_threads(before)
