"""What one rank of a ring computes and moves, beside attention of as many tokens without a ring.

Kernels are called with the choices of a GPU, on tensors without data; exchanges leave whatever is in their buffers.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ropewalk import PackedLayout, attend
from ropewalk.fused import fused_calls_run_by
from ropewalk.parallel import ShardedLayouts
from ropewalk.parallel.mesh import SequenceGroups
from ropewalk.parallel.ring import ring_attend
from tests.meta_cases import META

LENGTH, RING, MEAN = 2**15, 4, 2048
HEADS, KV_HEADS, WIDTH = 32, 8, 128


class Cost(TorchDispatchMode):
    """Counts operators and the bytes of their inputs and outputs; neither views nor empty tensors count.

    Attributes:
        operators, bytes: totals so far.
    """

    def __init__(self):
        super().__init__()
        self.operators = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and "empty" not in function.name():
            self.add(args, kwargs, result)
        return result

    def add(self, *values):
        tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.device == META]
        # What runs in place and what is given for a result is there twice.
        once = {(x.untyped_storage()._cdata, x.storage_offset(), x.shape): x for x in tensors}
        self.operators += bool(tensors)
        self.bytes += sum(x.nbytes for x in once.values())

    def compiled(self, function, args, kwargs):
        """A fused function as a GPU runs it: one operator."""
        with torch.utils._python_dispatch._disable_current_modes():
            result = function(*args, **kwargs)
        self.add(args, kwargs, result)
        return result


@dataclass(frozen=True)
class Found:
    operators: int
    bytes: int


def cost_of(attention, tokens, compiled):
    """Forward and backward."""
    shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *qkv, grad = (torch.empty(shape, dtype=torch.bfloat16, device=META) for shape in shapes)
    qkv = [x.requires_grad_() for x in qkv]
    # The first call prepares indices.
    attention(*qkv)
    cost = Cost()
    with cost, fused_calls_run_by(cost.compiled) if compiled else nullcontext():
        torch.autograd.grad(attention(*qkv), qkv, grad)
    return Found(cost.operators, cost.bytes)


def layout_of(pattern, length, seed=0):
    if pattern == "full":
        return PackedLayout.from_lengths([length], "full", 0)
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - 0.5, 1.0, length).astype(int) + 1
    lengths = drawn[: int(np.searchsorted(drawn.cumsum(), length - 1))].tolist()
    return PackedLayout.from_lengths([*lengths, length - 1 - sum(lengths)], "anchor", 1)


def costs(monkeypatch, pattern, balance, compiled):
    """Of each rank, and of a row of a rank's tokens."""
    for name in ("all_to_all_single", "all_reduce"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *tensors, **options: None)
    layout, quarter = layout_of(pattern, LENGTH), layout_of(pattern, LENGTH // RING)
    ranks = []
    for rank in range(RING):
        sharded = ShardedLayouts.of([layout], SequenceGroups(ring=RING, ring_rank=rank), balance)
        assert sharded.shard_length == LENGTH // RING
        ranks.append(
            cost_of(lambda *qkv, s=sharded: ring_attend(*qkv, s, "varlen"), LENGTH // RING, compiled)
        )
    alone = cost_of(lambda *qkv: attend(*qkv, quarter, "varlen"), LENGTH // RING, compiled)
    return ranks, alone


@pytest.mark.parametrize("balance", ["auto", "contiguous", "zigzag"])
def test_a_rank_needs_few_more_operators_than_attention_of_its_tokens(monkeypatch, balance):
    ranks, alone = costs(monkeypatch, "anchor", balance, compiled=False)
    assert max(rank.operators for rank in ranks) <= 1.3 * alone.operators


@pytest.mark.parametrize("balance", ["auto", "contiguous", "zigzag"])
def test_a_rank_moves_at_most_twice_the_bytes_of_attention_of_its_tokens(monkeypatch, balance):
    """As a GPU runs it, with the merge of the anchor in one kernel each way."""
    ranks, alone = costs(monkeypatch, "anchor", balance, compiled=True)
    assert max(rank.bytes for rank in ranks) <= 2 * alone.bytes
    # Forward: both into the message, keys into the order of runs, and the anchor's with its conversion. Backward: keys
    # and values joined, summed for the message and after it; the anchor's joined, and added up by who holds it.
    assert max(rank.operators for rank in ranks) <= alone.operators + 5 + 4 + 5


def test_an_exchange_of_one_document_is_few_operators(monkeypatch):
    ranks, alone = costs(monkeypatch, "full", "auto", compiled=True)
    assert max(rank.operators for rank in ranks) <= alone.operators + 3 + 3
