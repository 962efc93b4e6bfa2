"""Sliding-window perplexity and chunked prefill against plain transformers logits, window by window."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import TaskResult, ratio_interval
from ropewalk.evaluation.backends.likelihoods import WindowReader
from ropewalk.evaluation.tasks.perplexity import (
    SlidingPerplexity,
    SlidingWindows,
    document_windows,
    sliding_perplexity,
    sliding_task,
)
from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.load import attach
from tests.evaluation.evaluation_cases import tiny_llama
from tests.evaluation.plain_cases import BOS, FLOAT32, VOCABULARY, naive_losses, text


def naive(
    plain: Any, documents: list[Any], bos: int | None, length: int, stride: int, truncate: bool = False
) -> tuple[float, float, list[tuple[int, int, float]]]:
    """The published loop, told in its own order: what is new is counted from the end of each window."""
    room = length if bos is None else length - 1
    window_means, total, count, each = [], 0.0, 0, []
    for document in documents:
        ids = document.tolist()
        if len(ids) < 2:
            continue
        if truncate:
            ids, stride = ids[:room], room
        before, nats, tokens, windows = 0, 0.0, 0, 0
        for begin in range(0, len(ids), stride):
            end = min(begin + room, len(ids))
            window = ([] if bos is None else [bos]) + ids[begin:end]
            losses = naive_losses(plain, window)[-(end - before) :]
            window_means.append(sum(losses) / len(losses))
            nats, tokens, windows = nats + sum(losses), tokens + len(losses), windows + 1
            before = end
            if end == len(ids):
                break
        each.append((windows, tokens, nats))
        total, count = total + nats, count + tokens
    return math.exp(sum(window_means) / len(window_means)), math.exp(total / count), each


def assert_equals_naive(found: SlidingPerplexity, expected: tuple[float, float, list[Any]]) -> None:
    published, token_weighted, each = expected
    assert found.published == pytest.approx(published, rel=FLOAT32)
    assert found.token_weighted == pytest.approx(token_weighted, rel=FLOAT32)
    assert [(d.windows, d.tokens) for d in found.documents] == [(w, t) for w, t, _ in each]
    assert [d.nats for d in found.documents] == pytest.approx([nats for _, _, nats in each], rel=FLOAT32)


@pytest.mark.parametrize("bos", [BOS, None])
@pytest.mark.parametrize("truncate", [False, True])
def test_equals_the_published_loop(
    model: Any, plain: Any, head: OutputHead, bos: int | None, truncate: bool
) -> None:
    documents = text(50, 1, 17, 2, 33, 0)
    found = sliding_perplexity(
        WindowReader(model, head, bos), documents, SlidingWindows(16, None if truncate else 5)
    )
    assert_equals_naive(found, naive(plain, documents, bos, 16, 5, truncate))
    assert [d.index for d in found.documents] == [0, 2, 3, 4]
    assert found.n_skipped == 2
    assert found.n_short == 1
    assert found.published_ci95[0] <= found.published <= found.published_ci95[1]
    assert found.token_weighted_ci95[0] <= found.token_weighted <= found.token_weighted_ci95[1]
    # The two averages are not one number under two names.
    assert truncate or abs(found.published / found.token_weighted - 1) > 1e-3


@settings(max_examples=25)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=3),
    st.integers(2, 24),
    st.data(),
    st.sampled_from([BOS, None]),
    st.one_of(st.none(), st.integers(1, 30)),
)
def test_equals_the_published_loop_in_any_shape(
    model: Any,
    plain: Any,
    head: OutputHead,
    lengths: list[int],
    length: int,
    data: st.DataObject,
    bos: int | None,
    chunk: int | None,
) -> None:
    documents, stride = text(*lengths), data.draw(st.integers(1, length - 1))
    found = sliding_perplexity(
        WindowReader(model, head, bos, prefill_chunk=chunk),
        documents,
        SlidingWindows(length, stride),
    )
    assert_equals_naive(found, naive(plain, documents, bos, length, stride))


@given(st.integers(2, 200), st.integers(2, 50), st.data(), st.booleans())
def test_windows_score_every_token_once_with_all_the_context_there_is(
    n_tokens: int, room: int, data: st.DataObject, bos: bool
) -> None:
    stride = data.draw(st.integers(1, room if bos else room - 1))
    windows = list(document_windows(n_tokens, room, stride, 0 if bos else 1))
    assert [t for w in windows for t in range(w.first, w.end)] == list(range(0 if bos else 1, n_tokens))
    for number, window in enumerate(windows):
        assert window.start == number * stride
        assert window.end - window.start == room or number == len(windows) - 1
        assert window.end - window.start <= room
        assert window.first < window.end
        if number:
            assert window.end - window.first <= stride
            assert window.first - window.start == room - stride


def test_truncation_is_the_first_window_of_each_document(model: Any, head: OutputHead) -> None:
    documents = text(50, 17, 33)
    truncated = sliding_perplexity(WindowReader(model, head, BOS), documents, SlidingWindows(16, None))
    first = sliding_perplexity(
        WindowReader(model, head, BOS), documents, SlidingWindows(16, 5, most_windows=1)
    )
    assert truncated.documents == first.documents
    assert truncated.n_cut == first.n_cut == 3
    assert truncated.windows.stride is None
    assert [d.windows for d in truncated.documents] == [1, 1, 1]


def test_most_windows_leaves_out_the_ends(model: Any, head: OutputHead) -> None:
    documents = text(50, 18)
    capped = sliding_perplexity(
        WindowReader(model, head, BOS), documents, SlidingWindows(16, 5, most_windows=3)
    )
    rest = sliding_perplexity(
        WindowReader(model, head, BOS), [documents[0][:25], documents[1]], SlidingWindows(16, 5)
    )
    assert [d.windows for d in capped.documents] == [3, 2]
    assert [d.nats for d in capped.documents] == pytest.approx([d.nats for d in rest.documents], rel=FLOAT32)
    assert capped.n_cut == 1
    assert sliding_task(capped).details["most_windows"] == 3


def test_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    uniform = tiny_llama()
    torch.nn.init.zeros_(uniform.lm_head.weight)
    attach(uniform)
    found = sliding_perplexity(
        WindowReader(uniform, OutputHead.of(uniform), BOS), text(30, 41), SlidingWindows(16, 5)
    )
    for value in (found.published, found.token_weighted, *found.published_ci95, *found.token_weighted_ci95):
        assert value == pytest.approx(VOCABULARY, rel=1e-6)


def test_intervals_are_over_documents(model: Any, head: OutputHead) -> None:
    found = sliding_perplexity(WindowReader(model, head, BOS), text(50, 17, 33, 40), SlidingWindows(16, 5))
    tokens = [d.tokens for d in found.documents]
    by_token = ratio_interval([d.nats for d in found.documents], tokens, at_least=0)
    assert found.token_weighted_ci95 == tuple(map(math.exp, by_token))
    windows = [d.windows for d in found.documents]
    by_window = ratio_interval([d.window_means for d in found.documents], windows, at_least=0)
    assert found.published_ci95 == tuple(map(math.exp, by_window))


def test_task_says_all_that_a_comparison_needs(model: Any, head: OutputHead) -> None:
    found = sliding_perplexity(WindowReader(model, head, BOS), text(50, 1, 17, 9), SlidingWindows(16, 5))
    task = sliding_task(found)
    assert (task.suite, task.task, task.length, task.n, task.unit) == (
        "perplexity",
        "sliding",
        16,
        3,
        "perplexity",
    )
    assert task.score == found.token_weighted
    assert task.ci95 == found.token_weighted_ci95
    assert task.details["published"] == found.published
    assert task.details["published_ci95"] == list(found.published_ci95)
    expected = {
        "stride": 5,
        "n_windows": 11,
        "n_tokens": 76,
        "documents": 3,
        "documents_skipped": 1,
        "documents_shorter_than_window": 1,
        "documents_cut": 0,
        "most_windows": None,
    }
    assert {key: task.details[key] for key in expected} == expected
    assert [sample["index"] for sample in task.samples] == [0, 2, 3]
    nats, tokens = (sum(sample[key] for sample in task.samples) for key in ("nats", "tokens"))
    assert task.score == pytest.approx(math.exp(nats / tokens))
    for sample in task.samples:
        assert sample["perplexity"] == pytest.approx(math.exp(sample["nats"] / sample["tokens"]))
    assert TaskResult.from_json(json.loads(json.dumps(task.to_json(), allow_nan=False))) == task
    truncated = sliding_task(
        sliding_perplexity(WindowReader(model, head, BOS), text(50), SlidingWindows(16, None))
    )
    assert truncated.task == "truncated"
    assert "stride" not in truncated.details


def test_loss_that_is_not_finite_stays_visible(model: Any) -> None:
    broken = torch.nn.Linear(32, VOCABULARY, bias=False)
    torch.nn.init.constant_(broken.weight, math.nan)
    found = sliding_perplexity(
        WindowReader(model, OutputHead(broken), BOS), text(30, 20), SlidingWindows(16, 5)
    )
    assert math.isnan(found.token_weighted)
    assert math.isnan(found.published)
    task = sliding_task(found)
    assert task.reason is not None
    assert "not a finite number" in task.reason
    assert task.samples[0]["nats"] is None
    json.dumps(task.to_json(), allow_nan=False)


def test_leaves_the_model_as_it_was_and_says_how_far_it_is(model: Any, head: OutputHead) -> None:
    calls: list[tuple[int, int]] = []
    model.train()
    try:
        sliding_perplexity(
            WindowReader(model, head, BOS),
            text(30, 20),
            SlidingWindows(16, 5),
            progress=lambda done, total: calls.append((done, total)),
        )
        assert model.training
    finally:
        model.eval()
    assert calls == [(done, 6) for done in range(1, 7)]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 1}, "2 tokens or more, got 1"),
        ({"stride": 16}, "stride must be from 1 to 15 tokens for windows of 16, got 16"),
        ({"stride": 0}, "stride must be from 1 to 15"),
        ({"most_windows": 0}, "most_windows must be 1 or more, got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk must be 1 token or more, got 0"),
        ({"documents": []}, "at least one document"),
        ({"documents": text(1, 0)}, "a document of 2 tokens or more, but all 2 documents are shorter"),
    ],
)
def test_refuses_what_it_cannot_score(
    model: Any, head: OutputHead, settings: dict[str, Any], message: str
) -> None:
    values = {"documents": text(30), "length": 16, "stride": 5, **settings}
    reading = {name: values.pop(name) for name in ("prefill_chunk",) if name in values}
    with pytest.raises(RopewalkError, match=message):
        sliding_perplexity(
            WindowReader(model, head, BOS, **reading), values.pop("documents"), SlidingWindows(**values)
        )
