"""InfiniteBench's scores are those of its authors for public outputs of models (see infinitebench_fixture.py)."""

import json
import re
from pathlib import Path

import pytest

from ropewalk.evaluation.tasks.published.infinitebench import FORMS
from ropewalk.evaluation.tasks.published.infinitebench_scores import (
    any_name,
    choice,
    letter,
    name,
    number,
    summary,
    values,
)
from ropewalk.evaluation.tasks.registry import METRICS

RECORDED = json.loads((Path(__file__).parent / "infinitebench_upstream.json").read_text())

TITLES = {
    **{"passkey": "Retrieve.PassKey", "number_string": "Retrieve.Number", "kv_retrieval": "Retrieve.KV"},
    **{
        "longbook_sum_eng": "En.Sum",
        "longbook_choice_eng": "En.MC",
        "longbook_qa_eng": "En.QA",
        "longbook_qa_chn": "Zh.QA",
    },
    **{"longdialogue_qa_eng": "En.Dia", "math_find": "Math.Find"},
    **{"code_run": "Code.Run", "code_debug": "Code.Debug"},
}


@pytest.mark.parametrize("task", FORMS)
def test_scores_are_the_published_ones(task: str) -> None:
    metric = METRICS[f"infinitebench_{FORMS[task].metric}"]
    outputs = RECORDED["outputs"][task]
    assert len(outputs) >= 20
    assert len({score for *_, score in outputs}) >= 2
    for answer, references, score in outputs:
        assert metric(answer, references, {}) == pytest.approx(score, abs=1e-12), answer


def test_the_table_of_the_documentation_has_the_scores_of_the_recorded_models() -> None:
    page = (Path(__file__).parents[4] / "docs/evaluation.md").read_text()
    for task, title in TITLES.items():
        found = re.search(rf"^\| {re.escape(title)} \|.*", page, re.MULTILINE)
        assert found is not None
        cells = [each.strip() for each in found[0].strip("|").split("|")][1:]
        ours = [f"{RECORDED['means'][model][task][1]:.2f}" for model in ("gpt4", "kimi")]
        assert [cells[1], cells[3]] == ours


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        # Nothing with the authors: a letter alone, in brackets, or in bold.
        *[("B", 1), ("(B)", 1), (" B\n", 1), ("The error is **B**.", 1), ("So the answer is option B.", 1)],
        # All of it, if B were right: a word that begins with the letter.
        *[("Based on the text, the answer is A.", 0), ("A careful look: the best answer to it is B", 1)],
        *[("D. Susan B. Anthony", 0), ("The answer is: A. The answer is: B", 1), ("", 0), ("none", 0)],
    ],
)
def test_a_letter_counts_where_it_is_stated(answer: str, score: float) -> None:
    assert letter(answer, ["two", "B"]) == score


def test_a_word_that_begins_with_a_letter_is_a_choice_with_the_authors_alone() -> None:
    for answer in ("Based on the text, the answer is A", "Certainly: answer is A"):
        assert (choice(answer, ["one", "A"]), letter(answer, ["one", "A"])) == (0, 1)


def test_a_name_of_two_words_is_found_by_the_corrected_score_alone() -> None:
    for answer in ("It is the Oil Man.", "OIL MAN"):
        assert (name(answer, ["OIL MAN"]), any_name(answer, ["OIL MAN"])) == (0, 1)
    assert (name("Remo", ["GAGGI", "Remo"]), any_name("Remo", ["GAGGI", "Remo"])) == (0, 1)
    assert any_name("Oilman", ["OIL MAN"]) == 0


def test_answers_on_which_the_published_scorer_fails_get_a_score() -> None:
    assert number("88.0", ["88"]) == 1
    assert number("9" * 5000, ["88"]) == 0
    assert values("9" * 5000 + " 4", ["[1, 4]"]) == 0
    assert values("[1, 4, 7]", ["[1, 4, 8]"]) == pytest.approx(2 / 3)


def test_a_summary_is_as_near_as_its_nearest_reference() -> None:
    # Of four words each, three in order: F1 of the longest common subsequence.
    assert summary("she leaves the house", ["nothing", "she leaves his House"]) == 0.75
    assert summary("", ["she"]) == summary("她走了", ["she"]) == 0
