"""Rows of a step: their kinds follow from its number, and ranks get nearly equal numbers of both."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data import (
    PackedRows,
    PackingSettings,
    TrainingRows,
)
from ropewalk.data.rows.kinds import long_kind
from ropewalk.errors import RopewalkError
from tests.data.cases import changed
from tests.data.rows.rows_cases import prepare
from tests.data.rows.test_kinds import LENGTH, ROWS, kinds

shares = st.integers(1, 99).map(lambda percent: percent / 100)


class Folder:
    """As many rows as a folder has."""

    def __init__(self, rows: int, **settings: object) -> None:
        self.rows, self.settings = rows, PackingSettings(context=64, **settings)
        self.manifest = {"inputs": 1, "specs": 2, "validation": 3}
        self.folder = Path("rows")

    def __len__(self) -> int:
        return self.rows


def training(long: int, short: int, share: float) -> TrainingRows:
    return TrainingRows(Folder(long, documents_above=9), Folder(short, documents_up_to=9), share)


@given(st.integers(1, 30), st.integers(1, 30), shares, st.integers(1, 16), st.integers(0, 99))
def test_steps_take_the_share_and_run_through_both_folders(long, short, share, rows_per_step, seed) -> None:
    rows = training(long, short, share)
    steps = [rows.of_step(step, rows_per_step, seed) for step in range(12)]
    assert all(len(step) == rows_per_step for step in steps)
    taken = [row for step in steps for row in step]
    for folder, size, wanted in (
        (rows.short, short, int(len(taken) * round(share * 100) // 100)),
        (rows.folder, long, len(taken) - int(len(taken) * round(share * 100) // 100)),
    ):
        own = [row.number for row in taken if row.folder is folder]
        assert len(own) == wanted
        # Each epoch of a folder takes each of its rows once.
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == list(range(size))
    # A step follows from its number and the seed alone.
    assert rows.of_step(7, rows_per_step, seed) == steps[7]


@given(shares, st.integers(1, 6), st.integers(1, 8), st.integers(0, 30))
def test_ranks_get_nearly_equal_numbers_of_both_kinds(share, ranks, each, step) -> None:
    rows = training(20, 20, share).of_step(step, ranks * each, 0)
    of_ranks = [Counter(row.folder.settings.kind for row in rows[rank::ranks]) for rank in range(ranks)]
    for kind in of_ranks[0]:
        counts = [found[kind] for found in of_ranks]
        assert max(counts) - min(counts) <= 1


def test_a_training_without_short_rows_is_as_before(corpus, tokenizer) -> None:
    from ropewalk.data import rows_for_step

    rows = prepare(corpus, tokenizer, ROWS)
    found = TrainingRows(rows).of_step(3, 4, 7)
    assert [row.number for row in found] == rows_for_step(3, 4, len(rows), 7)
    assert np.array_equal(TrainingRows(rows).read(found[0]).input_ids, rows[found[0].number].input_ids)


def test_folders_that_do_not_belong_together_are_refused(corpus, tokenizer, tmp_path) -> None:
    long, short = kinds(corpus, tokenizer)
    rows = TrainingRows(long, short, 0.5)
    assert all(rows.read(row).layout.rope_length for step in range(3) for row in rows.of_step(step, 4, 0))
    with pytest.raises(RopewalkError, match="divide them at one length"):
        TrainingRows(prepare(corpus, tokenizer, long_kind(ROWS, 50)), short, 0.5)
    with pytest.raises(RopewalkError, match="must have one length"):
        TrainingRows(prepare(corpus, tokenizer, long_kind(changed(ROWS, context=128), LENGTH)), short, 0.5)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "abc " * 400, "source": "a"}))
    with pytest.raises(RopewalkError, match=r"the inputs of .* differ"):
        TrainingRows(prepare(other, tokenizer, long_kind(ROWS, LENGTH)), short, 0.5)
    with pytest.raises(RopewalkError, match=r"the validation of .* differ"):
        TrainingRows(
            prepare(corpus, tokenizer, long_kind(ROWS, LENGTH), validation={"documents": 1}), short, 0.5
        )
    with pytest.raises(RopewalkError, match=r"the tag of .* differ"):
        TrainingRows(prepare(corpus, tokenizer, long_kind(changed(ROWS, tag="a"), LENGTH)), short, 0.5)


def test_a_row_whose_positions_are_of_the_other_kind_is_refused(corpus, tokenizer) -> None:
    """As when padding counted: its positions would give a short row the RoPE of long ones."""
    long, short = kinds(corpus, tokenizer)
    spoilt = PackedRows(short.folder, short.manifest)
    spoilt.settings = changed(short.settings, positions="continuous")
    rows = TrainingRows(long, spoilt, 0.5)
    with pytest.raises(
        RopewalkError, match="positions up to 255, but its folder was packed with documents of at most"
    ):
        [rows.read(row) for row in rows.of_step(0, 4, 0)]
