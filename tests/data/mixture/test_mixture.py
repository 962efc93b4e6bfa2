"""A mixture draws what was asked for, to the document, and says no where it cannot."""

import json
import math
import re
from collections import Counter
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ropewalk.data.mixture.mixture import Mixture, mix
from ropewalk.data.mixture.report import explain
from ropewalk.data.mixture.settings import MixtureSettings
from ropewalk.errors import RopewalkError
from tests.data.cases import changed

NAMES = ("arxiv", "wiki", "books")


# The naive oracle: exact fractions, one document at a time.


def documents_of(lengths: list[int], ids: list[int], source: int, first: int, end: int | None) -> list[int]:
    return [
        document
        for document, length in enumerate(lengths)
        if ids[document] == source and length > 0 and first <= length and (end is None or length < end)
    ]


def bins_of(settings: MixtureSettings) -> list[tuple[int, int | None]]:
    if settings.length_shares is not None:
        starts = [start for start, _ in settings.length_shares]
    else:
        starts = [0] if settings.long_from is None else [0, settings.long_from]
    return list(zip(starts, [*starts[1:], None], strict=True))


def budgets_of(tokens: list[int], settings: MixtureSettings) -> list[Fraction]:
    """Tokens asked of each source of NAMES."""
    if settings.shares is not None:
        whole = sum(Fraction(share) for share in settings.shares.values())
        shares = [Fraction(settings.shares[name]) / whole for name in NAMES]
        total = Fraction(settings.tokens) if settings.tokens is not None else None
        if total is None:
            total = min(there / share for there, share in zip(tokens, shares, strict=True) if share)
        return [share * total for share in shares]
    weights = [Fraction((settings.weights or {}).get(name, 1)) for name in NAMES]
    given = [weight * there for weight, there in zip(weights, tokens, strict=True)]
    scale = Fraction(1) if settings.tokens is None else settings.tokens / sum(given)
    return [scale * tokens for tokens in given]


def bin_shares_of(tokens: list[int], settings: MixtureSettings) -> list[Fraction]:
    """The share of each bin in a source whose bins hold ``tokens``."""
    if settings.length_shares is not None:
        whole = sum(Fraction(share) for _, share in settings.length_shares)
        return [Fraction(share) / whole for _, share in settings.length_shares]
    if settings.long_share is not None:
        return [1 - Fraction(settings.long_share), Fraction(settings.long_share)]
    if settings.long_factor is not None:
        factor, long = Fraction(settings.long_factor), Fraction(tokens[1], sum(tokens))
        share = factor * long / (factor * long + 1 - long)
        return [1 - share, share]
    return [Fraction(1)]


def drawn_by_hand(members: list[int], lengths: list[int], goal: int, seed: int, unit: int) -> Counter[int]:
    there = sum(lengths[member] for member in members)
    drawn = Counter(dict.fromkeys(members, goal // there))
    words = np.random.Philox(np.random.SeedSequence([seed, unit, 0x6D697831])).random_raw(len(members))
    shuffled = [member for _, member in sorted(zip(words.tolist(), members, strict=True))]
    misses = [
        abs(sum(lengths[m] for m in shuffled[:count]) - goal % there) for count in range(len(members) + 1)
    ]
    drawn.update(shuffled[: misses.index(min(misses))])
    return +drawn


def cells_by_hand(lengths: list[int], ids: list[int], settings: MixtureSettings) -> list[list[list[int]]]:
    return [
        [documents_of(lengths, ids, s, first, end) for first, end in bins_of(settings)]
        for s in range(len(NAMES))
    ]


def mixed(lengths: list[int], ids: list[int], settings: MixtureSettings) -> Mixture:
    return mix(np.array(lengths, np.int64), np.array(ids, np.int32), NAMES, settings)


def tokens_of(members: list[int], lengths: list[int]) -> int:
    return sum(lengths[member] for member in members)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths and source ids; every source has a short document (under 10) and a long one."""
    lengths = draw(st.lists(st.integers(0, 40), max_size=30))
    ids = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    ends = [(length, s) for s in range(3) for length in (draw(st.integers(1, 9)), draw(st.integers(10, 40)))]
    return lengths + [length for length, _ in ends], ids + [s for _, s in ends]


portions = st.floats(0, 5, allow_subnormal=False)
some_lengths_asked = st.one_of(
    st.fixed_dictionaries({"long_from": st.just(10), "long_factor": st.floats(0.05, 20)}),
    st.fixed_dictionaries({"long_from": st.just(10), "long_share": st.floats(0.01, 0.99)}),
    st.builds(lambda a, b: {"length_shares": ((0, a), (10, b))}, portions, st.floats(0.1, 5)),
)
lengths_asked = st.one_of(st.just({}), some_lengths_asked)
shares_asked = st.builds(
    lambda a, b, c: {"shares": dict(zip(NAMES, (a, b, c), strict=True))},
    st.floats(0.1, 5),
    st.one_of(st.just(0.0), st.floats(0.1, 5)),
    st.floats(0.1, 5),
)
sources_asked = st.one_of(
    st.just({}),
    st.builds(lambda weights: {"weights": weights}, st.dictionaries(st.sampled_from(NAMES[:2]), portions)),
    shares_asked,
)


@st.composite
def sparse_corpora(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """As corpora, but any source may want for short documents, long ones or both."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
    return lengths, draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))


@st.composite
def asked_for(
    draw: st.DrawFn,
    by_length: st.SearchStrategy[dict[str, Any]] = lengths_asked,
    by_source: st.SearchStrategy[dict[str, Any]] = sources_asked,
) -> MixtureSettings:
    values: dict[str, Any] = {**draw(by_length), **draw(by_source)}
    if draw(st.booleans()):
        values["tokens"] = draw(st.integers(1, 3000))
    return MixtureSettings(
        **values,
        # In eighths, so that the oracle's fractions and float64 agree on the cap.
        max_epochs=draw(st.integers(8, 48)) / 8,
        shortage=draw(st.sampled_from(("refuse", "cap"))),
        shuffle=True,
        seed=draw(st.integers(0, 2**40)),
    )


@given(corpora(), asked_for())
def test_each_cell_is_asked_for_what_the_formulas_say(
    corpus: tuple[list[int], list[int]], settings: MixtureSettings
) -> None:
    lengths, ids = corpus
    report = mixed(lengths, ids, changed(settings, shortage="cap")).report
    cells = cells_by_hand(lengths, ids, settings)
    bins = len(bins_of(settings))
    tokens = [[tokens_of(members, lengths) for members in row] for row in cells]
    budgets = budgets_of([sum(row) for row in tokens], settings)
    for s, row in enumerate(tokens):
        for b, share in enumerate(bin_shares_of(row, settings)):
            cell, exact = report.cells[s * bins + b], budgets[s] * share
            # Half a token of rounding, and a handful of float64 roundings of 2**-53 each.
            assert abs(cell.asked - exact) <= Fraction(1, 2) + exact / 2**49
            assert (cell.documents, cell.available) == (len(cells[s][b]), row[b])
            assert cell.epochs_asked == cell.asked / row[b]
    assert abs(report.tokens_asked - sum(budgets)) <= Fraction(1, 2) + sum(budgets) / 2**49


@given(corpora(), asked_for())
def test_each_cell_draws_what_a_loop_draws(
    corpus: tuple[list[int], list[int]], settings: MixtureSettings
) -> None:
    lengths, ids = corpus
    mixture = mixed(lengths, ids, changed(settings, shortage="cap"))
    cells, bins = cells_by_hand(lengths, ids, settings), len(bins_of(settings))
    expected: Counter[int] = Counter()
    for s in range(len(NAMES)):
        missed = 0
        for b in reversed(range(bins)):
            there = tokens_of(cells[s][b], lengths)
            asked = min(
                mixture.report.cells[s * bins + b].asked, math.ceil(Fraction(settings.max_epochs) * there)
            )
            if asked:
                # The most that whole copies up to the epochs asked for can give.
                goal = max(0, min(asked + missed, math.ceil(Fraction(asked, there)) * there))
                drawn = drawn_by_hand(cells[s][b], lengths, goal, settings.seed, s * bins + b)
                missed += asked - sum(lengths[document] * times for document, times in drawn.items())
                expected += drawn
    assert Counter(mixture.documents.tolist()) == expected


@given(corpora(), asked_for())
def test_no_document_is_read_more_often_than_its_cell_rounded_up(
    corpus: tuple[list[int], list[int]], settings: MixtureSettings
) -> None:
    lengths, ids = corpus
    mixture = mixed(lengths, ids, changed(settings, shortage="cap"))
    times = Counter(mixture.documents.tolist())
    cells = [members for row in cells_by_hand(lengths, ids, settings) for members in row]
    for cell, members in zip(mixture.report.cells, cells, strict=True):
        most = max(times[member] for member in members)
        assert cell.most_read == most <= min(math.ceil(cell.epochs_asked), math.ceil(settings.max_epochs))
        assert most - min(times[member] for member in members) <= 1


@given(corpora(), asked_for())
def test_the_report_adds_up_and_is_plain_json(
    corpus: tuple[list[int], list[int]], settings: MixtureSettings
) -> None:
    lengths, ids = corpus
    mixture = mixed(lengths, ids, changed(settings, shortage="cap"))
    report, times = mixture.report, Counter(mixture.documents.tolist())
    drawn = [lengths[document] for document in mixture.documents.tolist()]
    assert report.tokens_achieved == sum(drawn) == sum(cell.drawn for cell in report.cells)
    assert report.tokens_available == sum(lengths) == sum(cell.available for cell in report.cells)
    assert report.empty_documents == lengths.count(0)
    assert (report.documents, report.distinct_documents) == (len(drawn), len(times))
    assert report.repeated_documents == sum(count > 1 for count in times.values())
    assert report.most_read == max(times.values(), default=0)
    for s, source in enumerate(report.sources):
        own = [lengths[document] for document in mixture.documents.tolist() if ids[document] == s]
        assert source.share_achieved == (sum(own) / sum(drawn) if drawn else 0)
        if report.long_from is not None and own:
            assert source.long_achieved == sum(length for length in own if length >= 10) / sum(own)
    assert json.loads(json.dumps(asdict(report), allow_nan=False))["documents"] == len(drawn)
    assert all(sentence.endswith(".") for sentence in explain(report))


@given(corpora(), asked_for(some_lengths_asked, st.just({})))
def test_corpus_wide_lengths_draw_as_if_there_were_one_source(
    corpus: tuple[list[int], list[int]], settings: MixtureSettings
) -> None:
    lengths, ids = corpus
    settings = changed(settings, per="corpus", shortage="cap")
    ours = mixed(lengths, ids, settings)
    alone = mixed(lengths, [0] * len(ids), changed(settings, per="source"))
    assert ours.documents.tolist() == alone.documents.tolist()
    assert ours.report.total.long_achieved == alone.report.total.long_achieved
    bins = len(bins_of(settings))
    for cell, position in zip(ours.report.cells, range(3 * bins), strict=True):
        whole = alone.report.cells[position % bins]
        assert cell.asked == pytest.approx(whole.asked * cell.available / whole.available, abs=0.5 + 1e-9)
    assert {source.share_asked for source in ours.report.sources} == {None}
    assert {source.long_asked for source in ours.report.sources} == {None}


CAP = "set shortage (--shortage) to cap and use only the available tokens"


def advised(message: str, settings: MixtureSettings) -> dict[str, list[dict[str, Any]]]:
    """Each piece of a refusal's advice, and the changes of settings that a reader would make for it."""
    reason, advice = message.rsplit("; ", 1)
    changes: dict[str, list[dict[str, Any]]] = {}
    for piece in advice.replace(", or ", ", ").split(", "):
        if piece == CAP:
            found = [{"shortage": "cap"}]
        elif piece == "set per (--per) to corpus to request the lengths from all sources together":
            found = [{"per": "corpus"}]
        elif (
            piece
            == "set long_factor instead of long_share (long_factor does not require long documents in every source)"
        ):
            found = [{"long_factor": 1, "long_share": None}]
        elif piece == "set the share of these lengths in length_shares to 0":
            assert settings.length_shares is not None
            wanting = 0 if "of fewer than" in reason else 10
            found = [
                {
                    "length_shares": tuple(
                        (at, share * (at != wanting)) for at, share in settings.length_shares
                    )
                }
            ]
        elif match := re.fullmatch(r"set the mixture's tokens \(--total-tokens\) to (\d+) or less", piece):
            found = [{"tokens": tokens} for tokens in {int(match[1]), max(1, int(match[1]) // 2)}]
        else:
            match = re.fullmatch(r"raise max_epochs \(--max-epochs\) to (\S+) or more", piece)
            assert match is not None, piece
            found = [{"max_epochs": float(match[1])}, {"max_epochs": float(match[1]) + 1}]
        changes[piece] = found
    return changes


def refused(lengths: list[int], ids: list[int], settings: MixtureSettings) -> str | None:
    try:
        mixed(lengths, ids, settings)
    except RopewalkError as error:
        return str(error)
    return None


@given(st.one_of(corpora(), sparse_corpora()), asked_for())
def test_every_piece_of_advice_fits_by_itself(
    corpus: tuple[list[int], list[int]], settings: MixtureSettings
) -> None:
    lengths, ids = corpus
    settings = changed(settings, shortage="refuse")
    message = refused(lengths, ids, settings)
    if message is None:
        assert mixed(lengths, ids, settings).report.shortages == ()
        return
    if re.search(r"no tokens for its share|select no tokens|; change long_from or length_shares$", message):
        return
    for piece, changes in advised(message, settings).items():
        for change in changes:
            report = mixed(lengths, ids, changed(settings, **change)).report
            assert change.get("shortage") == "cap" or report.shortages == (), piece


def test_what_fits_is_the_most_that_fits() -> None:
    lengths, ids = [100] * 40 + [1000] * 2, [0] * 42
    base = MixtureSettings(long_from=1000, long_factor=50, max_epochs=2)
    with pytest.raises(
        RopewalkError,
        match=r"; set the mixture's tokens \(--total-tokens\) to 4160 or less, raise max_epochs \(--max-epochs\) to "
        r"2\.885 or more, or set shortage \(--shortage\) to cap",
    ):
        mixed(lengths, ids, base)
    assert mixed(lengths, ids, changed(base, tokens=4160)).report.shortages == ()
    for more in ({"tokens": 4165}, {"max_epochs": 2.88}):
        with pytest.raises(RopewalkError, match=r"; set the mixture's tokens "):
            mixed(lengths, ids, changed(base, **more))
    # The cell that would repeat most decides, whichever source it is of.
    with pytest.raises(
        RopewalkError, match=r"source 'wiki' .* set the mixture's tokens .* to 975 or less, raise max"
    ):
        mixed([100] * 4, [0, 1, 1, 1], MixtureSettings(weights={"wiki": 4}, max_epochs=3))


def test_what_no_setting_takes_is_not_offered() -> None:
    # Ten million epochs, where max_epochs goes up to one million.
    with pytest.raises(
        RopewalkError, match=r"; set the mixture's tokens .* to 400 or less, or set shortage .* to cap"
    ):
        mixed([100], [0], MixtureSettings(tokens=10**9))


def long_books_and_short_notes() -> tuple[list[int], list[int], MixtureSettings]:
    settings = MixtureSettings(length_shares=((0, 0.2), (10, 0.3), (100, 0.5)))
    return [200] * 4 + [50] * 10 + [5] * 100, [0] * 4 + [1] * 10 + [2] * 100, settings


def test_lengths_that_a_source_lacks_are_had_per_corpus() -> None:
    lengths, ids, settings = long_books_and_short_notes()
    with pytest.raises(
        RopewalkError,
        match=r"^source 'arxiv' has no document of fewer than 10 tokens, "
        r"but the mixture requests 160 tokens from such documents; "
        r"set per \(--per\) to corpus to request the lengths from all sources together, or set shortage .* to cap .*$",
    ):
        mixed(lengths, ids, settings)
    report = mixed(lengths, ids, changed(settings, per="corpus")).report
    assert report.shortages == ()
    # 0.3 and 0.2 of 1800 tokens; of the long ones 900 are nearest to 800 or 1000, as a document has 200.
    assert report.total.long_asked == 0.5
    assert [cell.asked for cell in report.cells if cell.available] == [900, 540, 360]
    # With fewer books the corpus has not enough either.
    with pytest.raises(RopewalkError, match=r"from such documents; set shortage .* to cap"):
        mixed(lengths[3:], ids[3:], changed(settings, max_epochs=2))
    with pytest.raises(
        RopewalkError, match=r"'wiki' has no document of fewer than 10 .*; set shortage .* to cap"
    ):
        mixed(lengths[4:], ids[4:], changed(settings, max_epochs=9))
    with pytest.raises(
        RopewalkError,
        match=r"of 100 tokens or more, .* set the share of these lengths in length_shares to 0, or set shortage .*cap",
    ):
        mixed(
            [50] * 10 + [5] * 100,
            [0] * 110,
            changed(settings, length_shares=((0, 1), (10, 0), (100, 1)), tokens=2000),
        )


def test_lengths_that_a_source_lacks_are_a_shortage_under_a_cap() -> None:
    lengths, ids, settings = long_books_and_short_notes()
    report = mixed(lengths, ids, changed(settings, shortage="cap")).report
    assert [cell.drawn for cell in report.cells] == [0, 0, 400, 0, 150, 0, 100, 0, 0]
    assert report.shortages[0] == (
        "Source 'arxiv' has no document of fewer than 10 tokens, but the mixture requests 160 tokens from such "
        "documents; these tokens are missing."
    )
    assert len(report.shortages) == 6
    assert [cell.epochs_asked for cell in report.cells[:2]] == [0, 0]
    # Said once, and not again as a cell of no documents.
    two = MixtureSettings(length_shares=((0, 1), (100, 1)), shortage="cap")
    sentences = explain(mixed(lengths, ids, two).report)
    assert [sentence for sentence in sentences if " has 0 documents" in sentence] == []
    assert sum("no document of" in sentence for sentence in sentences) == 3
    # Of the corpus too, where no source can be asked for what there is none of.
    corpus = changed(settings, shortage="cap", per="corpus")
    report = mixed(lengths[4:], ids[4:], corpus).report
    assert report.shortages == (
        "The corpus has no document of 100 tokens or more, but the mixture requests 500 tokens from "
        "such documents; these tokens are missing.",
    )
    assert (report.total.long_asked, report.tokens_asked, report.tokens_achieved) == (0.5, 1000, 500)
    assert all(source.share_achieved for source in report.sources[1:])


def test_a_cap_that_leaves_nothing_is_refused() -> None:
    settings = MixtureSettings(length_shares=((0, 0), (10, 1)), tokens=50, shortage="cap")
    with pytest.raises(
        RopewalkError,
        match=r"none of the 50 requested tokens are available, because no document has a requested length",
    ):
        mixed([5] * 20, [0] * 20, settings)
    with pytest.raises(
        RopewalkError,
        match=r"of 10 tokens or more, but the mixture requests 50 tokens from such documents; change long_from or",
    ):
        mixed([5] * 20, [0] * 20, changed(settings, shortage="refuse"))


def synthetic(seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Three sources of log-normal lengths, as unlike as abstracts and books."""
    words = np.random.Philox(np.random.SeedSequence([seed])).random_raw(12_000)
    uniform = (words >> np.uint64(11)).astype(np.float64).reshape(2, 6000) / 2**53
    normal = np.sqrt(-2 * np.log1p(-uniform[0])) * np.cos(2 * np.pi * uniform[1])
    ids = np.repeat(np.arange(3, dtype=np.int32), (3000, 2000, 1000))
    typical = np.array([6.0, 6.5, 7.5])[ids]
    return np.minimum(np.exp(typical + 1.2 * normal), 40_000).astype(np.int64), ids


@pytest.mark.parametrize("asked", [{"long_factor": 5.0}, {"long_share": 0.9}])
def test_per_source_upsampling_keeps_each_source_s_share(asked: dict[str, float]) -> None:
    lengths, ids = synthetic()
    settings = MixtureSettings(long_from=4096, max_epochs=30, **asked)
    mixture = mix(lengths, ids, NAMES, settings)
    for s, source in enumerate(mixture.report.sources):
        own, drawn = ids == s, mixture.documents[ids[mixture.documents] == s]
        long = lengths[own & (lengths >= 4096)].sum()
        if "long_factor" in asked:
            wanted = lengths[own].sum() * 5 * long / (5 * long + lengths[own].sum() - long)
        else:
            wanted = 0.9 * lengths[own].sum()
        got = lengths[drawn][lengths[drawn] >= 4096].sum()
        longest = lengths[own].max()
        assert wanted > long * 1.2
        assert abs(got - wanted) <= longest / 2 + 0.5
        # Short documents make up for what the long ones miss by: half of one of them, and a token a bin.
        assert abs(lengths[drawn].sum() - lengths[own].sum()) <= 4096 / 2 + 1
        assert source.share_achieved == pytest.approx(source.share_before, abs=0.005)
        assert source.share_asked == pytest.approx(source.share_before, rel=1e-4)
    assert mixture.report.tokens_asked == lengths.sum()


def test_a_long_document_is_read_factor_times_as_often_as_a_short_one() -> None:
    lengths, ids = synthetic()
    report = mix(lengths, ids, NAMES, MixtureSettings(long_from=4096, long_factor=5)).report
    for short, long in zip(report.cells[::2], report.cells[1::2], strict=True):
        assert long.epochs_asked == pytest.approx(5 * short.epochs_asked, rel=1e-3)


def test_a_target_distribution_of_lengths_is_met() -> None:
    lengths, ids = synthetic()
    settings = MixtureSettings(
        length_shares=((0, 1), (1024, 1), (8192, 2)), max_epochs=50, tokens=4_000_000, per="corpus"
    )
    mixture = mix(lengths, ids, NAMES, settings)
    drawn = lengths[mixture.documents]
    for first, end, share in ((0, 1024, 0.25), (1024, 8192, 0.25), (8192, 2**62, 0.5)):
        tokens = drawn[(drawn >= first) & (drawn < end)].sum()
        assert tokens == pytest.approx(share * 4_000_000, abs=40_000)
    assert mixture.report.total.long_asked == pytest.approx(0.5, abs=1e-6)
    assert abs(mixture.report.tokens_achieved - 4_000_000) <= 1024 / 2 + 1.5


def test_what_long_documents_miss_by_the_short_ones_make_up_for() -> None:
    # 1500 long tokens are asked for: one document of 1000 or two are as near, and one is taken.
    settings = MixtureSettings(long_from=1000, long_share=0.5, tokens=3000)
    report = mixed([1000] * 3 + [10] * 300, [0] * 303, settings).report
    assert [cell.asked for cell in report.cells[:2]] == [1500, 1500]
    assert [cell.drawn for cell in report.cells[:2]] == [2000, 1000]


def test_weights_are_epochs() -> None:
    lengths, ids = [7, 5, 9, 4, 4, 4, 4, 3], [0, 0, 0, 1, 1, 1, 1, 2]
    mixture = mixed(lengths, ids, MixtureSettings(weights={"arxiv": 2, "wiki": 0.5}))
    times = Counter(mixture.documents.tolist())
    assert [times[document] for document in range(3)] == [2, 2, 2]
    assert sorted(times[document] for document in range(3, 7)) == [0, 0, 1, 1]
    assert times[7] == 1
    none = mixed(lengths, ids, MixtureSettings(weights={"arxiv": 0}))
    assert sorted(none.documents.tolist()) == [3, 4, 5, 6, 7]
    scaled = mixed(lengths, ids, MixtureSettings(weights={"arxiv": 2, "wiki": 0.5, "books": 0}, tokens=100))
    assert [cell.asked for cell in scaled.report.cells] == [84, 16, 0]


def test_shares_without_a_total_take_the_most_that_needs_no_repeat() -> None:
    lengths, ids = [10] * 30 + [10] * 60 + [10] * 10, [0] * 30 + [1] * 60 + [2] * 10
    mixture = mixed(lengths, ids, MixtureSettings(shares={"arxiv": 3, "wiki": 3, "books": 0}))
    assert [cell.drawn for cell in mixture.report.cells] == [300, 300, 0]
    assert mixture.report.most_read == 1
    assert [source.share_asked for source in mixture.report.sources] == [0.5, 0.5, 0]


def test_a_cap_reads_no_more_and_makes_nothing_up() -> None:
    lengths, ids = [100] * 40 + [1000] * 2, [0] * 42
    settings = MixtureSettings(long_from=1000, long_share=0.9, max_epochs=2, shortage="cap")
    report = mixed(lengths, ids, settings).report
    assert [(cell.asked, cell.drawn) for cell in report.cells[:2]] == [(600, 600), (5400, 4000)]
    assert report.shortages == (
        "Source 'arxiv' has 2,000 tokens in 2 documents of 1,000 tokens or more, but the mixture requests "
        "5,400 tokens: 2.7 epochs on average, more than max_epochs 2; the documents are read 2 times, "
        "and about 1,400 tokens are missing.",
    )
    assert explain(report)[1] == report.shortages[0]


def test_as_is_hands_on_every_document_in_order() -> None:
    mixture = mixed([3, 0, 5], [2, 0, 1], MixtureSettings(max_epochs=1, seed=9))
    assert mixture.documents.tolist() == [0, 1, 2]
    assert mixture.documents.dtype == np.int64
    assert explain(mixture.report) == [
        "The mixture is the unchanged corpus: 3 documents with 8 tokens, each read once, in the order of the corpus.",
        "Without any tokens: 1 document.",
    ]
    assert [source.share_asked for source in mixture.report.sources] == [None] * 3
    assert mixed([], [], MixtureSettings()).documents.tolist() == []


@given(st.lists(st.integers(0, 5), min_size=1, max_size=50), st.integers(0, 2**40))
def test_shuffling_alone_reads_each_document_of_a_token_once(lengths: list[int], seed: int) -> None:
    assume(any(lengths))
    mixture = mixed(lengths, [0] * len(lengths), MixtureSettings(shuffle=True, seed=seed))
    assert sorted(mixture.documents.tolist()) == [d for d, length in enumerate(lengths) if length]
    assert mixture.report.total.share_asked is None


def test_the_order_is_random_and_no_release_of_numpy_changes_it() -> None:
    first = mixed([1] * 8, [0] * 8, MixtureSettings(shuffle=True, seed=7)).documents.tolist()
    assert first == [0, 1, 4, 2, 3, 5, 7, 6]
    weighted = MixtureSettings(weights={"arxiv": 2}, seed=7)
    twice = mixed([1] * 500, [0] * 500, weighted).documents
    # Copies lie apart, not one copy of all after the other: 500 of 1000 in the first half, within 5 sigma.
    assert 150 < len(set(twice[:500].tolist())) < 500
    assert twice.tolist() == mixed([1] * 500, [0] * 500, weighted).documents.tolist()
    assert twice.tolist() != mixed([1] * 500, [0] * 500, changed(weighted, seed=8)).documents.tolist()


def test_every_document_is_as_likely_to_be_in_a_subset() -> None:
    times: Counter[int] = Counter()
    for seed in range(400):
        settings = MixtureSettings(tokens=50, seed=seed)
        times.update(mixed([10] * 10, [0] * 10, settings).documents.tolist())
    # 200 each, within 5 standard deviations of a fair coin thrown 400 times.
    assert all(abs(times[document] - 200) <= 50 for document in range(10))


def test_more_tokens_draw_the_same_documents_and_more() -> None:
    lengths, ids = synthetic()
    few, many = (
        Counter(mix(lengths, ids, NAMES, MixtureSettings(tokens=tokens)).documents.tolist())
        for tokens in (1_000_000, 3_000_000)
    )
    assert few <= many


@given(asked_for())
def test_settings_survive_json(settings: MixtureSettings) -> None:
    assert MixtureSettings(**json.loads(json.dumps(settings.model_dump()))) == settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"weights": {"blogs": 1}},
            r"unknown source 'blogs' in weights; the sources are arxiv, wiki, books",
        ),
        ({"shares": {"blogs": 1}}, r"unknown source 'blogs' in shares"),
        (
            {"shares": {"arxiv": 1}},
            r"source 'wiki' is missing in shares; give each of the sources .* a share \(0 excludes a source\)",
        ),
        ({"shares": {"arxiv": 1, "wiki": 1, "books": 2}}, r"'books' has no tokens for its share of 0\.5"),
        ({"weights": {"arxiv": 0, "wiki": 0}}, r"select no tokens"),
        (
            {"long_from": 100, "long_share": 0.5},
            r"source 'wiki' has no document of 100 tokens or more, but the mixture requests 5 tokens from .*; "
            r".*long_factor",
        ),
        (
            {"length_shares": ((0, 1), (20, 1), (60, 1))},
            r"'arxiv' has no document of 20 to 59 tokens, but the mixture requests 45 .*; set shortage .* to cap",
        ),
        ({"tokens": 600}, r"4\.167 epochs on average, more than max_epochs 4; .* or set shortage .* to cap"),
    ],
)
def test_what_a_corpus_cannot_give_is_refused(values: dict[str, Any], message: str) -> None:
    lengths, ids = [10, 120, 4, 6, 4, 0], [0, 0, 1, 1, 0, 2]
    with pytest.raises(RopewalkError, match=message):
        mixed(lengths, ids, MixtureSettings(**values))


def test_a_source_of_short_documents_alone_takes_a_factor_as_it_is() -> None:
    lengths, ids = [10, 120, 4, 6, 4, 0], [0, 0, 1, 1, 0, 2]
    report = mixed(lengths, ids, MixtureSettings(long_from=100, long_factor=3)).report
    assert [(cell.asked, cell.drawn) for cell in report.cells[2:]] == [(10, 10), (0, 0), (0, 0), (0, 0)]


@pytest.mark.parametrize(
    ("lengths", "ids", "sources", "message"),
    [
        ([1, 2], [0], ["a"], r"got shapes \(2,\) and \(1,\)"),
        ([[1]], [[0]], ["a"], r"1-dimensional and equally long"),
        ([-1], [0], ["a"], r"lengths must be 0 or more, got -1"),
        ([1], [1], ["a"], r"source ids must be from 0 to 0, because the number of sources is 1, got 1"),
        ([1], [-1], ["a"], r"source ids must be from 0 to 0, because the number of sources is 1, got -1"),
        ([1], [0], ["a", "a"], r"source names must be unique, got a, a"),
    ],
)
def test_candidates_that_do_not_fit_are_refused(
    lengths: list[Any], ids: list[Any], sources: list[str], message: str
) -> None:
    with pytest.raises(RopewalkError, match=message):
        mix(np.array(lengths, np.int64), np.array(ids, np.int32), sources, MixtureSettings())


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_mixture_of_no_tokens_is_refused(lengths: list[int]) -> None:
    with pytest.raises(RopewalkError, match=r"every document is empty"):
        mixed(lengths, [0] * len(lengths), MixtureSettings(shuffle=True))
