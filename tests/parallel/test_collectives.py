"""Exchanges between ranks: what each part became."""

from tests.parallel.exchange_cases import exchanged_parts


def test_part_p_goes_to_rank_p_and_the_exchange_is_its_own_inverse_and_gradient(four_ranks):
    for rank, (received, returned, gradient) in enumerate(four_ranks.run(exchanged_parts)):
        assert received == [10.0 * other + rank for other in range(4)]
        assert returned == [10.0 * rank + part for part in range(4)]
        # Part p was weighed by rank p.
        assert gradient == [1.0, 2.0, 3.0, 4.0]
