"""Attention over shards on the device ``meta``, where a stray CPU tensor or a number that the host waits for raises."""

import pytest
import torch

from ropewalk import PackedLayout
from ropewalk.attention.choices import PATTERNS
from ropewalk.parallel import ShardedLayouts, sharded_attend
from ropewalk.parallel.mesh import SequenceGroups
from tests.marks import slow_after
from tests.meta_cases import META, OneDevice


@pytest.fixture(autouse=True)
def one_device():
    with OneDevice() as mode:
        yield mode


def rows(pattern):
    return (
        PackedLayout.from_lengths([12, 1, 25], pattern, 2),
        PackedLayout.from_segments([12, 8, 5, 13], [0, 1, 0, 1], pattern, 2),
        PackedLayout.from_lengths([38], "full", 2),
    )


def meta_qkv(length=40):
    shapes = [(3, heads, length, 32) for heads in (4, 2, 2)]
    return [torch.empty(shape, dtype=torch.bfloat16, device=META).requires_grad_() for shape in shapes]


def assert_gradients_fit(output, inputs):
    assert (output.shape, output.dtype, output.device) == (inputs[0].shape, torch.bfloat16, META)
    for gradient, given in zip(
        torch.autograd.grad(output, inputs, torch.empty_like(output)), inputs, strict=True
    ):
        assert (gradient.shape, gradient.dtype, gradient.device) == (given.shape, given.dtype, META)


@pytest.mark.parametrize(
    "groups",
    [{"sequence": 2}, {"sequence": 4}, {"ring": 2}, {"ring": 4}, {"ring": 2, "sequence": 2}],
    ids=str,
)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("balance", ["contiguous", "zigzag"])
@pytest.mark.parametrize("engine", slow_after(1, ["auto", "sdpa"]))
def test_shards_of_a_rank_never_leave_the_device(monkeypatch, groups, pattern, balance, engine):
    """One rank's part, with exchanges that leave whatever is in the buffer: there is no process group for ``meta``."""

    for name in ("all_to_all_single", "all_reduce"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *tensors, **options: None)
    layouts = rows(pattern)
    for rank in range(groups.get("ring", 1)):
        sharded = ShardedLayouts.of(layouts, SequenceGroups(**groups, ring_rank=rank), balance)
        inputs = meta_qkv(sharded.shard_length)
        assert_gradients_fit(sharded_attend(*inputs, sharded, engine), inputs)
