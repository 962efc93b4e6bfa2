"""Ulysses against one process: nothing differs, in no bit."""

import pytest
import torch

from ulysses_cases import against_one_process


@pytest.mark.parametrize("engine", ["segments", "reference"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (4, 1)])
def test_the_output_of_four_ranks_has_no_difference_at_all(four_ranks, heads, kv_heads, engine):
    for differences in four_ranks.run(
        against_one_process, {"sequence": 4}, heads, kv_heads, torch.float32, engine, range(12)
    ):
        assert [difference[0] for difference in differences] == [0.0] * 12
