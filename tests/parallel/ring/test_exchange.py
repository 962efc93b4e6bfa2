"""The exchange of a ring: what a rank receives, and gradients that return to whoever sent the key."""

import pytest
import torch

from ropewalk.parallel.ring.exchange import _Bags
from tests.parallel.ring.ring_cases import exchanged


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keys_go_where_they_are_seen_and_their_gradients_add_up_at_home(two_ranks, dtype):
    """An anchor and a document on rank 0, of which rank 1 has the end and one more document."""
    wide = torch.promote_types(dtype, torch.float32)
    first, second = two_ranks.run(exchanged, dtype)
    # Token t has the key t and the value 10 + t.
    assert first.keys == ([0.0, 1.0, 2.0], [10.0, 11.0, 12.0])
    assert second.keys == ([0.0, 1.0, 2.0, 3.0, 4.0], [10.0, 11.0, 12.0, 13.0, 14.0])
    assert first.anchors == second.anchors == ([0.0], [10.0], wide)
    # Slot s has the gradient s + 1 for its key and 10 times that for its value, the anchor 100 on each rank.
    assert first.gradients == ([2.0 + 200, 4.0, 6.0], [20.0 + 200, 40.0, 60.0], dtype)
    assert second.gradients == ([4.0, 5.0], [40.0, 50.0], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_sums_are_rounded_once(dtype):
    torch.manual_seed(0)
    x = torch.randn(5000, 3, 4).to(dtype)
    groups = torch.randint(0, 7, (5000,))
    groups[groups == 3] = 2
    sums = _Bags.of(groups, 8, x.device).sums(x)
    exact = torch.zeros(8, 3, 4, dtype=torch.float64).index_add_(0, groups, x.double())
    assert torch.count_nonzero(sums[3]) == torch.count_nonzero(sums[7]) == 0
    # Sums of a thousand numbers in float32 or wider, and one rounding.
    wide = torch.finfo(torch.promote_types(dtype, torch.float32))
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + 2000 * wide.eps * 60
    assert bool(((sums.double() - exact).abs() <= bound).all())
