"""Teacher forcing: the target begins where prompt and answer part, and a score counts whole answers."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends import argmax_matches, likelihoods
from ropewalk.evaluation.model_under_test import ModelUnderTest
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks.needle import NeedleGridTask
from ropewalk.evaluation.tasks.teacher_forced import prompt_and_target_ids, target_text, teacher_forced_result
from tests.evaluation.evaluation_cases import tiny_llama
from tests.evaluation.ruler_cases import TOKENIZERS, byte_tokenizer, demo_tokenizer


def made(
    task: NeedleGridTask, length: int, count: int = 1, seed: int = 0, tokenizer: Any = None
) -> list[Sample]:
    return list(task.samples(PromptEncoder(tokenizer or demo_tokenizer()), length, count, seed))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_forced_ids_are_the_prompt_and_the_number(tokenizer: str) -> None:
    encoder = PromptEncoder(TOKENIZERS[tokenizer]())
    for sample in made(NeedleGridTask((0.5,)), 1500, 3, 0, encoder.tokenizer):
        ids, start = prompt_and_target_ids(encoder, sample)
        assert list(ids[:start]) == list(encoder.encode(sample.text, sample.answer_prefix).input_ids)
        assert encoder.tokenizer.decode(ids[start:]).strip() == sample.references[0]
        assert len(ids) <= sample.length


def test_forced_target_begins_with_a_token_that_the_two_share() -> None:
    class Joining:
        """Writes ``is `` with its space as one token, which the prompt alone does not have."""

        bos_token_id, bos_token, chat_template = None, None, None

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            pieces = re.findall(r"is |.", text, flags=re.DOTALL)
            return {"input_ids": [1000 if piece == "is " else ord(piece) for piece in pieces]}

    (sample,) = made(NeedleGridTask((0.5,)), 1024)
    ids, start = prompt_and_target_ids(PromptEncoder(Joining()), sample)
    assert ids[start] == 1000
    assert "".join(map(chr, ids[start + 1 :])) == sample.references[0]


def under_test_of(model: Any) -> ModelUnderTest:
    return ModelUnderTest(byte_tokenizer(), backend=None, model=model, prefill_chunk=512)  # type: ignore[arg-type]


def forced(samples: Sequence[Sample], monkeypatch: pytest.MonkeyPatch, right: Any) -> TaskResult:
    """As a model that says the numbers for which ``right`` gives all tokens."""

    calls = iter(samples)

    def matches(model: Any, ids: Sequence[int], start: int, length: int, chunk: int) -> list[bool]:
        sample = next(calls)
        assert (length, chunk) == (sample.length, 512)
        return [right(sample, at) for at in range(len(ids) - start)]

    monkeypatch.setattr(likelihoods, "argmax_matches", matches)
    monkeypatch.setattr(likelihoods, "check_ids", lambda model, ids: None)
    return teacher_forced_result(
        under_test_of(object()), PromptEncoder(byte_tokenizer()), iter(samples), by_depth=True
    )


def test_forced_score_counts_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = made(NeedleGridTask((0.0, 1.0)), 1024, 4, 0, byte_tokenizer())
    # At the end all eight tokens (a space and seven digits), at the beginning all but the last.
    result = forced(samples, monkeypatch, lambda sample, at: sample.details["depth"] == 1 or at < 7)
    assert (result.suite, result.task, result.length, result.n) == ("needle", "teacher_forced", 1024, 8)
    assert result.score == 50
    assert result.details["tokens_right"] == pytest.approx(100 * (1 + 7 / 8) / 2)
    assert [(row["depth"], row["score"]) for row in result.details["depths"]] == [(0.0, 0.0), (1.0, 100.0)]
    assert [each["score"] for each in result.samples] == [0, 100] * 4
    assert [each["index"] for each in result.samples] == list(range(8))
    assert result.details["bos_count"] == [1]
    assert TaskResult.from_json(json.loads(json.dumps(result.to_json()))).score == 50


def test_forced_score_is_that_of_a_model() -> None:
    model, encoder = tiny_llama(vocab_size=300), PromptEncoder(byte_tokenizer())
    samples = made(NeedleGridTask((0.0, 1.0)), 700, 1, 0, byte_tokenizer())
    calls: list[tuple[int, int]] = []
    result = teacher_forced_result(under_test_of(model), encoder, samples, lambda *call: calls.append(call))
    shares = []
    for sample in samples:
        whole = encoder.encode(sample.text + sample.answer_prefix + target_text(sample)).input_ids
        matches = argmax_matches(model, whole, sample.prompt_tokens, sample.length)
        assert len(matches) == 8
        shares.append(sum(matches) / 8)
    assert result.details["tokens_right"] == pytest.approx(100 * sum(shares) / 2)
    assert calls == [(1, 2), (2, 2)]
    with pytest.raises(RopewalkError, match="at least one sample"):
        teacher_forced_result(under_test_of(model), encoder, [])
