"""What ranks run in the tests of the ring; spawned processes import it by name."""

import random
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk import attend
from ropewalk.attention.layout import PackedLayout
from ropewalk.parallel import MeshShape, RowShards, ShardedLayouts, make_mesh, sharded_attend
from ropewalk.parallel.ring import Ring, ring_attend_merging, ring_backward, ring_forward
from ropewalk.parallel.ring_blocks import Final, Scoring, wide_dtype
from ropewalk.parallel.ring_plan import RingPlan, ring_bytes, ring_plan
from ropewalk.testing import random_layout
from ropewalk.testing.attention import attention_errors, cotangent_of, oracle_attention


@dataclass(frozen=True)
class Case:
    """One batch; what is not given is random."""

    seed: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    total: int = 0
    interleaved: bool | None = None
    patterns: tuple[str, ...] = ("full", "intra_document", "anchor")
    max_documents: int = 8
    balance: str = ""
    batch: int = 0
    score_std: float = 1.0

    def batch_of(self, groups):
        """q, k, v of whole rows, their layouts and how they are cut."""
        rng = random.Random(self.seed)
        total = self.total or rng.choice([7, 16, 33, 64, 130])
        interleaved = rng.random() < 0.3 if self.interleaved is None else self.interleaved
        layouts = [
            random_layout(
                total, rng, self.max_documents, self.patterns, interleaved, max_anchor=rng.choice([1, 6])
            )
            for _ in range(self.batch or rng.choice([1, 2]))
        ]
        balance = self.balance or rng.choice(["contiguous", "zigzag", "cost"])
        torch.manual_seed(self.seed)
        widths = [
            (self.heads, self.head_dim),
            (self.kv_heads, self.head_dim),
            (self.kv_heads, self.value_dim),
        ]
        qkv = [torch.randn(len(layouts), h, total, d).to(self.dtype) for h, d in widths]
        qkv[0] *= self.score_std
        return qkv, layouts, ShardedLayouts.of(layouts, groups, balance)


class _FromWhole(torch.autograd.Function):
    """This rank's places of whole rows; the gradient of whole rows on every rank, from all ranks' places."""

    @staticmethod
    def forward(ctx, x, sharded):
        ctx.sharded, ctx.length = sharded, x.shape[2]
        return _take(x, sharded)

    @staticmethod
    def backward(ctx, grad):
        return _join(grad, ctx.sharded), None


class _ToWhole(torch.autograd.Function):
    """The inverse: whole rows on every rank."""

    @staticmethod
    def forward(ctx, x, sharded):
        ctx.sharded = sharded
        return _join(x, sharded)

    @staticmethod
    def backward(ctx, grad):
        return _take(grad, ctx.sharded), None


def _take(x, sharded):
    """``[B, H, T, D]`` to this rank's ``[B, H, s, D]``."""
    return sharded_rows(x.permute(1, 3, 0, 2), sharded).permute(2, 0, 3, 1).contiguous()


def sharded_rows(x_HDBT, sharded):
    return torch.stack(
        [
            row.take(x_HDBT[:, :, b], sharded.groups.ring_rank, sharded.groups.sequence_rank, 0)
            for b, row in enumerate(sharded.rows)
        ],
        dim=2,
    )


def _join(x, sharded):
    """Every rank's ``[B, H, s, D]`` to whole rows; exact, since float64 holds the sum of a value and zeros."""
    whole = torch.zeros(*x.shape[:2], sharded.total_length, x.shape[3], dtype=torch.float64)
    for b, row in enumerate(sharded.rows):
        index = row.of(sharded.groups.ring_rank, sharded.groups.sequence_rank)
        assert bool((x[b][:, index < 0] == 0).all()), "padding is not zero"
        whole[b][:, index[index >= 0]] = x[b][:, index >= 0].double()
    dist.all_reduce(whole)
    return whole.to(x.dtype)


def on_whole_rows(attention, sharded, q, k, v):
    """An attention of this rank's places, of whole rows: what every rank computes together."""
    return _ToWhole.apply(attention(*(_FromWhole.apply(x, sharded) for x in (q, k, v)), sharded), sharded)


def merging(dtype, softcap, q, k, v, sharded):
    return ring_attend_merging(q, k, v, sharded, "segments", None, softcap, dtype)


def under_autocast(attention, *arguments, **options):
    with torch.autocast("cpu", torch.bfloat16):
        return attention(*arguments, **options)


def worst_shares(shape, cases, merge_dtype=None, autocast=False):
    """For each case the largest error against the float64 oracle, as a share of its budget.

    All ranks attend together, and hold whole results that are the same; then each holds its own share of the cases
    against the oracle, which takes far longer.
    """
    mesh = make_mesh(MeshShape(**shape), "cpu")
    computed = []
    for case in cases:
        qkv, layouts, sharded = case.batch_of(mesh.groups)
        attention = partial(sharded_attend, softcap=case.softcap)
        if merge_dtype is not None:
            attention = partial(merging, merge_dtype, case.softcap)
        if autocast:
            attention = partial(under_autocast, attention)
        inputs = [x.detach().requires_grad_() for x in qkv]
        output = on_whole_rows(attention, sharded, *inputs)
        cotangent = cotangent_of(*qkv)
        gradients = torch.autograd.grad(output, inputs, cotangent.to(output.dtype))
        computed.append((case, qkv, layouts, (cotangent, output.detach(), *gradients)))
    found = {}
    for number in range(mesh.rank, len(cases), dist.get_world_size()):
        case, qkv, layouts, results = computed[number]
        engine = partial(_Computed.apply, results)
        found[number] = attention_errors(engine, *qkv, layouts, softcap=case.softcap).worst_share
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return [parts[number % len(parts)][number] for number in range(len(cases))]


class _Computed(torch.autograd.Function):
    """Stands for an attention that has been computed: the gradients are those of one cotangent."""

    @staticmethod
    def forward(ctx, results, q, k, v):
        ctx.results = results
        return results[1].clone()

    @staticmethod
    def backward(ctx, grad):
        cotangent, output, *gradients = ctx.results
        assert torch.equal(grad, cotangent.to(output.dtype))
        return None, *gradients


def errors_of_merging(shape, cases, merge_dtype):
    """For each case the root mean square error against the float64 oracle, of output, and gradients of q, k and v.

    Rounds are merged as sharded_attend does it where ``merge_dtype`` is None.
    """
    mesh = make_mesh(MeshShape(**shape), "cpu")
    found = []
    for case in cases:
        qkv, layouts, sharded = case.batch_of(mesh.groups)
        attention = sharded_attend if merge_dtype is None else partial(merging, merge_dtype, None)
        values = []
        for engine, dtype in (
            (partial(on_whole_rows, attention, sharded), case.dtype),
            (partial(oracle_attention, layouts=layouts), torch.float64),
        ):
            inputs = [x.to(dtype).requires_grad_() for x in qkv]
            output = engine(*inputs)
            torch.manual_seed(case.seed)
            cotangent = torch.randn(output.shape).to(case.dtype).to(dtype)
            values.append(
                [x.detach().double() for x in (output, *torch.autograd.grad(output, inputs, cotangent))]
            )
        found.append([float((a - b).square().mean().sqrt()) for a, b in zip(*values, strict=True)])
    return found


def differences_from_attend(shape, cases):
    """For each case how far output and gradients are from those of attend on whole rows, over the largest of them."""
    mesh = make_mesh(MeshShape(**shape), "cpu")
    found = []
    for case in cases:
        qkv, layouts, sharded = case.batch_of(mesh.groups)
        values = []
        for engine in (
            partial(on_whole_rows, partial(sharded_attend, softcap=case.softcap), sharded),
            lambda q, k, v, layouts=layouts, case=case: attend(
                q, k, v, layouts, "segments", softcap=case.softcap
            ),
        ):
            inputs = [x.clone().requires_grad_() for x in qkv]
            output = engine(*inputs)
            torch.manual_seed(case.seed)
            values.append(
                (output, *torch.autograd.grad(output, inputs, torch.randn(output.shape, dtype=case.dtype)))
            )
        # Gradients of q and k are differences of products as large as the others, and may cancel altogether.
        size = max(float(x.detach().abs().max()) for x in values[1])
        found.append(max(float((a - b).detach().abs().max()) / size for a, b in zip(*values, strict=True)))
    return found


@contextmanager
def counted_bytes():
    """Bytes of this rank's all-to-alls to other ranks; a list of one number a message."""
    sent, real = [], dist.all_to_all_single

    def counting(output, tensor, output_splits, input_splits, group=None, async_op=False):
        own = input_splits[dist.get_rank(group)]
        sent.append((tensor.shape[0] - own) * tensor[:1].numel() * tensor.element_size())
        return real(output, tensor, output_splits, input_splits, group=group, async_op=async_op)

    dist.all_to_all_single = counting
    try:
        yield sent
    finally:
        dist.all_to_all_single = real


def sent_bytes(cases):
    """For each case what this rank sent in a forward and in a backward, and what the formula says."""
    mesh = make_mesh(MeshShape(ring=4), "cpu")
    found = []
    for case in cases:
        qkv, layouts, sharded = case.batch_of(mesh.groups)
        mine = [_take(x, sharded).requires_grad_() for x in qkv]
        with counted_bytes() as forward:
            output = sharded_attend(*mine, sharded)
        with counted_bytes() as backward:
            output.sum().backward()
        plan = ring_plan(tuple(layouts), sharded.rows, mesh.groups.ring_rank)
        expected = ring_bytes(plan, case.kv_heads, case.head_dim, case.value_dim, case.dtype)
        found.append(((sum(forward), sum(backward)), expected))
    return found


def with_empty_ranks():
    """A row of which two of four ranks hold nothing, and one nothing but a document by itself."""
    mesh = make_mesh(MeshShape(ring=4), "cpu")
    layout = PackedLayout.from_lengths([5, 4, 7], "anchor", 2)
    row = RowShards(layout.storage_in_order, (((0, 7), (11, 15)), (), ((7, 11), (15, 18)), ()), 1, 14)
    sharded = ShardedLayouts((layout,), (row,), mesh.groups)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 18, 8) for h in (4, 1, 1))
    return attention_errors(partial(on_whole_rows, sharded_attend, sharded), q, k, v, [layout]).worst_share


def same_twice(case):
    """Whether two calls give the same bits, output and gradients."""
    mesh = make_mesh(MeshShape(ring=4), "cpu")
    qkv, _, sharded = case.batch_of(mesh.groups)
    runs = []
    for _ in range(2):
        mine = [_take(x, sharded).requires_grad_() for x in qkv]
        output = sharded_attend(*mine, sharded)
        runs.append((output, *torch.autograd.grad(output.square().sum(), mine)))
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def autocast_changes(case):
    """Whether autocast, around the forward alone and around the backward too, changes a bit of output or gradients."""
    mesh = make_mesh(MeshShape(ring=4), "cpu")
    qkv, _, sharded = case.batch_of(mesh.groups)
    runs = []
    for forward, backward in ((False, False), (True, False), (True, True)):
        mine = [_take(x, sharded).requires_grad_() for x in qkv]
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            output = sharded_attend(*mine, sharded)
        loss = output.float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            runs.append((output, *torch.autograd.grad(loss, mine)))
    return [any(not torch.equal(a, b) for a, b in zip(each, runs[0], strict=True)) for each in runs[1:]]


class _Largest(TorchDispatchMode):
    """The most elements that a tensor has which an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return result


def largest_tensor(case):
    """The most elements of a tensor in a forward and a backward, and those of queries and of keys and values."""
    mesh = make_mesh(MeshShape(ring=4), "cpu")
    qkv, _, sharded = case.batch_of(mesh.groups)
    mine = [_take(x, sharded).requires_grad_() for x in qkv]
    with patch("ropewalk.parallel.ring_blocks.CPU_SCORE_BYTES", 1), _Largest() as largest:
        sharded_attend(*mine, sharded).sum().backward()
    return largest.numel, mine[0].numel(), mine[1].numel() + mine[2].numel()


@dataclass(frozen=True, eq=False)
class _InTurn(Ring):
    """A rank whose neighbours are in this process: what they would send is at hand, what they get is kept."""

    held: tuple[torch.Tensor, ...] = ()
    plans: tuple[RingPlan, ...] = ()
    given: tuple[torch.Tensor, ...] = ()

    def start(self, step, kv):
        if step == len(self.plan.rounds):
            return None
        source = self.plan.rounds[step].source
        sent = self.plans[source].rounds[step].sent.to(kv.device)
        return _Here(self.held[source][sent])

    def give_back(self, each, grad):
        sent = self.plans[each.source].rounds[self.plan.rounds.index(each)].sent.to(grad.device)
        self.given[each.source][sent] += grad
        return _Here(grad.new_zeros(each.sent.numel(), *grad.shape[1:]))


@dataclass(frozen=True)
class _Here:
    buffer: torch.Tensor

    def wait(self):
        return self.buffer


class RanksInTurn(torch.autograd.Function):
    """All ranks of a ring, one after the other in one process, on whole rows: for kernels, which need a GPU."""

    @staticmethod
    def forward(ctx, q, k, v, layouts, rows, blocks):
        plans = tuple(ring_plan(tuple(layouts), tuple(rows), rank) for rank in range(rows[0].ring))
        queries, keys, values = ([_places_of(x, rows, rank) for rank in range(len(plans))] for x in (q, k, v))
        held = tuple(torch.cat(pair, dim=2) for pair in zip(keys, values, strict=True))
        given = tuple(torch.zeros_like(x, dtype=wide_dtype(q.dtype)) for x in held)
        scoring = Scoring(q.shape[3] ** -0.5)
        ctx.rings = [
            _InTurn(plan, None, blocks, scoring, given[0].dtype, held, plans, given) for plan in plans
        ]
        found = [
            ring_forward(x, kv, k.shape[3], v.shape[3], ring)
            for x, kv, ring in zip(queries, held, ctx.rings, strict=True)
        ]
        ctx.rows, ctx.queries, ctx.head_dim = rows, queries, k.shape[3]
        ctx.found = [(out.to(q.dtype), lse) for out, lse in found]
        return _whole_of([out for out, _ in ctx.found], rows)

    @staticmethod
    def backward(ctx, grad):
        grad_q, grad_kv = [], []
        for rank, (ring, (out, lse)) in enumerate(zip(ctx.rings, ctx.found, strict=True)):
            mine = _places_of(grad, ctx.rows, rank)
            delta = (out.to(lse.dtype) * mine.to(lse.dtype)).sum(dim=-1)
            final = Final(out, lse, mine, delta)
            of_q, of_kv = ring_backward(ctx.queries[rank], ring.held[rank], ctx.head_dim, final, ring)
            grad_q.append(of_q)
            grad_kv.append(of_kv)
        both = [own + given for own, given in zip(grad_kv, ctx.rings[0].given, strict=True)]
        of_k, of_v = [x[..., : ctx.head_dim] for x in both], [x[..., ctx.head_dim :] for x in both]
        return *(_whole_of(x, ctx.rows).to(grad.dtype) for x in (grad_q, of_k, of_v)), None, None, None


def _places_of(x, rows, rank):
    """``[B, H, T, D]`` to a ring rank's ``[P, H, D]``."""
    index = torch.stack([row.tokens[rank] for row in rows]).to(x.device)
    taken = torch.stack([each[:, found.clamp_min(0)] for each, found in zip(x, index, strict=True)])
    return taken.masked_fill((index < 0)[:, None, :, None], 0).transpose(1, 2).flatten(0, 1).contiguous()


def _whole_of(shards, rows):
    """Every ring rank's ``[P, H, D]`` to ``[B, H, T, D]``."""
    per_rank = [x.unflatten(0, (len(rows), -1)).permute(0, 2, 3, 1) for x in shards]
    return torch.stack([row.join([x[b] for x in per_rank]) for b, row in enumerate(rows)]).transpose(2, 3)
