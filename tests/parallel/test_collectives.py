"""Exchanges between ranks: what each part became."""

from tests.parallel.exchange_cases import exchanged_parts, exchanged_unequal_parts


def test_part_p_goes_to_rank_p_and_the_exchange_is_its_own_inverse_and_gradient(four_ranks):
    for rank, (received, returned, gradient) in enumerate(four_ranks.run(exchanged_parts)):
        assert received == [10.0 * other + rank for other in range(4)]
        assert returned == [10.0 * rank + part for part in range(4)]
        # Part p was weighed by rank p.
        assert gradient == [1.0, 2.0, 3.0, 4.0]


def test_unequal_parts_and_empty_ones_return_their_gradients(four_ranks):
    for rank, (received, gradient) in enumerate(four_ranks.run(exchanged_unequal_parts)):
        # Behind the entries for ranks before it, which are 0 + 1 + ... + (rank - 1).
        first = rank * (rank - 1) // 2
        assert received == [10.0 * other + first + entry for other in range(4) for entry in range(rank)]
        assert gradient == [2.0, 3.0, 3.0, 4.0, 4.0, 4.0]
