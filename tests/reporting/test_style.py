"""Numbers, lengths, shifts, bases and shares are written short, and only where that is exact."""

import math

import numpy as np
import pytest

from ropewalk.reporting.style import (
    MOST_LINES,
    SERIES,
    base_text,
    length_text,
    number_text,
    share_text,
    shift_text,
    tokens_text,
)


def test_texts_of_numbers_and_shifts() -> None:
    numbers = (0, 2.6e-4, 11.4, 12.849, 1234.5, 1e-12, 3.21e-5, 2e6, -13.6, -2e4)
    shown = ["0", "0.00026", "11.4", "12.8", "1,234", "1e-12", "3.2e-5", "2e6", "-13.6", "-20,000"]
    assert [number_text(number) for number in numbers] == shown
    shifts = (0, 16, 999, 1000, 1500, 131_072, 100_000, 1_000_000, 2**20, 10_000_000)
    shown = ["0", "16", "999", "1k", "1.5k", "131,072", "100k", "1M", "1,048,576", "10M"]
    assert [shift_text(shift) for shift in shifts] == shown


def test_texts_of_lengths_and_bases() -> None:
    lengths = (8, 8192, 131072, 2**20, 1536, 5437)
    assert [length_text(n) for n in lengths] == ["8", "8k", "128k", "1M", "1.5k", "5,437"]
    assert [tokens_text(n) for n in (1, np.float64(2), 8192)] == ["1 token", "2 tokens", "8k tokens"]
    assert [base_text(b) for b in (1e4, 5e5, 1e6, 1.25e6)] == ["1e4", "5e5", "1e6", "1.25e6"]


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.0 %"), (1e-5, "< 0.1 %"), (0.123456, "12.3 %"), (math.nan, "–"), (None, "–")]
)
def test_a_small_share_is_not_nothing(share: float | None, text: str) -> None:
    assert share_text(share) == text


def test_no_two_lines_of_a_figure_share_a_colour_a_dash_or_a_marker() -> None:
    assert len(SERIES) == MOST_LINES == 8
    assert [len(set(kind)) for kind in zip(*SERIES, strict=True)] == [8, 8, 8]
