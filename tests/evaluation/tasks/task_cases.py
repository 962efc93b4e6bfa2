"""What every generated task shows of itself: full prompts, and the scores of models that know all, half or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ropewalk.evaluation import ModelUnderTest, Settings, evaluate_model
from ropewalk.evaluation.backends import Answer, GenerationRequest
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.evaluation.tasks.suite import GeneratedSuite
from tests.evaluation.evaluation_cases import word_tokenizer

Say = Callable[[str], str]


class Reader:
    """A model that answers by the text of the prompt alone."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.description = {"kind": "reader"}

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        for index, request in enumerate(requests):
            yield Answer(index, self.say(request.text or ""))


def samples_of(
    suite: str, task: str, length: int, count: int, seed: int = 0, tokenizer: Any = None
) -> list[Sample]:
    """Samples of a task with its default settings."""
    found = BY_NAME[suite]
    assert isinstance(found, GeneratedSuite)
    encoder = PromptEncoder(tokenizer or word_tokenizer())
    return list(
        found.tasks(Settings(suites=(suite,), lengths=(length,)))[task].samples(encoder, length, count, seed)
    )


def scores_of(suite: str, task: str, length: int, count: int, say: Say) -> dict[str, float]:
    """Scores in percent of a model that answers by the prompts' text, by task: the task's own and further ones."""
    settings = Settings(suites=(suite,), tasks=(task,), lengths=(length,), samples=count)
    results = evaluate_model(ModelUnderTest(word_tokenizer(), Reader(say)), settings)
    assert {result.status for result in results} == {"ok"}
    return {result.task: result.score for result in results}


def check_full(samples: Sequence[Sample]) -> None:
    """Each prompt with its longest answer takes 99 to 100 % of the length."""
    fills = [sample.fill for sample in samples]
    assert min(fills) >= 0.99
    assert max(fills) <= 1
