"""BABILong: a solver that looks back from the last fact finds each answer, and the second score is that of lm_eval."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ruler_samples import trained_tokenizer
from benchmarks.task_checkers import FACT, check
from benchmarks.task_checkers import babilong_answer as answer
from ropewalk.evaluation import Settings
from ropewalk.evaluation.samples import Sample, any_reference
from ropewalk.evaluation.tasks.babi import GIVERS, PEOPLE, PLACES, THINGS
from ropewalk.evaluation.tasks.babilong import EXAMPLES, KINDS, BabiLong, one_label
from ropewalk.evaluation.tasks.registry import BY_NAME, chosen_tasks
from tests.evaluation.tasks.task_cases import samples_of, scores_of
from tests.evaluation.tasks.test_babi import DIFFICULTIES

LENGTH = 12_000
"""In bytes, about 4K of another tokenizer's tokens."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return trained_tokenizer(2000, 200_000)


def facts_of(sample: Sample) -> list[str]:
    context = sample.text.partition("<context>\n")[2].partition("\n</context>")[0]
    return [found[0] for found in FACT.finditer(context)]


@pytest.mark.parametrize("task", KINDS)
def test_the_facts_have_one_answer(task: str, tokenizer: Any) -> None:
    samples = samples_of("babilong", task, 4096, 40, tokenizer=tokenizer)
    for sample in samples:
        check(sample)
        assert sample.details["difficulty"] == len(sample.details["spans"]) == DIFFICULTIES[task]
        assert len(facts_of(sample)) == sample.details["facts"]
        # No word of the text around is a label, so that the facts alone name them.
        assert set(re.findall(r"\w+", sample.text)) & {*PLACES, *THINGS} <= set(
            re.findall(r"\w+", " ".join((*facts_of(sample), sample.details["question"])))
        )
    assert len({sample.text for sample in samples}) == len(samples)
    assert len({sample.references for sample in samples}) >= 5


def test_facts_stand_everywhere_and_keep_their_order_at_another_length(tokenizer: Any) -> None:
    task = BabiLong("qa3")
    stories = [task._draft(4096, index, 0, units) for index in range(40) for units in (3000, 6000)]
    for short, long in zip(stories[::2], stories[1::2], strict=True):
        assert [short.text[a:b] for a, b in short.details["spans"]] == [
            long.text[a:b] for a, b in long.details["spans"]
        ]
        assert short.details["question"] == long.details["question"]
    places = [found.start() / len(each.text) for each in stories for found in FACT.finditer(each.text, 1500)]
    quarters = Counter(int(4 * place) for place in places)
    assert all(0.15 < quarters[quarter] / len(places) < 0.35 for quarter in range(4))


def test_the_examples_are_right_and_name_no_label() -> None:
    for name, text, said in EXAMPLES:
        facts, question = re.fullmatch(r"(.*\.) ([^.]*\?)", text).groups()  # type: ignore[union-attr]
        assert answer(f"<context>\n{facts}\n</context>\nQuestion: {question}") == said
        assert not set(re.findall(r"\w+", text)) & {*PLACES, *THINGS, *PEOPLE, *GIVERS}
        assert name in KINDS


@pytest.mark.parametrize("task", KINDS)
def test_models_score_what_they_know(task: str) -> None:
    def half(prompt: str) -> str:
        return answer(prompt) if len(prompt) % 2 else "I cannot tell."

    right = {task: 100, f"{task}.substring": 100}
    assert scores_of("babilong", task, LENGTH, 6, answer) == right
    assert scores_of("babilong", task, LENGTH, 6, lambda prompt: "") == dict.fromkeys(right, 0)
    known = [len(sample.text) % 2 for sample in samples_of("babilong", task, LENGTH, 6)]
    assert scores_of("babilong", task, LENGTH, 6, half) == dict.fromkeys(
        right, pytest.approx(100 * sum(known) / 6)
    )


BEFORE = {"question": "Where was the milk before the office?"}
WHO = {"question": "Who gave the milk to Mary?"}


@pytest.mark.parametrize(
    ("said", "target", "details", "score", "contained"),
    [
        ("The most recent location of Mary is garden.", "garden", {"question": "Where is Mary?"}, 1, 1),
        ("GARDEN", "garden", {"question": "Where is Mary?"}, 1, 1),
        ("garden or kitchen", "garden", {"question": "Where is Mary?"}, 0, 1),
        ("garden. Not the kitchen.", "garden", {"question": "Where is Mary?"}, 1, 1),
        ("She left. garden", "garden", {"question": "Where is Mary?"}, 0, 1),
        ("kitchen", "garden", {"question": "Where is Mary?"}, 0, 0),
        ("Before the office the milk was in the garden.", "garden", BEFORE, 1, 1),
        ("Before the hallway the milk was in the garden.", "garden", BEFORE, 0, 1),
        ("\nFred gave the milk to Mary", "Fred", WHO, 1, 1),
        ("fred gave the apple to Mary", "Fred", WHO, 0, 1),
        ("Fred<example>Jeff", "Fred", WHO, 1, 1),
        ("Fred Question: and Jeff?", "Fred", WHO, 0, 1),
        ("", "Fred", WHO, 0, 0),
    ],
)
def test_scores(said: str, target: str, details: Mapping[str, str], score: float, contained: float) -> None:
    assert one_label(said, (target,), details) == score
    assert any_reference(said, (target,), details) == contained
    pytest.importorskip("datasets")
    theirs = pytest.importorskip("lm_eval.tasks.babilong.common_utils")
    assert theirs.process_results({"target": target}, [said]) == {"acc": contained}


def test_essays_are_other_tasks(tmp_path: Path) -> None:
    assert chosen_tasks(Settings(suites=("babilong",)))["babilong"] == [*KINDS]
    (tmp_path / "book.txt").write_text("The ship sailed on. Nobody sang that evening. " * 50)
    settings = Settings(suites=("babilong",), essays=tmp_path)
    task = BY_NAME["babilong"].tasks(settings)["qa1_essay"]  # type: ignore[attr-defined]
    assert task.unavailable() is None
    assert task.settings()["haystack"] == "essay"
    text = task._draft(4096, 0, 0, 60).text
    assert "Nobody sang that evening." in text
    # A fact never follows the sentence that the last word cuts.
    assert re.search(r"\w\n</context>|\.\n</context>", text)
