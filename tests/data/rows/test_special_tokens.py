"""Special tokens: BOS, EOS, tags and padding are where the policies put them, in rows written out by hand."""

import numpy as np
import pytest

from ropewalk.attention.layout import IGNORED, PATTERNS
from ropewalk.data.read.documents import TokenisedDocument
from ropewalk.data.rows.assemble import PADDING
from ropewalk.data.rows.special_tokens import PackingCounts
from ropewalk.data.rows.training_rows import training_row
from ropewalk.data.settings import PackingSettings
from ropewalk.data.tokens.tokenise import SpecialTokens
from ropewalk.errors import RopewalkError
from tests.data.cases import changed
from tests.data.rows.assemble_cases import BOS, EOS, numbered, packed


def test_a_row_of_the_anchor_pattern_by_hand() -> None:
    rows, counts = packed(
        numbered([3, 4, 2]), PackingSettings(context=8, pattern="anchor", positions="reset")
    )
    assert rows[0].input_ids.tolist() == [BOS, 10, 11, 12, EOS, 13, 14, 15]
    assert rows[0].segment_lengths == [4, 3]
    assert len(rows) == 1
    assert counts == PackingCounts(
        documents=3,
        tokens_in=9,
        document_tokens=9,
        bos_tokens=1,
        eos_tokens=3,
        tag_tokens=0,
        own_bos_tokens=0,
        padding_tokens=0,
        rows=1,
        row_tokens=8,
        remainder_tokens=5,
        remainder_documents=2,
        cut_documents=1,
        empty_documents=0,
        long_documents=0,
        dropped_tokens=0,
    )


def test_a_continuation_has_no_second_bos() -> None:
    rows, _ = packed(numbered([9]), PackingSettings(context=4, pattern="intra_document"))
    assert [row.input_ids.tolist() for row in rows] == [[BOS, 10, 11, 12], [13, 14, 15, 16]]


def test_row_bos_without_an_anchor_belongs_to_the_first_document() -> None:
    rows, _ = packed(
        numbered([1, 2]), PackingSettings(context=5, pattern="full", bos="row", eos=False, positions="reset")
    )
    assert rows == []
    rows, _ = packed(numbered([1, 3]), PackingSettings(context=5, pattern="full", bos="row", eos=False))
    assert rows[0].input_ids.tolist() == [BOS, 10, 11, 12, 13]
    assert rows[0].segment_lengths == [2, 3]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_special_tokens_that_a_document_brings_are_not_added_again(pattern: str) -> None:
    document = TokenisedDocument(np.array([BOS, 10, 11, EOS], np.int32), "a")
    rows, counts = packed([document], PackingSettings(context=4, pattern=pattern))
    assert rows[0].input_ids.tolist() == [BOS, 10, 11, EOS]
    assert (counts.bos_tokens, counts.own_bos_tokens, counts.eos_tokens, counts.document_tokens) == (
        1,
        1,
        0,
        3,
    )


def test_a_tokenizer_without_bos_gets_eos_as_anchor_and_no_document_bos() -> None:
    qwen = SpecialTokens(None, 7, 7)
    rows, _ = packed(numbered([2]), PackingSettings(context=4, pattern="anchor"), qwen)
    assert rows[0].input_ids.tolist() == [7, 10, 11, 7]
    rows, _ = packed(numbered([2]), PackingSettings(context=3, pattern="intra_document"), qwen)
    assert rows[0].input_ids.tolist() == [10, 11, 7]
    with pytest.raises(RopewalkError, match="no BOS token"):
        packed(numbered([2]), PackingSettings(context=4, pattern="full", bos="document"), qwen)
    for pattern in ("full", "intra_document"):
        with pytest.raises(RopewalkError, match="no BOS token to start a row with"):
            packed(numbered([2]), PackingSettings(context=4, pattern=pattern, bos="row"), qwen)
    with pytest.raises(RopewalkError, match="no EOS token"):
        packed(numbered([2]), PackingSettings(context=4), SpecialTokens(1, None, 1))


def test_a_tag_stands_between_bos_and_text_and_is_no_target() -> None:
    tags = [np.array([5, 6], np.int32), np.array([7], np.int32)]
    settings = PackingSettings(context=13, pattern="intra_document", tag="{source}")
    rows, counts = packed(numbered([3, 2]), settings, tags=tags)
    (row,) = packed(numbered([3, 2]), changed(settings, context=12), tags=tags)[0]
    assert row.input_ids.tolist() == [BOS, 5, 6, 10, 11, 12, EOS, BOS, 7, 13, 14, EOS]
    assert row.masked == [1, 3, 8, 9]
    labels = training_row(row, changed(settings, context=12)).labels.tolist()
    assert labels == [IGNORED, IGNORED, 10, 11, 12, EOS, IGNORED, IGNORED, 13, 14, EOS, IGNORED]
    assert rows == []
    assert counts.tag_tokens == 3


def test_a_tag_that_a_row_end_cuts_is_masked_in_both_rows() -> None:
    tags = [np.array([5, 6, 7], np.int32)] * 2
    settings = PackingSettings(context=4, pattern="intra_document", bos="none", eos=False, tag="{source}")
    rows, _ = packed(numbered([2, 3]), settings, tags=tags)
    assert [row.input_ids.tolist() for row in rows] == [[5, 6, 7, 10], [11, 5, 6, 7]]
    assert [row.masked for row in rows] == [[0, 3], [1, 4]]
    rows, _ = packed(numbered([4, 4]), settings, tags=tags)
    assert [row.input_ids.tolist() for row in rows] == [[5, 6, 7, 10], [11, 12, 13, 5], [6, 7, 14, 15]]
    assert [row.masked for row in rows] == [[0, 3], [3, 4], [0, 2]]


def test_padding_is_a_document_of_its_own_without_targets() -> None:
    settings = PackingSettings(context=8, pattern="anchor", remainder="pad")
    rows, counts = packed(numbered([3, 2]), settings)
    assert rows[0].input_ids.tolist() == [BOS, 10, 11, 12, EOS, 13, 14, EOS]
    (row,) = packed(numbered([3]), settings)[0]
    assert row.input_ids.tolist() == [BOS, 10, 11, 12, EOS, EOS, EOS, EOS]
    assert (row.segment_lengths, row.sources, row.numbers) == ([4, 3], ["source 0", ""], [0, PADDING])
    assert row.masked == [5, 8]
    assert training_row(row, settings).labels.tolist() == [IGNORED, 11, 12, EOS] + [IGNORED] * 4
    assert [training_row(each, settings).padding for each in (rows[0], row)] == [0, 3]
    assert counts.padding_tokens == 0
