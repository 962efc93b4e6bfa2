"""The processes of a run: what rank 0 does for all, and how errors reach every rank once."""

import os

import pytest
import torch

from ropewalk.errors import RopewalkError
from ropewalk.parallel import World, joined, require_devices, world_from_environment
from tests.parallel.world_cases import (
    gathered_from,
    gathered_ranks,
    highest_of,
    led,
    refused_by,
    unexpectedly_failing,
)

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_one_process_is_a_world_of_its_own():
    with joined() as world:
        assert (world.rank, world.size, world.is_rank_0) == (0, 1, True)
        assert world.on_rank_0(lambda: 7) == 7


def test_half_an_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        RopewalkError,
        match=r"sets RANK but not WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE; .* torchrun, or, .*, unset RANK",
    ):
        world_from_environment()
    for name in VARIABLES:
        monkeypatch.setenv(name, "one")
    with pytest.raises(RopewalkError, match=r"RANK=one, .* must be whole numbers"):
        world_from_environment()


def test_restarts_are_read_from_torchrun(monkeypatch):
    for name, value in zip(VARIABLES, "1412", strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    world = world_from_environment()
    assert (world.rank, world.size, world.local_rank, world.local_size, world.restarts) == (1, 4, 1, 2, 3)


def test_what_rank_0_returns_every_rank_gets(four_ranks):
    assert four_ranks.run(led) == [
        (os_pid, os_pid) for os_pid, _ in [four_ranks.run(led)[0]] for _ in range(4)
    ]
    assert os.getpid() not in {pid for pid, _ in four_ranks.run(led)}


def test_what_all_bring_each_gets_by_rank(four_ranks):
    everything = [{"rank": rank, "squares": [rank**2]} for rank in range(4)]
    assert four_ranks.run(gathered_ranks) == [everything] * 4
    assert four_ranks.run(gathered_from, ()) == [[0, 10, 20, 30]] * 4
    assert World().gather(7) == World().gather_from(lambda: 7) == [7]


def test_what_any_rank_refuses_is_said_once_and_ends_all(four_ranks):
    echo = ("Echo", "not on 1", 1)
    said = ("RunFailure", "not on 1", 1)
    assert four_ranks.run(gathered_from, (1,)) == [echo, said, echo, echo]
    # Of several the first one speaks.
    assert four_ranks.run(gathered_from, (1, 2, 3)) == [echo, said, echo, echo]
    quiet = ("Echo", "not on 2", 2)
    assert four_ranks.run(gathered_from, (2,)) == [quiet, quiet, ("RopewalkError", "not on 2", 2), quiet]


def test_one_process_refuses_by_itself():
    def refuse():
        raise RopewalkError("not here")

    with pytest.raises(RopewalkError, match="not here"):
        World().gather_from(refuse)


def test_what_rank_0_refuses_is_said_once_and_ends_all(four_ranks):
    found = four_ranks.run(refused_by, 0)
    assert found == [("RopewalkError", "no such thing"), *[("Echo", "no such thing")] * 3]


def test_what_another_rank_refuses_comes_with_its_number(four_ranks):
    found = four_ranks.run(refused_by, 2)
    assert found[2] == ("RopewalkError", "rank 2: no such thing")


def test_lost_contact_is_one_sentence(two_ranks):
    (kind, text), _ = two_ranks.run(unexpectedly_failing)
    assert kind == "RunFailure"
    assert text.startswith("rank 0 lost contact with the other processes")
    assert text.endswith("start it again")


def test_the_highest_number_of_all_ranks_is_known_to_each(four_ranks):
    assert four_ranks.run(highest_of, [0, 15, 0, 10]) == [15] * 4
    assert World().highest(10) == 10


def test_processes_need_a_device_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    two = World(size=2, local_size=2)
    with pytest.raises(
        RopewalkError, match="2 processes on this machine need 2 CUDA devices, but torch sees 1"
    ):
        require_devices(two, torch.device("cuda"))
    require_devices(two, torch.device("cpu"))
    require_devices(World(size=2, local_size=1), torch.device("cuda"))
