"""Spans against the dense mask: which keys a query sees, and how many pairs there are."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.attention.options import Locality
from ropewalk.attention.spans import Spans
from ropewalk.testing import random_layout


def drawn(seed: int, total: int):
    rng = random.Random(seed)
    layout = random_layout(total, rng, 6, interleaved=rng.random() < 0.4, max_anchor=rng.choice([1, 7]))
    locality = Locality(
        rng.choice([None, 1, rng.randint(1, total)]), rng.choice([None, None, rng.randint(1, total)])
    )
    order = layout.storage_in_order
    return layout, locality, layout.dense_mask(locality)[order][:, order].numpy()


@given(seed=st.integers(0, 10**6), total=st.integers(9, 80))
@settings(deadline=None)
def test_every_query_sees_its_shared_keys_and_its_own_and_no_other(seed, total):
    layout, locality, mask = drawn(seed, total)
    spans = Spans.of(layout, locality)
    places = np.arange(total)
    shared, own = spans.first_seen(places)
    ends = spans.shared_end[spans.span_of(places)]
    for place in places:
        expected = np.zeros(total, dtype=bool)
        expected[shared[place] : ends[place]] = True
        expected[own[place] : place + 1] = True
        assert (mask[place] == expected).all()


@given(seed=st.integers(0, 10**6), total=st.integers(9, 80))
@settings(deadline=None)
def test_pairs_are_those_of_the_mask(seed, total):
    layout, locality, mask = drawn(seed, total)
    counted = np.concatenate([[0], mask.sum(1).cumsum()])
    spans = Spans.of(layout, locality)
    assert (spans.pairs_before(np.arange(total + 1)) == counted).all()
    assert spans.pairs == counted[-1]
