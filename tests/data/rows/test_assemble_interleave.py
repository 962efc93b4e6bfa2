"""Interleaving moves tokens about and changes nothing within a document, and is as random as it says."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, groupby, pairwise, permutations
from math import comb, log, sqrt

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ropewalk import attend
from ropewalk.attention.layout import PATTERNS, POSITIONS, PackedLayout, next_token_labels
from ropewalk.data.rows.assemble import Interleaved, _cut_range, _distinct, _part_lengths, interleave
from ropewalk.data.settings import InterleaveSettings
from ropewalk.errors import RopewalkError
from ropewalk.testing import attention_errors, oracle_attention
from tests.data.cases import changed

CHANCE = 1e-9
"""Of a statistical test failing though the words were random; the words are fixed, so it always passes or never."""

shares = st.sampled_from([0, 0.1, 0.2, 0.29, 0.5, 0.57, 0.8, 0.9, 1])
rows_of_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@st.composite
def any_settings(draw: st.DrawFn) -> InterleaveSettings:
    least = draw(st.integers(1, 40))
    low, high = sorted(draw(st.lists(shares, min_size=2, max_size=2, unique=True)))
    return InterleaveSettings(
        min_length=least,
        max_length=least + draw(st.integers(0, 40)),
        parts=tuple(draw(st.lists(st.integers(2, 6), min_size=1, max_size=3))),
        cut_points=(low, high),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


def parts_of(result: Interleaved) -> dict[int, list[tuple[int, int]]]:
    """The segments of each document, as first token of the row before and length."""
    assert {type(value) for value in [*result.segment_lengths, *result.segment_documents]} == {int}
    found: dict[int, list[tuple[int, int]]] = {}
    place = 0
    for length, document in zip(result.segment_lengths, result.segment_documents, strict=True):
        assert length >= 1
        tokens = result.order[place : place + length]
        assert (np.diff(tokens) == 1).all(), "a segment is a stretch of the row before"
        found.setdefault(document, []).append((int(tokens[0]), length))
        place += length
    assert place == len(result.order)
    return found


@given(rows_of_lengths, any_settings(), st.integers(0, 10**6))
def test_documents_keep_their_tokens_and_their_order(
    lengths: list[int], settings: InterleaveSettings, row: int
) -> None:
    result = interleave(lengths, settings, row)
    assert result.order.dtype == np.int64
    assert sorted(result.order.tolist()) == list(range(sum(lengths)))
    found = parts_of(result)
    assert sorted(found) == list(range(len(lengths)))
    bounds = np.cumsum([0, *lengths]).tolist()
    for document, parts in found.items():
        tokens = [token for start, length in parts for token in range(start, start + length)]
        assert tokens == list(range(bounds[document], bounds[document + 1]))
    assert all(a != b for a, b in pairwise(result.segment_documents)), "neighbours are merged"


@given(rows_of_lengths, any_settings(), st.sampled_from(PATTERNS), st.sampled_from(POSITIONS))
def test_sorting_by_document_undoes_it(
    lengths: list[int], settings: InterleaveSettings, pattern: str, positions: str
) -> None:
    result = interleave(lengths, settings, row=3)
    layout = PackedLayout.from_segments(
        result.segment_lengths, result.segment_documents, pattern, 1, positions
    )
    before = PackedLayout.from_lengths(lengths, pattern, 1, positions)
    tokens = np.concatenate([[-1], result.order])
    back = layout.document_order.numpy()
    assert tokens[back].tolist() == list(range(-1, sum(lengths)))
    assert torch.equal(layout.document_ids[back], before.document_ids)
    by_document = np.lexsort([result.order, layout.document_ids[1:].numpy()])
    assert result.order[by_document].tolist() == list(range(sum(lengths)))
    expected = before.position_ids[back.argsort()] if positions == "reset" else before.position_ids
    assert torch.equal(layout.position_ids, expected)


@given(rows_of_lengths, any_settings(), st.integers(0, 10**6))
def test_cuts_are_few_enough_and_lie_between_the_cut_points(
    lengths: list[int], settings: InterleaveSettings, row: int
) -> None:
    low, high = (Fraction(str(share)) for share in settings.cut_points)
    bounds = np.cumsum([0, *lengths]).tolist()
    for document, parts in parts_of(interleave(lengths, settings, row)).items():
        length = lengths[document]
        cuts = [start - bounds[document] for start, _ in parts[1:]]
        assert len(parts) <= max(settings.parts)
        if cuts:
            assert settings.min_length <= length <= settings.max_length
            assert low * length <= cuts[0]
            assert cuts[-1] <= high * length


@given(st.integers(1, 400), shares, shares)
def test_the_range_of_cuts_is_every_token_between_the_shares(length: int, one: float, other: float) -> None:
    shares = min(one, other), max(one, other)
    low, high = _cut_range(length, shares)
    written = [Fraction(str(share)) for share in shares]
    expected = [cut for cut in range(1, length) if written[0] * length <= cut <= written[1] * length]
    assert list(range(low, high + 1)) == expected


@given(rows_of_lengths, any_settings(), st.integers(0, 10**6))
def test_it_depends_on_the_seed_and_the_row_alone(
    lengths: list[int], settings: InterleaveSettings, row: int
) -> None:
    first = interleave(lengths, settings, row)
    again = interleave(np.array(lengths), settings, row)
    assert again.order.tolist() == first.order.tolist()
    assert again.segment_lengths == first.segment_lengths
    assert again.segment_documents == first.segment_documents


def test_another_row_or_seed_is_another_arrangement() -> None:
    lengths, settings = [100] * 30, InterleaveSettings()
    orders = [
        interleave(lengths, settings, 0).order,
        interleave(lengths, settings, 1).order,
        interleave(lengths, changed(settings, seed=1), 0).order,
        interleave(lengths, changed(settings, seed=1), 1).order,
    ]
    assert not any(np.array_equal(a, b) for a, b in combinations(orders, 2))


def test_an_arrangement_stays_from_release_to_release() -> None:
    """Rows that are made on several machines, or made again, must agree; so the words must not move."""
    result = interleave([100, 63, 2049, 70, 80], InterleaveSettings(seed=7), row=2)
    assert result.segment_documents == [4, 3, 2, 0, 3, 0, 4, 3, 1]
    assert result.segment_lengths == [54, 17, 2049, 76, 3, 24, 26, 50, 63]


def interleaved_token_by_token(lengths: list[int], settings: InterleaveSettings, row: int) -> Interleaved:
    """The same random words, dealt out in lists."""
    source = np.random.Philox(np.random.SeedSequence([settings.seed, row, 0x696E746C]))
    first = 0
    parts = []
    for document, length in enumerate(lengths):
        words = [int(source.random_raw()) for _ in range(max(settings.parts))]
        places = [
            n
            for n in range(1, length)
            if all(
                sign * (n - Fraction(str(share)) * length) >= 0
                for sign, share in zip((1, -1), settings.cut_points, strict=True)
            )
        ]
        wanted = settings.parts[words[0] * len(settings.parts) // 2**64] - 1
        if not settings.min_length <= length <= settings.max_length:
            wanted = 0
        wanted = min(wanted, len(places))
        cuts: list[int] = []
        for n, word in enumerate(words[1 : 1 + wanted]):
            top = len(places) - wanted + n
            drawn = places[word * (top + 1) // 2**64]
            cuts.append(places[top] if drawn in cuts else drawn)
        for start, end in pairwise([0, *sorted(cuts), length]):
            parts.append((document, [*range(first + start, first + end)]))
        first += length
    words = [int(source.random_raw()) for _ in parts]
    documents = [parts[part][0] for _, part in sorted(zip(words, range(len(parts)), strict=True))]
    queues = {document: [tokens for owner, tokens in parts if owner == document] for document in documents}
    row_of_tokens, owners = [], []
    for document in documents:
        tokens = queues[document].pop(0)
        row_of_tokens += tokens
        owners += [document] * len(tokens)
    runs = [(document, len(list(run))) for document, run in groupby(owners)]
    return Interleaved(np.array(row_of_tokens), [length for _, length in runs], [owner for owner, _ in runs])


@given(rows_of_lengths, any_settings(), st.integers(0, 10**6))
def test_it_equals_a_naive_loop(lengths: list[int], settings: InterleaveSettings, row: int) -> None:
    found = interleave(lengths, settings, row)
    expected = interleaved_token_by_token(lengths, settings, row)
    assert found.order.tolist() == expected.order.tolist()
    assert found.segment_lengths == expected.segment_lengths
    assert found.segment_documents == expected.segment_documents


def test_every_set_of_cuts_is_as_likely() -> None:
    """Exact: over all values that the words can stand for, each set comes out as often."""
    for population in range(8):
        for count in range(population + 1):
            draws = Counter(
                tuple(_distinct(population, count, words)) for words in words_for(population, count)
            )
            assert sorted(draws) == list(combinations(range(population), count))
            assert len(set(draws.values())) == 1
            assert len(draws) == comb(population, count)


def words_for(population: int, count: int) -> list[list[int]]:
    """Words that stand for each combination of numbers below population - count + 1, …, population."""
    found: list[list[int]] = [[]]
    for limit in range(population - count + 1, population + 1):
        # In the middle of the stretch of words that all give the same number below the limit.
        found = [[*words, ((2 * n + 1) << 63) // limit] for words in found for n in range(limit)]
    return found


@pytest.mark.slow
def test_every_arrangement_is_as_likely() -> None:
    """Bernstein: |X - np| < t but for a chance of 2·exp(-t²/(2(np(1-p) + t/3))), over all arrangements."""
    settings = InterleaveSettings(
        min_length=3, max_length=3, parts=(2,), cut_points=(0.5, 0.8)
    )  # the document of 3 tokens is cut after the second
    lengths = [1, 3, 2]
    parts = [[0], [1, 2], [3], [4, 5]]
    expected = {
        tuple(token for part in order for token in parts[part])
        for order in permutations(range(4))
        if order.index(1) < order.index(2)
    }
    assert len(expected) == 12
    n = 12_000
    found = Counter(tuple(interleave(lengths, settings, row).order.tolist()) for row in range(n))
    assert set(found) == expected
    p = 1 / 12
    surprise = log(2 * 12 / CHANCE)
    t = surprise / 3 + sqrt((surprise / 3) ** 2 + 2 * surprise * n * p * (1 - p))
    assert all(abs(count - n * p) <= t for count in found.values())


def test_parts_and_cut_points_are_uniform() -> None:
    """Dvoretzky-Kiefer-Wolfowitz: a distribution function is within t but for a chance of 2·exp(-2nt²)."""
    n = 40_000
    words = np.random.Philox(np.random.SeedSequence(0)).random_raw(3 * n).reshape(n, 3).tolist()
    parts = [_part_lengths(100, InterleaveSettings(), own) for own in words]
    assert {sum(own) for own in parts} == {100}
    assert_distributed([len(own) for own in parts], {2: 0.5, 3: 0.5})
    assert_distributed([own[0] for own in parts if len(own) == 2], dict.fromkeys(range(20, 81), 1 / 61))
    # Of two distinct cuts the lesser is 20 + x in 60 - x of the pairs, and the greater 80 - x.
    pairs = {x: (60 - x) / comb(61, 2) for x in range(61)}
    three = [own for own in parts if len(own) == 3]
    assert_distributed([own[0] for own in three], {20 + x: p for x, p in pairs.items()})
    assert_distributed([100 - own[2] for own in three], {80 - x: p for x, p in pairs.items()})


def assert_distributed(found: list[int], expected: dict[int, float]) -> None:
    counts = Counter(found)
    assert set(counts) == {value for value, chance in expected.items() if chance}
    gaps = [counts[value] / len(found) - expected[value] for value in sorted(expected)]
    assert np.abs(np.cumsum(gaps)).max() <= sqrt(log(2 / CHANCE) / (2 * len(found)))


def test_each_document_has_cuts_of_its_own() -> None:
    """200 documents would take 29 of 61 places with a chance of at most comb(61, 29) · (29 / 61)^200."""
    settings = InterleaveSettings(parts=(2,))
    found = parts_of(interleave([100] * 200, settings, 0))
    firsts = {found[document][0][1] for document in found if len(found[document]) == 2}
    assert len(firsts) >= 30


@given(rows_of_lengths, rows_of_lengths, any_settings())
def test_what_becomes_of_a_document_does_not_hang_on_the_others(
    lengths: list[int], others: list[int], settings: InterleaveSettings
) -> None:
    """Cuts can merge again after the shuffle, so those that both rows show must be the same ones."""
    first = parts_of(interleave([lengths[0], *others], settings, 0))[0]
    second = parts_of(interleave(lengths, settings, 0))[0]
    cuts = [{start for start, _ in parts[1:]} for parts in (first, second)]
    assert len(cuts[0] | cuts[1]) < max(settings.parts)


@pytest.mark.parametrize(("length", "parts"), [(63, 1), (64, 3), (2048, 3), (2049, 1)])
def test_documents_outside_the_range_stay_whole(length: int, parts: int) -> None:
    settings = InterleaveSettings(parts=(3,))
    segments = [parts_of(interleave([length, *[3000] * 40], settings, row)) for row in range(20)]
    assert max(len(found[0]) for found in segments) == parts
    assert all(len(found[document]) == 1 for found in segments for document in range(1, 41))


@pytest.mark.parametrize(
    ("length", "shares", "parts"),
    [
        (1, (0, 1), 1),
        (2, (0, 1), 2),
        (3, (0, 1), 3),
        (9, (0, 1), 5),
        (10, (0.41, 0.44), 1),
        (10, (0.4, 0.5), 3),
    ],
)
def test_too_few_places_give_fewer_parts(length: int, shares: tuple[float, float], parts: int) -> None:
    settings = InterleaveSettings(
        min_length=1, max_length=9 if length == 9 else 2048, parts=(5,), cut_points=shares
    )
    words = np.random.Philox(np.random.SeedSequence(length)).random_raw(5).tolist()
    own = _part_lengths(length, settings, words)
    assert (len(own), sum(own), min(own) >= 1) == (parts, length, True)


@pytest.mark.parametrize(
    ("lengths", "row", "message"),
    [
        ([], 0, r"at least one document in the row, got none"),
        ([3, 0], 0, r"at least 1 token, got 0"),
        ([3, -2], 0, r"at least 1 token, got -2"),
        ([3], -1, r"row must be 0 or more, got -1"),
    ],
)
def test_bad_arguments_are_named(lengths: list[int], row: int, message: str) -> None:
    with pytest.raises(RopewalkError, match=message):
        interleave(lengths, InterleaveSettings(), row)


small_rows = st.lists(st.integers(1, 20), min_size=2, max_size=6)
"""At most 121 tokens with the anchor, as in the float64 comparisons of engines with each other."""


def interleaved_row(
    lengths: list[int], pattern: str, row: int
) -> tuple[PackedLayout, PackedLayout, torch.Tensor]:
    """The layouts before and after, and for each place after the token before, the anchor included."""
    result = interleave(lengths, InterleaveSettings(min_length=4), row)
    before = PackedLayout.from_lengths(lengths, pattern, 1)
    after = PackedLayout.from_segments(result.segment_lengths, result.segment_documents, pattern, 1)
    return before, after, torch.from_numpy(np.concatenate([[0], result.order + 1]))


def table(tokens: int) -> list[torch.Tensor]:
    """Query, key and value of each token, whatever its place: no RoPE."""
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, heads, tokens, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("engine", ["sdpa", "reference"])
@pytest.mark.parametrize("pattern", ["anchor", "intra_document"])
@given(lengths=small_rows, row=st.integers(0, 1000))
@example(lengths=[20, 33, 5], row=0)
def test_a_document_attends_as_in_the_row_that_is_not_interleaved(
    pattern: str, engine: str, lengths: list[int], row: int
) -> None:
    before, after, token = interleaved_row(lengths, pattern, row)
    qkv = table(before.total_length)
    expected = attend(*qkv, before, engine=engine)
    found = attend(*(x[:, :, token] for x in qkv), after, engine=engine)
    # Two float64 evaluations of sums over at most 34 terms of size 1, in the same order of terms.
    torch.testing.assert_close(found[:, :, after.document_order], expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(found, expected[:, :, token], rtol=0, atol=1e-13)


@pytest.mark.parametrize("engine", ["sdpa", "reference"])
@pytest.mark.parametrize("pattern", PATTERNS)
@given(lengths=small_rows, row=st.integers(0, 1000))
@example(lengths=[20, 33, 5], row=0)
def test_interleaved_rows_attend_as_their_mask_says(
    pattern: str, engine: str, lengths: list[int], row: int
) -> None:
    _, after, token = interleaved_row(lengths, pattern, row)
    qkv = [x[:, :, token] for x in table(len(token))]
    found = attend(*qkv, after, engine=engine)
    torch.testing.assert_close(found, oracle_attention(*qkv, [after]), rtol=0, atol=1e-13)
    errors = attention_errors(
        lambda *single: attend(*single, after, engine=engine), *(x.float() for x in qkv), [after]
    )
    assert errors.worst_share <= 1, errors


def test_under_full_the_order_of_storage_is_seen() -> None:
    before, after, token = interleaved_row([20, 33, 5], "full", 0)
    assert after.is_interleaved
    qkv = table(before.total_length)
    moved = attend(*(x[:, :, token] for x in qkv), after, engine="sdpa")
    assert (moved - attend(*qkv, before, engine="sdpa")[:, :, token]).abs().max() > 1e-3


@given(lengths=small_rows, row=st.integers(0, 1000), pattern=st.sampled_from(PATTERNS))
def test_every_token_keeps_its_target(lengths: list[int], row: int, pattern: str) -> None:
    before, after, token = interleaved_row(lengths, pattern, row)
    input_ids = torch.arange(10, 10 + before.total_length)
    expected = next_token_labels(input_ids, before)[token]
    assert torch.equal(next_token_labels(input_ids[token], after), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["flex", "varlen"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gpu_engines_attend_as_the_mask_of_an_interleaved_row_says(pattern: str, engine: str) -> None:
    _, after, token = interleaved_row([500, 33, 5, 300, 185], pattern, 0)
    assert after.is_interleaved
    generator = torch.Generator().manual_seed(0)
    qkv = [
        torch.randn(1, heads, len(token), 64, generator=generator).to("cuda", torch.bfloat16)
        for heads in (4, 2, 2)
    ]
    errors = attention_errors(lambda *half: attend(*half, after, engine=engine), *qkv, [after])
    assert errors.worst_share <= 1, errors
