"""HELMET's NarrativeQA: prompt, cut at the end, what the judge reads, and its grades."""

from pathlib import Path
from typing import Any

import pytest

from ropewalk.evaluation.tasks.published.helmet_narrativeqa import judge_prompt, verdict
from tests.evaluation.tasks.published.published_cases import results_of, samples_of, write_rows


def row(story: str = "Once there was a fox.") -> dict[str, Any]:
    return {
        "document": {"id": "x", "text": story},
        "question": {"text": "Who was there?"},
        "answers": [{"text": "A fox"}, {"text": "the {red} fox"}],
    }


def test_the_prompt_is_the_published_one_without_examples(tmp_path: Path) -> None:
    (sample,) = samples_of("helmet_narrativeqa", write_rows(tmp_path / "test.jsonl", [row()]), 1024)
    assert sample.text == (
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible.\n\nOnce there was a fox.\n\nQuestion: Who was there?"
        "\nAnswer:"
    )
    assert (sample.references, sample.max_new_tokens) == (("A fox", "the {red} fox"), 100)


def test_a_long_story_loses_its_end(tmp_path: Path) -> None:
    story = "begin " + "word " * 1000 + "end"
    (sample,) = samples_of("helmet_narrativeqa", write_rows(tmp_path / "test.jsonl", [row(story)]), 1024)
    assert "\n\nbegin word" in sample.text
    assert " ... [the rest of the text is omitted]\n\nQuestion:" in sample.text
    assert "end" not in sample.text
    assert sample.fill > 0.99
    assert sample.details["tokens_cut"] > 0


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("A fox", "A fox"),
        ("The story says\nAnswer: a fox\nand more", "a fox and more"),
        ("answer: Answer: a fox", "a fox"),
        ("", ""),
    ],
)
def test_the_judge_reads_the_answer_as_helmet_cuts_it(answer: str, read: str) -> None:
    prompt = judge_prompt(answer, ["A fox", "{x}"], {"question": "Who?"})
    assert prompt.endswith(f"Question: Who?\nCorrect answers: ['A fox', '{{x}}']\nAnswer: {read}\n")
    assert '{"fluency": 0, "correctness": 1}' in prompt


@pytest.mark.parametrize(
    ("said", "grade"),
    [
        ('Good. {"fluency": 1, "correctness": 3}', 1),
        ('{"fluency": 1, "correctness": 3} no: {"fluency": 1, "correctness": 1}', 1 / 3),
        ('{"fluency": 0, "correctness": 3}', 0),
        ('{"fluency": 1}', None),
        ('{"fluency": 1, "correctness": 9}', None),
        ('{"fluency": "high", "correctness": 1}', None),
        ("{fluency: 1}", None),
        ("[1, 3]", None),
        ("", None),
    ],
)
def test_the_grade_is_fluency_times_correctness(said: str, grade: float | None) -> None:
    assert verdict(said) == grade


def test_answers_wait_for_a_judge(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "test.jsonl", [row()])
    result = results_of("helmet_narrativeqa", path, 1024, lambda text: "A fox")["helmet_narrativeqa"]
    assert result.reason == "its 1 answers wait for a judge: ropewalk eval judge"
