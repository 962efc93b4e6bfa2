"""Models that know every answer, none, or a known half: each task scores what they deserve."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ropewalk.evaluation import ModelUnderTest, Settings, evaluate_model
from ropewalk.evaluation.backends import Answer, GenerationRequest
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample, Task
from ropewalk.evaluation.tasks.registry import chosen_suites, chosen_tasks
from ropewalk.evaluation.tasks.ruler.tasks import PUBLISHED
from ropewalk.evaluation.tasks.suite import TEACHER_FORCED, GeneratedSuite
from tests.evaluation.evaluation_cases import word_tokenizer

LENGTH = 4000
SAMPLES = 4


class Oracle:
    """Finds the sample of a prompt by its token ids alone, and answers by it."""

    def __init__(
        self, samples: Sequence[Sample], encoder: PromptEncoder, say: Callable[[Sample], str]
    ) -> None:
        self.by_prompt = {encoder.encode(s.text, s.answer_prefix).input_ids: s for s in samples}
        self.say = say
        self.description = {"kind": "oracle"}

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        for index, request in enumerate(requests):
            yield Answer(index, self.say(self.by_prompt[request.input_ids]))


def generated_tasks(settings: Settings) -> list[Task]:
    """The tasks in which the model writes an answer."""
    chosen = chosen_tasks(settings)
    suites = [suite for suite in chosen_suites(settings) if isinstance(suite, GeneratedSuite)]
    return [suite.tasks(settings)[n] for suite in suites for n in chosen[suite.name] if n != TEACHER_FORCED]


def everything(sample: Sample) -> str:
    return f" {', '.join(sample.references).upper()}."


def nothing(sample: Sample) -> str:
    return ""


def every_second_sample(sample: Sample) -> str:
    return everything(sample) if sample.index % 2 else " I do not know."


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Made-up essays, SQuAD and HotpotQA, in the form of the real files."""
    folder = tmp_path_factory.mktemp("sources")
    sentences = [f"Essay sentence {n} has something to say about nothing at all." for n in range(400)]
    (folder / "essays.txt").write_text(" ".join(sentences))

    def paragraph(n: int) -> str:
        return f"Paragraph {n} tells of town {n}. " + f"It has {n % 7} bridges and a mill. " * (1 + n % 5)

    def asked(n: int, p: int) -> dict[str, Any]:
        answer = {"text": f"town {n}", "answer_start": 0}
        return {
            "question": f"Which town is told of in {n}, time {p}?",
            "is_impossible": False,
            "answers": [answer],
        }

    articles = [
        {
            "paragraphs": [
                {"context": paragraph(n), "qas": [asked(n, p) for p in range(2)]} for n in range(s, s + 10)
            ]
        }
        for s in range(0, 200, 10)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    hotpot = [
        {
            "question": f"Which town has mill {n}?",
            "answer": f"town {n}",
            "context": [[f"Title {k}", [paragraph(k)]] for k in range(n, n + 10)],
        }
        for n in range(100)
    ]
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    squad, hotpotqa = str(folder / "squad.json"), str(folder / "hotpot.json")
    return {"essays": folder / "essays.txt", "squad": squad, "hotpotqa": hotpotqa}


@pytest.mark.parametrize(
    ("say", "score"),
    [
        (every_second_sample, 50.0),
        pytest.param(everything, 100.0, marks=pytest.mark.slow),
        pytest.param(nothing, 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_score_is_the_share_of_answers_that_are_right(
    sources: dict[str, Any], say: Callable[[Sample], str], score: float
) -> None:
    tokenizer = word_tokenizer()
    encoder = PromptEncoder(tokenizer)
    settings = Settings(
        suites=("ruler", "passkey", "needle", "longeval"),
        lengths=(LENGTH,),
        samples=SAMPLES,
        depths=3,
        exclude=("teacher_forced", "cwe"),
        **sources,
    )
    # Words are few tokens to this tokenizer, and cwe's prompt is long: it has a length of its own.
    for asked in (settings, Settings(suites=("ruler",), tasks=("cwe",), lengths=(20_000,), samples=SAMPLES)):
        samples = [
            sample
            for task in generated_tasks(asked)
            for sample in task.samples(encoder, asked.lengths_of("")[0], SAMPLES, asked.seed)
        ]
        results = evaluate_model(ModelUnderTest(tokenizer, Oracle(samples, encoder, say)), asked)
        assert {r.status for r in results} == {"ok"}
        assert {r.task: r.score for r in results} == pytest.approx({r.task: score for r in results})
        for result in results:
            low, high = result.ci95
            assert low <= score <= high
            assert high - low > 0
        if asked is settings:
            ran = {r.task for r in results}
            assert {*PUBLISHED, "overall", "passkey", "generated", "lines"} - ran == {"cwe"}


def test_half_of_several_references_is_half_a_score(sources: dict[str, Any]) -> None:
    tokenizer = word_tokenizer()
    encoder = PromptEncoder(tokenizer)
    settings = Settings(suites=("ruler",), tasks=("niah_multivalue",), lengths=(4096,), samples=2, **sources)
    (task,) = generated_tasks(settings)
    samples = list(task.samples(encoder, 4096, 2, 0))
    oracle = Oracle(samples, encoder, lambda sample: " and ".join(sample.references[:2]))
    (result,) = evaluate_model(ModelUnderTest(tokenizer, oracle), settings)
    assert result.score == 50


def test_missing_material_is_not_run_and_never_zero(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    encoder = PromptEncoder(tokenizer)
    settings = Settings(
        suites=("ruler",), tasks=("niah_single_1", "qa_1", "qa_2", "fwe"), lengths=(4096,), samples=2
    )
    samples = [
        sample
        for task in generated_tasks(settings)
        if task.unavailable() is None
        for sample in task.samples(encoder, 4096, 2, 0)
    ]
    results = {
        r.task: r
        for r in evaluate_model(ModelUnderTest(tokenizer, Oracle(samples, encoder, everything)), settings)
    }
    for name in ("qa_1", "qa_2"):
        assert results[name].status == "not run"
        assert results[name].reason
        assert results[name].to_json()["score"] is None
    assert results["overall"].score == 100
    assert "qa_1" in (results["overall"].reason or "")
