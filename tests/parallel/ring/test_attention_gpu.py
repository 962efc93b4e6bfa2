"""A ring through torch's own kernels, all ranks of a ring in turn on one GPU."""

import random

import pytest
import torch

from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.oracle import attention_errors
from ropewalk.parallel import RowShards, ShardedLayouts
from ropewalk.parallel.mesh import SequenceGroups
from ropewalk.parallel.ring import ring_attend
from ropewalk.testing import random_layout
from tests.parallel.ring.ring_cases import ranks_in_turn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("balance", ["contiguous", "zigzag", "cost"])
def test_kernels_are_within_the_error_budget(dtype, kv_heads, head_dim, balance):
    rng = random.Random(0)
    layouts = [
        random_layout(777, rng, 9, interleaved=interleaved, max_anchor=5) for interleaved in (False, True)
    ]
    rows = ShardedLayouts.of(layouts, SequenceGroups(ring=4), balance).rows
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 777, head_dim, dtype=dtype, device="cuda") for h in (4, kv_heads, kv_heads))
    for name in ("varlen", "sdpa"):

        def engine(q, k, v, name=name):
            return ranks_in_turn(q, k, v, layouts, rows, name)

        errors = attention_errors(engine, q, k, v, layouts)
        assert errors.worst_share <= 1, (name, errors)


def test_auto_takes_varlen_on_cuda_and_equals_segments():
    layout = PackedLayout.from_lengths([100, 1, 155], "anchor", 4)
    row = RowShards(layout.storage_in_order, (((0, 260),),))
    sharded = ShardedLayouts((layout,), (row,), SequenceGroups())
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 260, 64, dtype=torch.bfloat16, device="cuda") for h in (4, 2, 2))
    named, auto = (ring_attend(q, k, v, sharded, engine) for engine in ("varlen", "auto"))
    assert torch.equal(named, auto)
    for engine in ("auto", "sdpa"):
        errors = attention_errors(lambda *qkv, e=engine: ring_attend(*qkv, sharded, e), q, k, v, [layout])
        assert errors.worst_share <= 1, (engine, errors)
