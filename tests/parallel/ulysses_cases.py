"""What ranks run in the tests of Ulysses; spawned processes import it by name."""

import random

import torch

from ropewalk import attend
from ropewalk.parallel import MeshShape, ShardedLayouts, make_mesh, sharded_attend
from ropewalk.testing import oracle_attention, random_layout


def against_one_process(shape, heads, kv_heads, dtype, engine, cases):
    """For some random batches: differences of output and of gradients from attend on whole rows, on this rank.

    Those of keys and values leave out the anchors, whose gradients are sums over all queries, in an order that depends
    on the number of heads. And the largest error of a gradient of keys or values, as a share of twice that of attend
    and one rounding.
    """
    mesh = make_mesh(MeshShape(**shape), "cpu")
    found = []
    for seed in cases:
        rng = random.Random(seed)
        total, batch = rng.choice([7, 16, 33, 64, 130]), rng.choice([1, 2])
        layouts = [random_layout(total, rng, interleaved=rng.random() < 0.3) for _ in range(batch)]
        torch.manual_seed(seed)
        q, k, v = (
            torch.randn(batch, n, total, 8, dtype=dtype, requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        )
        cotangent = torch.randn(batch, heads, total, 8, dtype=dtype)
        whole = attend(q, k, v, layouts, engine)
        gradients = torch.autograd.grad(whole, (q, k, v), cotangent)
        sharded = ShardedLayouts.of(layouts, mesh.groups)

        def shard(x, sharded=sharded):
            """``[B, H, T, D]`` to this rank's ``[B, H, s, D]``."""
            groups, rows = sharded.groups, zip(sharded.rows, x.detach().transpose(2, 3), strict=True)
            held = [row.take(each, groups.ring_rank, groups.sequence_rank, 0) for row, each in rows]
            return torch.stack(held).transpose(2, 3).contiguous()

        mine = [shard(x).requires_grad_() for x in (q, k, v)]
        output = sharded_attend(*mine, sharded, engine)
        own = torch.autograd.grad(output, mine, shard(cotangent))
        beyond = torch.stack([torch.arange(total) >= each.anchor_length for each in layouts])
        beyond = shard(beyond[:, None, :, None].to(dtype).expand(batch, 1, total, 1))
        found.append(
            (
                *(
                    float((a - shard(b)).detach().abs().max())
                    for a, b in ((output, whole), (own[0], gradients[0]))
                ),
                *(
                    float(((a - shard(b)) * beyond).abs().max())
                    for a, b in zip(own[1:], gradients[1:], strict=True)
                ),
                share_of_budget(own[1:], gradients[1:], (q, k, v), cotangent, layouts, shard),
            )
        )
    return found


def share_of_budget(own, gradients, qkv, cotangent, layouts, shard):
    inputs = [x.detach().double().requires_grad_() for x in qkv]
    exact = torch.autograd.grad(oracle_attention(*inputs, layouts=layouts), inputs[1:], cotangent.double())
    shares = []
    for mine, plain, true in zip(own, gradients, exact, strict=True):
        rounding = torch.finfo(mine.dtype).eps * float(true.abs().max())
        budget = 2 * float((plain - true).abs().max()) + rounding
        shares.append(float((mine - shard(true)).abs().max()) / budget)
    return max(shares)


def narrowed_heads():
    """The largest difference with values of 3 where keys have 8."""
    mesh = make_mesh(MeshShape(sequence=2), "cpu")
    layouts = [random_layout(21, random.Random(1))]
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 4, 21, 8), torch.randn(1, 2, 21, 8), torch.randn(1, 2, 21, 3)
    sharded = ShardedLayouts.of(layouts, mesh.groups)
    index = sharded.rows[0].of(0, mesh.groups.sequence_rank)
    mine = [x[:, :, index.clamp_min(0)] for x in (q, k, v)]
    there = index >= 0
    difference = sharded_attend(*mine, sharded, "sdpa") - attend(q, k, v, layouts, "sdpa")[:, :, index]
    return float(difference[:, :, there].abs().max())
