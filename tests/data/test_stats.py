"""Shares, lengths and histograms against counts by hand."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data import tokenised_statistics
from ropewalk.data.stats import LengthBin
from ropewalk.data.tokenise import TokenisedDocument


def tokenised(**lengths: list[int]) -> list[TokenisedDocument]:
    return [
        TokenisedDocument(np.zeros(n, np.int32), source) for source, each in lengths.items() for n in each
    ]


def test_shares_by_hand() -> None:
    statistics = tokenised_statistics(tokenised(web=[1, 2, 3], books=[90]))
    assert list(statistics.sources) == ["books", "web"]
    assert statistics.sources["books"].mixture_ratio == 0.25
    assert statistics.sources["books"].token_ratio == pytest.approx(90 / 96)
    assert statistics.sources["web"].quantiles["0.5"] == 2
    assert statistics.sources["web"].mean_length == 2
    assert statistics.sources["web"].histogram == [LengthBin(1, 2, 1, 1), LengthBin(2, 4, 2, 5)]
    assert statistics.total.quantiles["1"] == 90
    assert statistics.rows is None
    json.dumps(asdict(statistics), allow_nan=False)


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 5000), min_size=1), min_size=1))
def test_every_document_and_token_lies_in_one_bin(lengths: dict[str, list[int]]) -> None:
    statistics = tokenised_statistics(tokenised(**lengths))
    assert sum(source.mixture_ratio for source in statistics.sources.values()) == pytest.approx(1)
    for source, each in lengths.items():
        histogram = statistics.sources[source].histogram
        assert sum(b.tokens for b in histogram) == sum(each) == statistics.sources[source].tokens
        for bin_ in histogram:
            inside = [n for n in each if bin_.start <= n < bin_.end]
            assert (bin_.documents, bin_.tokens) == (len(inside), sum(inside))


def test_nothing_is_nan_rather_than_zero() -> None:
    statistics = tokenised_statistics([])
    assert statistics.total.documents == 0
    assert np.isnan(statistics.total.mean_length)
    assert statistics.sources == {}
