"""What is known is not asked again, and an answer is never taken for another's."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import GenerationRequest, Rejection
from ropewalk.evaluation.predictions import PredictionLog, read_predictions
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.tasks import generation as answering
from ropewalk.evaluation.tasks.generation import generated_predictions
from tests.evaluation.core_cases import NumberBackend, asked_sample, byte_tokenizer

TOKENIZER = byte_tokenizer()
ENCODER = PromptEncoder(TOKENIZER)
SAMPLES = [asked_sample(ENCODER, index) for index in range(7)]


def test_each_sample_gets_its_own_answer_in_order() -> None:
    backend = NumberBackend(TOKENIZER)
    found = generated_predictions(backend, ENCODER, iter(SAMPLES), PredictionLog())
    assert [each.index for each in found] == list(range(7))
    assert [each.prediction for each in found] == [f" {index}." for index in range(7)]
    assert all(each.score == 1 for each in found)
    (requests,) = backend.asked
    for request, sample in zip(requests, SAMPLES, strict=True):
        assert request.input_ids == ENCODER.encode(sample.text, sample.answer_prefix).input_ids
        assert (request.max_new_tokens, request.length) == (8, 64)


@given(st.permutations(range(7)), st.sets(st.integers(0, 6)))
def test_order_of_answers_and_what_was_known_do_not_matter(order: list[int], known: set[int]) -> None:
    log = PredictionLog()
    generated_predictions(NumberBackend(TOKENIZER), ENCODER, [SAMPLES[i] for i in sorted(known)], log)

    def kept(n: int) -> Sequence[int]:
        return [i for i in order if i < n]

    backend = NumberBackend(TOKENIZER, kept)
    found = generated_predictions(backend, ENCODER, SAMPLES, log)
    assert [(each.index, each.score) for each in found] == [(index, 1) for index in range(7)]
    asked = [request.input_ids for group in backend.asked for request in group]
    unknown = [sample for sample in SAMPLES if sample.index not in known]
    assert asked == [ENCODER.encode(each.text, each.answer_prefix).input_ids for each in unknown]


class Choosy(NumberBackend):
    """Rejects the prompts of some samples."""

    def __init__(self, *rejected: int) -> None:
        super().__init__(TOKENIZER)
        self.rejected = rejected

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Any]:
        for answer in super().answers(requests):
            number = int(answer.text.strip(" ."))
            yield Rejection(answer.index, f"no {number}") if number in self.rejected else answer


def test_a_rejected_prompt_is_no_prediction_and_is_asked_again(tmp_path: Path) -> None:
    log = PredictionLog(tmp_path / "p.jsonl")
    found = generated_predictions(Choosy(2, 5), ENCODER, SAMPLES, log)
    assert [each.index for each in found] == [0, 1, 3, 4, 6]
    first = SAMPLES[0]
    assert log.rejected_of(first.suite, first.task, first.length) == {2: "no 2", 5: "no 5"}
    assert log.rejected_of(first.suite, first.task, first.length + 1) == {}
    again = Choosy()
    found = generated_predictions(again, ENCODER, SAMPLES, PredictionLog(tmp_path / "p.jsonl"))
    assert [each.index for each in found] == list(range(7))
    assert [len(group) for group in again.asked] == [2]


def test_no_samples_ask_nothing() -> None:
    backend = NumberBackend(TOKENIZER)
    assert generated_predictions(backend, ENCODER, [], PredictionLog()) == []
    assert backend.asked == []


def test_run_that_fails_keeps_what_was_answered_and_goes_on_from_it(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    log = PredictionLog(path)
    with pytest.raises(RunFailure, match="memory of the device is full"):
        generated_predictions(NumberBackend(TOKENIZER, fails_after=3), ENCODER, SAMPLES, log)
    assert [each.index for each in read_predictions(path)] == [0, 1, 2]
    backend = NumberBackend(TOKENIZER)
    found = generated_predictions(backend, ENCODER, SAMPLES, PredictionLog(path))
    assert sum(map(len, backend.asked)) == 4
    assert found == read_predictions(path)
    assert found == generated_predictions(NumberBackend(TOKENIZER), ENCODER, SAMPLES, PredictionLog())


@pytest.mark.parametrize(
    "order", [lambda n: range(n - 1), lambda n: range(1, n), lambda n: []], ids=["last", "first", "all"]
)
def test_answer_that_never_came_is_a_failure_of_the_run(order: Callable[[int], Sequence[int]]) -> None:
    with pytest.raises(RunFailure, match="niah"):
        generated_predictions(NumberBackend(TOKENIZER, order), ENCODER, SAMPLES, PredictionLog())


@pytest.mark.parametrize("order", [lambda n: [0, 0], lambda n: [0, n], lambda n: [-1, 0]])
def test_answer_to_nothing_that_was_asked_is_no_answer(order: Callable[[int], Sequence[int]]) -> None:
    """Twice to one, to one beyond the last, and to one before the first."""

    class Confused(NumberBackend):
        def answers(self, requests):  # type: ignore[no-untyped-def]
            first = next(super().answers(requests[:1]))
            for index in self.order(len(requests)):
                yield type(first)(index, first.text)

    log = PredictionLog()
    with pytest.raises(RopewalkError):
        generated_predictions(Confused(TOKENIZER, order), ENCODER, SAMPLES, log)
    assert {key[3] for key in log.known} <= {0}


def test_another_tokenizer_s_samples_are_refused_before_anything_is_asked() -> None:
    for other in (byte_tokenizer(bos=None), byte_tokenizer(merges=("am", "pl"))):
        backend = NumberBackend(other)
        with pytest.raises(
            RopewalkError,
            match=r"sample 0 of niah has \d+ tokens \(. of them BOS\) with this tokenizer, "
            r"but had \d+ \(. of them BOS\) when it was",
        ):
            generated_predictions(backend, PromptEncoder(other), SAMPLES, PredictionLog())
        assert backend.asked == []


def test_prompts_wait_in_groups_of_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "ASKED_TOKENS", 3 * 64)
    backend = NumberBackend(TOKENIZER)
    taken: list[int] = []

    def stream():  # type: ignore[no-untyped-def]
        for sample in SAMPLES:
            taken.append(len(backend.asked))
            yield sample

    found = generated_predictions(backend, ENCODER, stream(), PredictionLog())
    assert [len(group) for group in backend.asked] == [3, 3, 1]
    assert taken == [0, 0, 0, 1, 1, 1, 2]
    assert [each.index for each in found] == list(range(7))


def test_a_prompt_longer_than_a_group_is_asked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "ASKED_TOKENS", 5)
    backend = NumberBackend(TOKENIZER)
    assert len(generated_predictions(backend, ENCODER, SAMPLES, PredictionLog())) == 7
    assert [len(group) for group in backend.asked] == [1] * 7


def test_progress_counts_what_was_known_before() -> None:
    log = PredictionLog()
    generated_predictions(NumberBackend(TOKENIZER), ENCODER, SAMPLES[:3], log)
    told: list[tuple[int, int]] = []
    generated_predictions(
        NumberBackend(TOKENIZER), ENCODER, SAMPLES, log, lambda done, seen: told.append((done, seen))
    )
    assert told == [(4, 7), (5, 7), (6, 7), (7, 7)]
