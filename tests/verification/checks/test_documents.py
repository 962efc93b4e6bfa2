"""Documents of a packed row have the losses that they have alone."""

import pytest

from ropewalk.attention.layout import PackedLayout
from ropewalk.verification.checks.documents import packed_equals_separate
from ropewalk.verification.checks.labels import labels_of_rows
from tests.verification.verification_cases import with_layouts


@pytest.mark.parametrize("pattern", ["anchor", "intra_document"])
@pytest.mark.parametrize("positions", ["continuous", "reset"])
def test_interleaved_rows_are_their_documents(case, pattern, positions):
    layout = PackedLayout.from_segments([9, 14, 3, 10, 11], [1, 0, 2, 1, 0], pattern, 1, positions)
    interleaved = with_layouts(case, [layout] * len(case.rows))
    assert packed_equals_separate(interleaved).passed
    assert labels_of_rows(interleaved).passed


def test_pattern_full_has_nothing_apart(case):
    layout = PackedLayout.from_lengths([case.length], "full", anchor_length=0)
    outcome = packed_equals_separate(with_layouts(case, [layout] * len(case.rows)))
    assert outcome.passed is None
    assert "pattern full" in outcome.note
