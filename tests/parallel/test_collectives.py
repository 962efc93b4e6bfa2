"""Exchanges between ranks: what each part became, and gradients that return to whoever sent the entry."""

import pytest
import torch

from ropewalk.parallel.collectives import EntryExchange, send_entries
from tests.parallel.exchange_cases import exchanged_parts, sent_entries


def test_part_p_goes_to_rank_p_and_the_exchange_is_its_own_inverse_and_gradient(four_ranks):
    for rank, (received, returned, gradient) in enumerate(four_ranks.run(exchanged_parts)):
        assert received == [10.0 * other + rank for other in range(4)]
        assert returned == [10.0 * rank + part for part in range(4)]
        # Part p was weighed by rank p.
        assert gradient == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_entries_go_where_they_are_asked_for_and_their_gradients_add_up_at_home(two_ranks, dtype):
    first, second = two_ranks.run(sent_entries, dtype)
    # Entry 1 was sent twice, as the second of rank 0 and the first of rank 1.
    assert first == ([0.0, 1.0, 12.0], [1.0, 3.0, 0.0], str(dtype))
    assert second == ([1.0], [0.0, 0.0, 3.0], str(dtype))


def test_a_rank_alone_sends_to_itself_without_a_group():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    got = send_entries(x, EntryExchange(torch.tensor([2, 0]), [2], [2], None))
    assert got.tolist() == [3.0, 1.0]
    (gradient,) = torch.autograd.grad((got * torch.tensor([5.0, 7.0])).sum(), x)
    assert gradient.tolist() == [7.0, 0.0, 5.0]
