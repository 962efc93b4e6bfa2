"""What ranks send each other is counted by kind: bytes by hand, and the number of calls as torch itself counts."""

import torch

from ropewalk.parallel.traffic import Traffic, counted_traffic
from tests.parallel.exchange_cases import counted_collectives


def test_each_kind_is_counted_as_an_algorithm_of_least_volume_sends_it(two_ranks):
    whole = 8 * 4
    for rank, (sent, calls, theirs, uneven, total) in enumerate(two_ranks.run(counted_collectives)):
        assert sent == {
            "all_to_all": whole // 2,
            "all_gather": whole,
            "reduce_scatter": whole // 2,
            "all_reduce": whole,
            "broadcast": whole,
        }
        assert calls == dict.fromkeys(sent, 1)
        assert theirs == sum(calls.values())
        # What is sent after the context closed is not counted.
        assert total == sum(sent.values())
        # Of four rows of five numbers rank 0 keeps one and rank 1 keeps two.
        assert uneven == {"all_to_all": [3, 2][rank] * 5 * 4}


def test_without_a_collective_nothing_is_counted():
    with counted_traffic() as traffic:
        torch.ones(3).sum()
    assert traffic == Traffic()
    assert traffic.total == 0
