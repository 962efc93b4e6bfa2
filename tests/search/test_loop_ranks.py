"""Two processes search as one does: result, traces, log, and what happens when one cannot go on."""

import pytest
import torch

from ropewalk.search import ALGORITHMS
from tests.marks import slow_after
from tests.search.search_rank_cases import (
    failing_search,
    model_search,
    shared_search,
    shared_toy_search,
    strange_search,
    toy_search,
)


@pytest.fixture(autouse=True)
def one_thread():
    """As the ranks have: sums over more threads are rounded otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Every pair of algorithm, racing and batch.
SEARCHES = [
    (name, racing, 1 + 2 * ((number + racing) % 2))
    for number, name in enumerate(ALGORITHMS)
    for racing in (True, False)
]


@pytest.mark.parametrize(("name", "racing", "batch"), slow_after(1, SEARCHES))
def test_two_ranks_find_what_one_finds_on_a_model(two_ranks, tmp_path, name, racing, batch):
    alone = model_search(name, None, batch, racing, f"{tmp_path}/alone.jsonl")
    together = two_ranks.run(shared_search, name, batch, racing, str(tmp_path))
    assert together == [alone, alone]
    one, two = ((tmp_path / log).read_text() for log in ("alone.jsonl", f"{name}{batch}{racing}.jsonl"))
    assert one == two
    assert len(one.splitlines()) == alone[0].forwards == 70


@pytest.mark.parametrize("racing", [True, False])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_find_what_one_finds_without_a_model(two_ranks, name, racing):
    alone = toy_search(name, racing)
    assert two_ranks.run(shared_toy_search, name, racing) == [alone, alone]


def test_what_one_rank_refuses_ends_the_other_at_once(two_ranks):
    found = two_ranks.run(failing_search, seconds=60.0)
    # The first documents of three seeds take two rounds, of which rank 1 has nothing to do in the second; of the third
    # round, in which it fails, nothing is kept.
    assert found == [("Echo", "the memory gave out", 1, 3), ("RunFailure", "the memory gave out", 1, 3)]


def test_ranks_that_compute_otherwise_still_agree(two_ranks):
    # Each takes what the other has measured, so their next questions are the same.
    first, second = two_ranks.run(strange_search)
    assert first == second
