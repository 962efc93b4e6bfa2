"""What a run began with is kept, and rows of a stage become runs of text without targets of another chunk."""

import pytest
import torch
from pydantic import ValidationError

from ropewalk.attention.layout import IGNORED, PackedLayout, Row, next_token_labels
from ropewalk.errors import RopewalkError
from ropewalk.training.documents import (
    ROWS,
    RunInputs,
    mixture_sentences,
    model_at_start,
    read_run_inputs,
    training_rows,
    write_run_inputs,
)

BEGAN = RunInputs(
    rows=["data/a", None], digests=["a" * 64, None], validation_sources=None, model="m", precision="float32"
)


def test_what_a_run_began_with_is_read_back_as_it_was_written(tmp_path):
    write_run_inputs(tmp_path, BEGAN)
    assert read_run_inputs(tmp_path) == BEGAN
    assert model_at_start(tmp_path) == "m"


def test_a_stage_has_its_own_rows_and_a_new_one_has_none():
    assert [BEGAN.of_stage(number) for number in range(3)] == [("data/a", "a" * 64), None, None]


def test_rows_without_a_digest_each_are_no_record():
    with pytest.raises(ValidationError, match="2 folders of rows but 1 digests"):
        RunInputs(rows=["a", "b"], digests=["c"], validation_sources=None)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rows": ["a"], "digests": [], "validation_sources": null}']
)
def test_a_damaged_record_is_refused_by_its_name(tmp_path, text):
    (tmp_path / ROWS).write_text(text)
    with pytest.raises(RopewalkError, match=ROWS):
        read_run_inputs(tmp_path)


def test_a_row_is_measured_as_one_run_of_text_and_a_target_of_another_chunk_is_none():
    """Interleaved, document 0 goes on after document 1: its last token there has a target that is not the next one."""
    layout = PackedLayout.from_lengths([4, 4], "anchor", 1)
    ids = torch.arange(10, 10 + layout.total_length)
    labels = next_token_labels(ids, layout)
    moved = labels.clone()
    moved[3] = ids[6]
    rows = [Row(ids, moved, layout), Row(ids, labels, layout)]
    first, second = training_rows(rows, layout.total_length, limit=5)
    expected = labels.clone()
    # What ends a document has no target in its layout, and keeps none.
    expected[3] = IGNORED
    assert first.labels.tolist() == expected.tolist()
    assert second.labels.tolist() == labels.tolist()
    for row in (first, second):
        assert row.layout.pattern == "full"
        assert list(row.layout.document_lengths) == [layout.total_length]
        assert torch.equal(row.input_ids, ids)
        targets = row.labels != IGNORED
        assert torch.equal(row.labels[targets], torch.roll(ids, -1)[targets])
    assert len(training_rows(rows, layout.total_length, limit=1)) == 1


def test_without_a_mixture_nothing_is_said_of_one():
    assert mixture_sentences(None) == []
