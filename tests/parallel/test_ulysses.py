"""Ulysses against one process: the output differs in no bit, gradients by the rounding of sums over heads."""

import pytest
import torch

from ropewalk.errors import EngineError
from ropewalk.parallel.ulysses import ulysses
from tests.marks import slow_after
from tests.parallel.ulysses_cases import against_one_process, narrowed_heads

CASES = range(12)
"""Seeds of batches of 7 to 130 tokens: every pattern, one or two rows, interleaved or not, documents on all shards."""


@pytest.mark.parametrize("engine", ["sdpa", "reference"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("degree", slow_after(1, [2, 4]))
def test_given_the_same_queries_keys_and_values_nothing_differs(
    two_ranks, four_ranks, degree, heads, kv_heads, engine
):
    ranks = {2: two_ranks, 4: four_ranks}[degree]
    for differences in ranks.run(
        against_one_process, {"sequence": degree}, heads, kv_heads, torch.float32, engine, CASES
    ):
        output, query, key, value, shares = zip(*differences, strict=True)
        assert output == (0.0,) * len(CASES)
        assert query == (0.0,) * len(CASES)
        if kv_heads % degree == 0 and heads == kv_heads:
            assert (key, value) == (output, output)
        # A head that serves several ranks gets the sum of their gradients, in another order than one process sums.
        assert max(shares) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_dtype_travels(two_ranks, dtype):
    for differences in two_ranks.run(against_one_process, {"sequence": 2}, 4, 2, dtype, "sdpa", range(4)):
        assert [difference[0] for difference in differences] == [0.0] * 4


def test_values_may_have_another_width_than_keys(two_ranks):
    assert two_ranks.run(narrowed_heads) == [0.0, 0.0]


def test_heads_that_do_not_divide_are_refused_before_anything_is_sent():
    q = torch.randn(1, 3, 4, 8)
    with pytest.raises(
        EngineError, match=r"parallel.sequence 2 does not divide the model's 3 attention heads"
    ):
        ulysses(q, q, q, None, 2, lambda q, k, v: v)
