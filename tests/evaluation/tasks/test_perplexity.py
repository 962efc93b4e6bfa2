"""Perplexity by position against plain transformers logits, analytic models and its own invariants."""

import copy
import math
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import default_bins, evaluation_rows
from ropewalk.evaluation.backends.likelihoods import InMemoryLikelihoods
from ropewalk.evaluation.tasks.perplexity import equal_bins
from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.load import attach, load_model
from tests.evaluation.evaluation_cases import perplexity_by_position, tiny_llama

LENGTH, EDGES = 48, [0, 12, 16, 48]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    rng = np.random.default_rng(5)
    documents = [rng.integers(3, 97, size=n) for n in (20, 31, 7, 40, 64)]
    return evaluation_rows(documents, LENGTH, 1, None, 3).rows


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_llama()
    attach(model)
    return model


def naive(model: Any, rows: list[Row], start: int, end: int) -> tuple[float, int]:
    """Perplexity with the full logits of an untouched transformers model, position by position."""
    total, count = 0.0, 0
    for row in rows:
        with torch.no_grad():
            log_p = torch.log_softmax(model(input_ids=row.input_ids[None]).logits[0].double(), dim=-1)
        documents = row.layout.document_ids.tolist()
        for t in range(start, min(end, len(documents) - 1)):
            if documents[t] == documents[t + 1]:
                total -= float(log_p[t, row.input_ids[t + 1]])
                count += 1
    return math.exp(total / count), count


def test_equals_plain_logits(model: Any, rows: list[Row]) -> None:
    plain = tiny_llama()
    found = perplexity_by_position(model, OutputHead.of(model), rows, EDGES)
    assert [(b.start, b.end) for b in found.bins] == [(0, 12), (12, 16), (16, 48)]
    for each in (*found.bins, found.overall):
        perplexity, count = naive(plain, rows, each.start, each.end)
        # Losses of about 5 nats in float32, 1e-6 each, averaged.
        assert each.perplexity == pytest.approx(perplexity, rel=1e-5)
        assert each.n_tokens == count
        assert each.n_windows == 3
        assert each.ci95[0] <= each.perplexity <= each.ci95[1]


def test_overall_is_the_token_weighted_bins(model: Any, rows: list[Row]) -> None:
    found = perplexity_by_position(model, OutputHead.of(model), rows, EDGES)
    assert found.overall.n_tokens == sum(each.n_tokens for each in found.bins)
    total = sum(each.n_tokens * math.log(each.perplexity) for each in found.bins)
    assert math.log(found.overall.perplexity) == pytest.approx(total / found.overall.n_tokens)


def test_uniform_model_has_the_vocabulary_as_perplexity(rows: list[Row]) -> None:
    model = tiny_llama()
    torch.nn.init.zeros_(model.lm_head.weight)
    attach(model)
    found = perplexity_by_position(model, OutputHead.of(model), rows, EDGES)
    for each in (*found.bins, found.overall):
        assert each.perplexity == pytest.approx(97, rel=1e-6)
        assert each.ci95 == pytest.approx((97, 97), rel=1e-6)


def test_one_row_has_no_interval_and_an_empty_bin_no_perplexity(model: Any, rows: list[Row]) -> None:
    found = perplexity_by_position(model, OutputHead.of(model), rows[:1], [0, 40, LENGTH, 2 * LENGTH])
    assert all(map(math.isnan, found.bins[0].ci95))
    assert math.isfinite(found.bins[0].perplexity)
    assert math.isnan(found.bins[2].perplexity)
    assert found.bins[2].n_tokens == found.bins[2].n_windows == 0


def test_loss_that_is_not_finite_stays_visible(rows: list[Row]) -> None:
    model = tiny_llama()
    attach(model)
    head = OutputHead.of(model)
    broken = copy.deepcopy(head.linear)
    torch.nn.init.constant_(broken.weight, math.nan)
    found = perplexity_by_position(model, OutputHead(broken), rows, EDGES)
    assert math.isnan(found.overall.perplexity)
    assert found.overall.n_tokens > 0


def test_leaves_the_model_as_it_was(model: Any, rows: list[Row]) -> None:
    model.train()
    try:
        assert len(list(InMemoryLikelihoods(model).row_losses(rows))) == 3
        assert model.training
    finally:
        model.eval()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_refuses_what_it_cannot_score(model: Any) -> None:
    with pytest.raises(RopewalkError, match="at least one row"):
        list(InMemoryLikelihoods(model).row_losses([]))
    layout = PackedLayout.from_lengths([7])
    ids = torch.arange(8)
    with pytest.raises(RopewalkError, match="rows with the pattern 'full', got 'anchor'"):
        list(InMemoryLikelihoods(model).row_losses([Row(ids, next_token_labels(ids, layout), layout)]))


@pytest.mark.parametrize(
    ("length", "trained", "edges"),
    [
        (2048, 512, [0, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]),
        (1000, 512, [0, 512, 640, 768, 896, 1000]),
        (512, 512, [0, 128, 256, 384, 512]),
        (512, None, [0, 128, 256, 384, 512]),
        (2**20, 4096, [0, *(1024 * q * 2**k for k in range(8) for q in (4, 5, 6, 7)), 2**20]),
        (9, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (3, 8, [0, 1, 2, 3]),
    ],
)
def test_default_bins(length: int, trained: int | None, edges: list[int]) -> None:
    assert default_bins(length, trained) == edges


@given(st.integers(2, 2**21), st.integers(1, 2**18))
def test_default_bins_are_few_and_split_at_the_trained_length(length: int, trained: int) -> None:
    edges = default_bins(length, trained)
    assert edges[0] == 0
    assert edges[-1] == length
    assert edges == sorted(set(edges))
    assert len(edges) <= 2 + 4 * max(1, math.log2(length / trained) + 1)
    assert trained in edges or trained > length
    # Beyond the trained length, no bin is wider than a quarter of what is before it.
    assert all(end - start <= max(1, start / 4) for start, end in pairwise(edges) if start >= trained)


def test_default_bins_refuse_no_length() -> None:
    with pytest.raises(RopewalkError, match="1 token or more, got 0"):
        default_bins(8, 0)


def test_real_checkpoint_loses_its_way_beyond_its_length(stories260k: Path, stories: Path) -> None:
    from transformers import AutoModelForCausalLM

    from ropewalk.data import SourceSpec, load_tokenizer, read_documents
    from ropewalk.data.tokens.tokenise import tokenise

    tokenizer = load_tokenizer(str(stories260k))
    stream = tokenise(read_documents([SourceSpec(path=str(stories))]), tokenizer)
    documents = [document.input_ids for document in islice(stream, 32)]
    text = evaluation_rows(documents, 2048, tokenizer.bos_token_id, None, 2)
    model = load_model(stories260k)
    found = perplexity_by_position(model, OutputHead.of(model), text.rows, equal_bins(2048, 4))
    perplexities = [each.perplexity for each in found.bins]
    assert perplexities[0] < 3
    assert perplexities[3] == max(perplexities) > 3.5
    plain = AutoModelForCausalLM.from_pretrained(stories260k)
    # transformers rounds the angles to float32, 2047 rad to 1e-4, which moves losses by less than that.
    assert perplexities[3] == pytest.approx(naive(plain, text.rows, 1536, 2048)[0], rel=1e-3)
