"""What ranks run in the tests of the ring; spawned processes import it by name."""

import random
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

from ropewalk import attend
from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.merge import ExtraKeys
from ropewalk.attention.options import PLAIN, AttentionOptions
from ropewalk.attention.oracle import attention_errors, cotangent_of
from ropewalk.parallel import MeshShape, RowShards, ShardedLayouts, make_mesh, sharded_attend
from ropewalk.parallel.ring.attention import attend_received, tokens_of
from ropewalk.parallel.ring.exchange import Keys, exchange
from ropewalk.parallel.ring.plan import ring_plan
from ropewalk.parallel.ring.traffic import heads_of_an_exchange, ring_bytes
from ropewalk.parallel.traffic import counted_traffic
from ropewalk.testing import random_layout


@dataclass(frozen=True)
class Case:
    """One batch; what is not given is random."""

    seed: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    dtype: torch.dtype = torch.float32
    options: AttentionOptions = PLAIN
    with_sinks: bool = False
    total: int = 0
    interleaved: bool | None = None
    patterns: tuple[str, ...] = ("full", "intra_document", "anchor")
    max_documents: int = 8
    balance: str = ""
    batch: int = 0
    score_std: float = 1.0

    def sinks(self):
        """``[heads]`` in a list, or none."""
        torch.manual_seed(self.seed + 1)
        return [torch.randn(self.heads).to(self.dtype)] if self.with_sinks else []

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


def under_autocast(attention, *arguments, **options):
    with torch.autocast("cpu", torch.bfloat16):
        return attention(*arguments, **options)


def worst_shares(shape, cases, autocast=False, exchanged_bytes=None):
    """For each case the largest error against the float64 oracle, as a share of its budget.

    All ranks attend together, and hold whole results that are the same; then each holds its own share of the cases
    against the oracle, which takes far longer. ``exchanged_bytes`` stands for the bound on one exchange.
    """
    if exchanged_bytes is not None:
        with patch("ropewalk.parallel.ring.traffic.EXCHANGED_BYTES", exchanged_bytes):
            return worst_shares(shape, cases, autocast)
    mesh = make_mesh(MeshShape(**shape), "cpu")
    computed = []
    for case in cases:
        qkv, layouts, sharded = case.batch_of(mesh.groups)
        attention = partial(sharded_attend, options=case.options)
        if autocast:
            attention = partial(under_autocast, attention)
        inputs = [x.detach().requires_grad_() for x in qkv]
        output = on_whole_rows(attention, sharded, *inputs)
        cotangent = cotangent_of(qkv[0], qkv[2])
        gradients = torch.autograd.grad(output, inputs, cotangent.to(output.dtype))
        computed.append((case, qkv, layouts, (cotangent, output.detach(), *gradients)))
    found = {}
    for number in range(mesh.rank, len(cases), dist.get_world_size()):
        case, qkv, layouts, results = computed[number]
        engine = partial(_Computed.apply, results)
        found[number] = attention_errors(engine, *qkv, layouts, case.options).worst_share
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


def differences_from_attend(shape, cases):
    """For each case how far output and gradients are from those of attend on whole rows, over the largest of them."""
    mesh = make_mesh(MeshShape(**shape), "cpu")
    found = []
    for case in cases:
        qkv, layouts, sharded = case.batch_of(mesh.groups)
        values = []
        for cut in (True, False):
            inputs = [x.clone().requires_grad_() for x in (*qkv, *case.sinks())]
            options = replace(case.options, sinks=inputs[3] if case.with_sinks else None)
            if cut:
                output = on_whole_rows(partial(sharded_attend, options=options), sharded, *inputs[:3])
            else:
                output = attend(*inputs[:3], layouts, "sdpa", options)
            torch.manual_seed(case.seed)
            gradients = torch.autograd.grad(output, inputs, torch.randn(output.shape, dtype=case.dtype))
            if cut:
                # A rank has the part of its queries and heads, as of any parameter.
                for grad in gradients[3:]:
                    dist.all_reduce(grad)
            values.append((output, *gradients))
        # Gradients of q and k are differences of products as large as the others, and may cancel altogether.
        size = max(float(x.detach().abs().max()) for x in values[1])
        found.append(max(float((a - b).detach().abs().max()) / size for a, b in zip(*values, strict=True)))
    return found


def sent_bytes(cases, exchanged_bytes):
    """For each case the bytes and messages by kind of a forward and of a backward of this rank, and what is planned."""
    mesh = make_mesh(MeshShape(ring=4), "cpu")
    found = []
    for case in cases:
        qkv, layouts, sharded = case.batch_of(mesh.groups)
        mine = [_take(x, sharded).requires_grad_() for x in qkv]
        with patch("ropewalk.parallel.ring.traffic.EXCHANGED_BYTES", exchanged_bytes):
            with counted_traffic() as forward:
                output = sharded_attend(*mine, sharded, options=case.options)
            with counted_traffic() as backward:
                output.sum().backward()
            key_bytes = (case.head_dim + case.value_dim) * case.dtype.itemsize
            tokens = len(layouts) * sharded.total_length
            messages = -(-case.kv_heads // heads_of_an_exchange(tokens, case.kv_heads, key_bytes))
        plan = ring_plan(tuple(layouts), sharded.rows, mesh.groups.ring_rank, case.options.locality)
        sent = ring_bytes(plan, case.kv_heads, case.head_dim, case.value_dim, case.dtype)
        calls = [{"all_to_all": messages}, {"all_to_all": messages}]
        if plan.anchors is not None:
            calls[1]["all_reduce"] = messages
        expected = list(zip(sent, calls, strict=True))
        found.append(([(each.total, each.calls) for each in (forward, backward)], expected))
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


def one_rank_refuses():
    """Rank 2 has keys of another width; the others would wait for it."""
    mesh = make_mesh(MeshShape(ring=4), "cpu")
    qkv, _, sharded = Case(0, total=64).batch_of(mesh.groups)
    q, k, v = (_take(x, sharded) for x in qkv)
    sharded_attend(q, k[..., : 4 if mesh.rank == 2 else 8], v, sharded)


def saved_bytes(case):
    """Bytes that autograd keeps of received keys and values, over those of the rank's own; its slots and places."""
    mesh = make_mesh(MeshShape(ring=4), "cpu")
    qkv, layouts, sharded = case.batch_of(mesh.groups)
    mine = [_take(x, sharded).requires_grad_() for x in qkv]
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sharded_attend(*mine, sharded)
    plan = ring_plan(tuple(layouts), sharded.rows, mesh.groups.ring_rank)
    return sum(size for size, _ in kept.values()), len(plan.slots), sum(plan.runs.queries)


def ranks_in_turn(q, k, v, layouts, rows, engine, options=PLAIN):
    """All ranks of a ring, one after the other in one process, on whole rows: for kernels, which need a GPU."""
    ranks = range(rows[0].ring)
    plans = [ring_plan(tuple(layouts), tuple(rows), rank, options.locality) for rank in ranks]
    # Gradients of all ranks add up in float32, as the exchange does it.
    wide = torch.promote_types(q.dtype, torch.float32)
    held = [
        [tokens_of(_places_of(x.to(wide), rows, rank), plan.tokens) for x in (k, v)]
        for rank, plan in enumerate(plans)
    ]
    outputs = []
    for rank, plan in enumerate(plans):
        received = [_received_by(rank, [each[part] for each in held], plans) for part in (0, 1)]
        keys = [x[plan.slots.to(x.device)].to(q.dtype) for x in received]
        anchors = None
        if plan.anchors is not None:
            extra = (x[plan.anchors.received.to(x.device)][None] for x in received)
            anchors = ExtraKeys(*extra, plan.anchors.seen.to(q.device)[None])
        outputs.append(
            attend_received(_places_of(q, rows, rank), Keys(*keys, anchors), plan, engine, options)
        )
    whole = [[output[b].transpose(1, 2) for output in outputs] for b in range(len(rows))]
    return torch.stack([row.join(each) for row, each in zip(rows, whole, strict=True)]).transpose(2, 3)


def _received_by(rank, held, plans):
    """What a rank receives, from what each rank holds."""
    parts = [plan.sent.split(list(plan.send_counts))[rank] for plan in plans]
    return torch.cat([x[part.to(x.device)] for x, part in zip(held, parts, strict=True)])


def _places_of(x, rows, rank):
    """``[B, H, T, D]`` to a ring rank's ``[B, H, n, D]``."""
    index = torch.stack([row.tokens[rank] for row in rows]).to(x.device)
    taken = torch.stack([each[:, found.clamp_min(0)] for each, found in zip(x, index, strict=True)])
    return taken.masked_fill((index < 0)[:, None, :, None], 0)


@dataclass(frozen=True)
class Exchanged:
    """Keys and values of runs, those of the anchor with their dtype, and gradients of this rank's own."""

    keys: tuple
    anchors: tuple
    gradients: tuple


def exchanged(dtype):
    """An exchange of a row with an anchor of one token and documents of 3 tokens and 1, cut after its third token."""
    mesh = make_mesh(MeshShape(ring=2), "cpu")
    layout = PackedLayout.from_lengths([3, 1], "anchor", 1)
    row = RowShards(layout.storage_in_order, (((0, 3),), ((3, 5),)))
    plan = ring_plan((layout,), (row,), mesh.groups.ring_rank)
    tokens = torch.arange(3) if mesh.rank == 0 else torch.arange(3, 5)
    k, v = (x.to(dtype)[:, None, None].requires_grad_() for x in (tokens, 10 + tokens))
    keys = exchange(k, v, plan, mesh.groups.ring_group)
    slots = torch.arange(1, len(keys.k) + 1).to(dtype)[:, None, None]
    loss = (keys.k * slots).sum() + (keys.v * 10 * slots).sum()
    anchors = (keys.anchors.k, keys.anchors.v)
    loss = loss + 100 * sum(x.sum() for x in anchors)
    gradients = torch.autograd.grad(loss, (k, v))
    return Exchanged(
        tuple(x.flatten().tolist() for x in (keys.k, keys.v)),
        (*(x.flatten().tolist() for x in anchors), anchors[0].dtype),
        (*(x.flatten().tolist() for x in gradients), gradients[0].dtype),
    )
