"""Rows of a dry run hold what training would pack: the recipe's documents, documents of one length, or one per row."""

import numpy as np
import pytest

from ropewalk.attention import PackedLayout
from ropewalk.attention.options import Locality
from ropewalk.data.read.embedded import EMBEDDED
from ropewalk.data.rows.pack import pack_rows
from ropewalk.data.rows.plan import plan_rows
from ropewalk.data.settings import PackConfig, PackingSettings, SourceSpec
from ropewalk.parallel.context import RunContext
from ropewalk.training.simulation import assumed_documents
from ropewalk.training.simulation.assumed_documents import Documents, documents_of
from tests.dry_run.cases import model_folder, recipe_of


def lengths_of(recipe, document_length=None):
    found = documents_of(recipe, 0, document_length, RunContext())
    packed = found.packed(recipe.stages[0])
    rows = packed.rows(packed.most_documents())
    return found.words, [row.layout.document_lengths.tolist() for row in rows]


@pytest.mark.parametrize("pattern", ["anchor", "full"])
def test_documents_of_a_given_length_fill_the_row(tmp_path, pattern):
    recipe = recipe_of(model_folder(tmp_path / "model"), pattern=pattern, rows_per_batch=2, rows_per_step=2)
    room = 512 - (pattern == "anchor")
    words, rows = lengths_of(recipe, 200)
    assert words == "documents of 200 tokens"
    assert rows == [[200, 200, room - 400]] * 2
    assert lengths_of(recipe, 10**6)[1] == [[room]] * 2


def test_without_a_tokenizer_it_says_why_rows_are_one_document(tmp_path):
    words, rows = lengths_of(recipe_of(model_folder(tmp_path / "model")))
    assert words.startswith(
        "one document per row, because the recipe's own documents cannot be read: there is no tokenizer in "
    )
    assert rows == [[511]]


def test_the_recipes_own_documents_are_packed(tmp_path):
    """The embedded documents have thousands of tokens, so rows of 2,048 hold one or a few, and each row is full."""
    recipe = recipe_of(EMBEDDED, context=2048)
    words, rows = lengths_of(recipe)
    assert "the recipe's" in words
    assert "tokens each on average" in words
    assert [sum(row) for row in rows] == [2047]


LENGTHS = (60, 150, 90, *(7, 3, 12, 5) * 20)
"""Three documents that fill one, two and more rows of 63 tokens, and 80 short ones."""


def stage_of(**changes):
    return recipe_of("embedded", **{"context": 64, **changes}).stages[0]


def mean_pairs(lengths, room, packing, pattern, locality):
    """Mean over all rows of the entries of their dense masks, without those of the anchor for later documents."""
    plan = plan_rows(np.array(lengths), room, packing, "pad")
    pairs = []
    for number in range(plan.num_rows):
        row = plan.row(number).lengths.tolist()
        row += [room - sum(row)] * (sum(row) < room)
        layout = PackedLayout.from_lengths(row, pattern, int(pattern == "anchor"))
        mask = layout.dense_mask(locality)
        merged = mask[1 + row[0] :, :1] if pattern == "anchor" else mask[:0]
        pairs.append(int(mask.sum()) - int(merged.sum()))
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("locality", [Locality(), Locality(window=9), Locality(chunk=16)], ids=str)
@pytest.mark.parametrize("pattern", ["anchor", "intra_document", "full"])
@pytest.mark.parametrize("packing", ["best_fit", "sequential"])
def test_pairs_are_the_mean_over_all_rows_whatever_was_played(locality, pattern, packing):
    stage = stage_of(pattern=pattern)
    packed = Documents("", LENGTHS, packing).packed(stage)
    mean = mean_pairs(LENGTHS, 64 - (pattern == "anchor"), packing, pattern, locality)
    for chosen in (packed.most_documents(), packed.most_pairs(), packed.typical()):
        share = packed.share_of_pairs(chosen, {locality: 3})
        assert share * packed.pairs(chosen[0], locality) == pytest.approx(mean)


def test_the_rows_that_need_most_do_not_depend_on_the_order_of_the_documents():
    stage = stage_of(rows_per_batch=2, rows_per_step=2)
    first, last = (Documents("", order).packed(stage) for order in (LENGTHS, LENGTHS[::-1]))
    for packed in (first, last):
        assert [packed.lengths[number] for number in packed.most_pairs()] == [(63,), (63,)]
    most = max(map(len, first.lengths))
    assert most == max(map(len, last.lengths)) > 5
    assert (
        len(first.lengths[first.most_documents()[0]]) == len(last.lengths[last.most_documents()[0]]) == most
    )
    mean = sum(map(first.pairs, range(len(first.lengths)))) / len(first.lengths)
    assert sum(map(last.pairs, range(len(last.lengths)))) / len(last.lengths) == pytest.approx(mean, rel=0.02)
    nearest = min(abs(first.pairs(number) - mean) for number in range(len(first.lengths)))
    assert abs(first.pairs(first.typical()[0]) - mean) == nearest


def test_windows_and_layers_weigh_by_their_number():
    packed = Documents("", LENGTHS).packed(stage_of())
    (chosen,) = packed.most_pairs()
    layers = {Locality(): 1, Locality(window=9): 5}

    def weighted(number):
        return packed.pairs(number) + 5 * packed.pairs(number, Locality(window=9))

    mean = sum(map(weighted, range(len(packed.lengths)))) / len(packed.lengths)
    assert packed.share_of_pairs([chosen], layers) == pytest.approx(mean / weighted(chosen))


@pytest.mark.slow
@pytest.mark.parametrize(
    "interleave", [None, {"min_length": 16, "max_length": 512}], ids=["plain", "interleaved"]
)
def test_a_folder_gives_an_even_sample_of_its_rows(tmp_path, monkeypatch, interleave):
    config = PackConfig(
        sources=(SourceSpec(path="embedded:validation"),),
        tokenizer=EMBEDDED,
        rows=PackingSettings(context=512, interleave=interleave),
        work={"workers": 1},
    )
    rows = pack_rows(config, tmp_path / "rows")
    packed = Documents("", folder=str(tmp_path / "rows")).packed(stage_of(context=512))
    assert packed.numbers == tuple(range(len(rows)))
    for number, lengths in enumerate(packed.lengths):
        assert lengths == tuple(rows[number].layout.document_lengths.tolist())
        # The anchor belongs to the first document's run; that every other token sees it takes no kernel.
        merged = sum(lengths[1:])
        assert packed.pairs(number) == int(rows[number].layout.dense_mask().sum()) - merged
    (chosen,) = packed.typical()
    assert packed.rows([chosen])[0].layout.cu_seqlens.equal(rows[chosen].layout.cu_seqlens)
    monkeypatch.setattr(assumed_documents, "SAMPLED_ROWS", 3)
    sampled = Documents("", folder=str(tmp_path / "rows")).packed(stage_of(context=512))
    assert sampled.numbers == (0, (len(rows) - 1) // 2, len(rows) - 1)


def test_short_rows_count_by_their_share():
    stage = stage_of(pattern="full", short_rows=0.25, steps=4)
    packed = Documents("", LENGTHS, short_length=32).packed(stage)
    long, short = packed.lengths, packed.short.lengths
    # The long documents alone, in rows that are filled up: 60 + 150 + 90 tokens take five.
    assert [sum(row) for row in long] == [64] * 5
    # 80 documents of 540 tokens, and padding as one more.
    assert sum(each in (7, 3, 12, 5) for row in short for each in row) >= 80
    of_long = 64 * 65 // 2
    of_short = [sum(n * (n + 1) // 2 for n in row) for row in short]
    mean = 0.75 * of_long + 0.25 * sum(of_short) / len(short)
    for chosen in (packed.most_documents(), packed.most_pairs(), packed.typical()):
        assert packed.share_of_pairs(chosen, {Locality(): 2}) * packed.pairs(chosen[0]) == pytest.approx(mean)
    (fullest,), (longest,) = (packed.rows(each) for each in (packed.most_documents(), packed.most_pairs()))
    assert (fullest.layout.pattern, longest.layout.pattern) == ("intra_document", "full")
    assert fullest.layout.rope_length <= 32 < longest.layout.rope_length


def test_without_documents_short_rows_are_as_full_as_they_may_be():
    stage = stage_of(pattern="full", short_rows=0.5, steps=4)
    packed = Documents("one per row", short_length=32).packed(stage)
    assert (packed.lengths, packed.short.lengths) == (((64,),), ((32, 32),))
    # Without a length, as where the stage has none.
    assert Documents("one per row", short_length=32).packed(stage_of(pattern="full")).short is None


def test_the_words_of_a_plan_name_the_share(tmp_path):
    recipe = recipe_of(EMBEDDED, context=2048, short_rows=0.5, steps=4)
    found = documents_of(recipe, 0, None, RunContext(), 256)
    assert found.words.endswith("; 50% of the rows have only documents of at most 256 tokens")
    packed = found.packed(recipe.stages[0])
    assert max(map(max, packed.short.lengths)) <= 2048
    assert packed.short_share == 0.5
