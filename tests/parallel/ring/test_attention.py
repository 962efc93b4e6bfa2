"""The ring against the float64 oracle and one process, in one process and in four."""

from itertools import product

import pytest
import torch

from ropewalk import attend
from ropewalk.attention import AttentionSpec, check_engine
from ropewalk.attention.api import kernel_of
from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import AttentionOptions, Locality
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.parallel import RowShards, ShardedLayouts, row_shards
from ropewalk.parallel.mesh import SequenceGroups
from ropewalk.parallel.rank_pool import RankFailure
from ropewalk.parallel.ring import ring_attend
from ropewalk.parallel.ring.plan import ring_plan
from ropewalk.parallel.ring.traffic import heads_of_an_exchange
from tests.marks import slow_after
from tests.parallel.ring.ring_cases import (
    Case,
    autocast_changes,
    differences_from_attend,
    one_rank_refuses,
    same_twice,
    saved_bytes,
    sent_bytes,
    with_empty_ranks,
    worst_shares,
)

SEEDS = range(12)
EVEN, ODD = (*SEEDS[::2], 3), (*SEEDS[1::2], 4)
RING, PRODUCT = {"ring": 4}, {"ring": 2, "sequence": 2}


OPTIONS = (
    AttentionOptions(),
    AttentionOptions(softcap=2.0),
    AttentionOptions(window=3),
    AttentionOptions(window=20),
    AttentionOptions(chunk=11),
)
"""What layers ask for: everything before a query, a soft cap, a short and a long window, chunks."""


def assert_within_budget(shares):
    assert max(max(found) for found in shares) <= 1, shares


@pytest.mark.parametrize("shape", [RING, PRODUCT], ids=["ring 4", "ring 2 x sequence 2"])
@pytest.mark.parametrize(
    ("dtype", "seeds"),
    # Half precisions run the same code: each takes half of the seeds, and what only one has.
    slow_after(1, [(torch.float32, SEEDS), (torch.bfloat16, EVEN), (torch.float16, ODD)]),
    ids=["float32", "bfloat16", "float16"],
)
def test_ranks_together_are_within_the_error_budget(four_ranks, shape, dtype, seeds):
    cases = [Case(seed, kv_heads=(4, 2, 1)[seed % 3], dtype=dtype) for seed in seeds]
    assert_within_budget(four_ranks.run(worst_shares, shape, cases))


@pytest.mark.parametrize("balance", ["contiguous", "zigzag", "cost", "auto"])
def test_every_pattern_and_balance(four_ranks, balance):
    patterns = product(("full", "intra_document", "anchor"), (False, True))
    cases = [
        Case(seed, total=61, patterns=(pattern,), interleaved=interleaved, balance=balance, batch=2)
        for seed, (pattern, interleaved) in enumerate(patterns)
    ]
    assert_within_budget(four_ranks.run(worst_shares, RING, cases))


def test_widths_of_values_and_soft_caps(four_ranks):
    cases = [
        Case(seed, value_dim=value_dim, options=AttentionOptions(softcap=softcap), dtype=dtype)
        for seed, (value_dim, softcap, dtype) in enumerate(
            product((8, 5, 12), (None, 1.5), (torch.float32, torch.bfloat16))
        )
    ]
    assert_within_budget(four_ranks.run(worst_shares, RING, cases))


def test_documents_that_straddle_one_to_all_shards(four_ranks):
    cases = [Case(seed, total=80, max_documents=seed + 1, balance="contiguous") for seed in range(8)]
    assert_within_budget(four_ranks.run(worst_shares, RING, cases))


def test_rows_as_short_as_the_ring(four_ranks):
    # All places of Ulysses' second half are padding where a ring rank holds a single token.
    cases = [Case(seed, total=total) for seed, total in enumerate([7, 8, 9, 10])]
    assert_within_budget(four_ranks.run(worst_shares, PRODUCT, cases))


def test_ranks_that_hold_nothing(four_ranks):
    assert max(four_ranks.run(with_empty_ranks)) <= 1


@pytest.mark.parametrize("shape", slow_after(1, [PRODUCT, RING]), ids=["ring 2 x sequence 2", "ring 4"])
def test_float64_differs_from_one_process_by_rounding(four_ranks, shape):
    cases = [
        Case(
            seed,
            kv_heads=(4, 1)[seed % 2],
            dtype=torch.float64,
            options=OPTIONS[seed % 5],
            with_sinks=seed % 3 == 0,
        )
        for seed in range(30)
    ]
    # Sums of up to 130 terms in another order: a rounding for each term at the very worst.
    budget = 130 * torch.finfo(torch.float64).eps
    for found in four_ranks.run(differences_from_attend, shape, cases):
        assert max(found) <= budget, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_that_are_exchanged_one_by_one(four_ranks, dtype):
    cases = [Case(seed, heads=8, kv_heads=(4, 2)[seed % 2], dtype=dtype) for seed in range(6)]
    assert_within_budget(four_ranks.run(worst_shares, RING, cases, False, 1))


@pytest.mark.parametrize("exchanged_bytes", [1, 2**30])
def test_bytes_sent_are_those_of_the_formula(four_ranks, exchanged_bytes):
    cases = [
        Case(seed, value_dim=5, dtype=dtype, options=OPTIONS[seed % 5])
        for seed, dtype in enumerate([torch.float32, torch.float64, torch.bfloat16, torch.float16] * 3)
    ]
    results = four_ranks.run(sent_bytes, cases, exchanged_bytes)
    for found in results:
        for counted, expected in found:
            assert counted == expected
    calls = {counted[0][1]["all_to_all"] for found in results for counted, _ in found}
    assert calls == ({2} if exchanged_bytes == 1 else {1})


def test_keys_that_no_window_holds_are_not_sent():
    """One document over eight ranks in contiguous pieces: a rank sends the last of its keys, to the next one alone."""
    layout = PackedLayout.from_lengths([8000], "full", 0)
    row = row_shards(layout, 8, 1, "contiguous")
    for rank in range(8):
        whole = ring_plan((layout,), (row,), rank)
        near = ring_plan((layout,), (row,), rank, Locality(window=101))
        assert whole.sent_to_others == 1000 * (7 - rank)
        assert near.sent_to_others == (100 if rank < 7 else 0)


def test_one_exchange_brings_as_many_heads_as_fit():
    assert heads_of_an_exchange(2**17, 8, 512) == 8
    assert heads_of_an_exchange(2**20, 8, 512) == 2
    assert heads_of_an_exchange(2**22, 8, 512) == heads_of_an_exchange(2**30, 8, 512) == 1


def test_a_forward_keeps_a_row_of_keys_and_values_and_one_piece_more(four_ranks):
    heads, kv_heads, dim = 4, 2, 8
    case = Case(
        0, heads, kv_heads, dim, dim, torch.bfloat16, total=256, patterns=("full",), batch=1, balance="zigzag"
    )
    results = four_ranks.run(saved_bytes, case)
    # The last rank's pieces stand beside each other.
    assert [slots for _, slots, _ in results] == [256 + 32] * 3 + [128 + 32]
    for kept, slots, places in results:
        # Keys, values, queries and output in 16 bits, and the log-sum-exp in float32.
        keys, queries = slots * kv_heads * 2 * dim, places * heads * 2 * dim
        assert kept == (keys + queries) * 2 + places * heads * 4


def test_a_rank_that_refuses_ends_the_others(four_ranks):
    with pytest.raises(RankFailure, match=r"rank 2(.|\n)*key must have the same number of heads as value"):
        four_ranks.run(one_rank_refuses)


def test_the_same_bits_twice(four_ranks):
    assert four_ranks.run(same_twice, Case(3, total=130, dtype=torch.bfloat16)) == [True] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(four_ranks, dtype):
    # Where scores are large, products in bfloat16 are off by more than one in the exponent.
    case = Case(3, total=130, patterns=("full",), dtype=dtype, score_std=8.0)
    assert four_ranks.run(autocast_changes, case) == [[False, False]] * 4


def test_large_scores_under_autocast_are_within_the_error_budget(four_ranks):
    cases = [Case(seed, total=130, dtype=torch.bfloat16, score_std=8.0) for seed in range(4)]
    assert_within_budget(four_ranks.run(worst_shares, RING, cases, True))


def ring_of_one(layouts):
    """A ring of one rank: plans and runs without messages."""
    rows = tuple(RowShards(each.storage_in_order, (((0, each.total_length),),)) for each in layouts)
    return ShardedLayouts(tuple(layouts), rows, SequenceGroups())


@pytest.mark.parametrize(
    ("pattern", "window", "engine"),
    [("full", None, "sdpa"), ("full", 5, "varlen"), ("anchor", None, "varlen")],
)
def test_auto_is_the_engine_of_a_whole_row(monkeypatch, pattern, window, engine):
    """On Hopper cuDNN computes rows of one run."""
    monkeypatch.setattr("ropewalk.attention.engines.capabilities.capability_of", lambda device: (9, 0))
    chosen = []
    monkeypatch.setattr(
        "ropewalk.parallel.ring.attention.kernel_of", lambda name: chosen.append(name) or kernel_of(name)
    )
    layout = PackedLayout.from_lengths([20, 12], pattern, 0)
    q, k, v = (torch.empty(1, h, 32, 8, dtype=torch.bfloat16, device="meta") for h in (4, 2, 2))
    ring_attend(q, k, v, ring_of_one([layout]), options=AttentionOptions(window=window))
    assert chosen == [engine]


@pytest.mark.parametrize("softcap", [None, 1.0])
def test_blocks_of_few_queries_give_the_same(monkeypatch, softcap):
    layout = PackedLayout.from_lengths([13, 1, 20], "anchor", 3)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 37, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    expected = attend(q, k, v, layout, "sdpa", AttentionOptions(softcap=softcap))
    for scores in (1, 1000, 2**26):
        monkeypatch.setattr("ropewalk.attention.engines.plain.CPU_SCORE_BYTES", scores)
        output = ring_attend(q, k, v, ring_of_one([layout]), options=AttentionOptions(softcap=softcap))
        for a, b in zip(
            (output, *torch.autograd.grad(output.square().sum(), (q, k, v))),
            (expected, *torch.autograd.grad(expected.square().sum(), (q, k, v), retain_graph=True)),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=37 * 2**-52 * float(b.detach().abs().max()))


def test_gradients_by_finite_differences():
    layout = PackedLayout.from_segments([3, 2, 3], [0, 1, 0], "anchor", 1)
    row = RowShards(layout.storage_in_order, (((0, 9),),))
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, h, 9, d, dtype=torch.float64, requires_grad=True) for h, d in ((2, 3), (1, 3), (1, 2))
    )
    sharded = ShardedLayouts((layout,), (row,), SequenceGroups())
    assert torch.autograd.gradcheck(
        lambda *qkv: ring_attend(*qkv, sharded, options=AttentionOptions(softcap=2.0, window=3)), (q, k, v)
    )


@pytest.mark.parametrize(
    ("engine", "device", "dtype", "options", "message"),
    [
        (
            "reference",
            "cpu",
            torch.float32,
            {},
            r"engine reference needs all keys of a row at once.*use engine sdpa",
        ),
        ("flex", "cuda", torch.bfloat16, {}, r"engine flex needs all keys.*set parallel.ring to 1 and raise"),
        (
            "varlen",
            "cpu",
            torch.bfloat16,
            {},
            r"engine varlen needs CUDA, but the tensors are on cpu; use engine sdpa",
        ),
        (
            "varlen",
            "cuda",
            torch.float32,
            {},
            r"needs bfloat16 or float16, got torch.float32; use engine sdpa",
        ),
        (
            "varlen",
            "cuda",
            torch.bfloat16,
            {"softcap": 50.0},
            r"does not support a soft cap \(softcap=50.0\)",
        ),
        (
            "varlen",
            "cuda",
            torch.bfloat16,
            {"head_dim": 320},
            r"a multiple of 8 up to 256, got 320 for keys and 320 for values",
        ),
        (
            "varlen",
            "cuda",
            torch.bfloat16,
            {"value_dim": 32},
            r"the same head dimension.*got 64 for keys and 32 for values",
        ),
        ("fast", "cuda", torch.bfloat16, {}, r"unknown attention engine 'fast'"),
    ],
)
def test_what_an_engine_cannot_do_is_said_before_anything_loads(engine, device, dtype, options, message):
    with pytest.raises(EngineError, match=message):
        check_engine(engine, AttentionSpec(device, dtype, **{"head_dim": 64, **options}, ring=True))


@pytest.mark.parametrize(
    ("device", "dtype", "options", "engine"),
    [
        ("cpu", torch.bfloat16, {}, "sdpa"),
        ("cuda", torch.bfloat16, {}, "varlen"),
        ("cuda", torch.float16, {"head_dim": 256}, "varlen"),
        ("cuda", torch.float32, {}, "sdpa"),
        ("cuda", torch.bfloat16, {"softcap": 30.0}, "sdpa"),
        ("cuda", torch.bfloat16, {"head_dim": 60}, "sdpa"),
        ("cuda", torch.bfloat16, {"value_dim": 128}, "sdpa"),
    ],
)
def test_what_auto_stands_for(device, dtype, options, engine):
    assert (
        check_engine("auto", AttentionSpec(device, dtype, **{"head_dim": 64, **options}, ring=True)) == engine
    )


def test_tensors_that_contradict_each_other_are_refused():
    layout = PackedLayout.from_lengths([7], "full", 0)
    sharded = ring_of_one([layout])
    q, k = torch.zeros(1, 4, 7, 8), torch.zeros(1, 2, 7, 8)
    for tensors, message in [
        (
            (q[:, :, :6], k, k),
            r"query must have the shape .* with batch 1 and ring_length 7, got \(1, 4, 6, 8\)",
        ),
        ((q, k.double(), k), r"key is torch.float64 on cpu but query is torch.float32 on cpu"),
        ((q, k[..., :4], k), r"key must have the same number of heads as value"),
        ((q[:, :3], k, k), r"num_heads 3 is not a multiple of num_kv_heads 2"),
        ((q.to(torch.int64), k.to(torch.int64), k.to(torch.int64)), r"got torch.int64"),
    ]:
        with pytest.raises(RopewalkError, match=message):
            ring_attend(*tensors, sharded)
    groups = SequenceGroups(ring=2)
    with pytest.raises(RopewalkError, match=r"sharded with ring=1, but the mesh has ring=2"):
        ring_attend(q, k, k, ShardedLayouts(sharded.layouts, sharded.rows, groups))


def test_seeds_cover_what_they_are_for():
    for seeds in (SEEDS, EVEN, ODD):
        assert_all_kinds([Case(seed).batch_of(SequenceGroups(ring=4)) for seed in seeds])


def assert_all_kinds(drawn):
    layouts = [layout for _, found, _ in drawn for layout in found]
    assert {layout.pattern for layout in layouts} == {"full", "intra_document", "anchor"}
    assert any(layout.is_interleaved for layout in layouts)
    assert any(layout.anchor_length > 1 and layout.pattern == "anchor" for layout in layouts)
    assert {len(found) for _, found, _ in drawn} == {1, 2}
    assert any(row.padding for _, _, sharded in drawn for row in sharded.rows)
