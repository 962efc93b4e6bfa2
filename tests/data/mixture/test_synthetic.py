"""Synthetic tasks have one right answer, found here without the code that wrote them, and are no benchmark's."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest

import ropewalk.data.read.retrieval as retrieval
import ropewalk.evaluation.tasks as evaluation
from ropewalk.data.mixture.settings import MixtureSettings
from ropewalk.data.mixture.synthetic import (
    COUNT,
    FIND,
    SENTENCE,
    WovenCounts,
    draw_exam,
    explain_synthetic,
    synthetic_report,
)
from ropewalk.evaluation.tasks.longeval import LARGEST_VALUE
from ropewalk.evaluation.tasks.passkey import LARGEST_KEY
from ropewalk.evaluation.tasks.ruler.niah import draw_word
from tests.data.cases import refusal
from tests.data.mixture.exams import made_text, right_answer
from tests.places import ROOT

BOTH = ("needle", "count")


def test_a_thousand_tasks_have_the_answers_that_their_texts_give():
    seen = Counter()
    for number in range(1000):
        draw = random.Random(number)
        text = made_text(draw, 200)
        exam = draw_exam(text, BOTH, draw)
        lines = text.split("\n")
        for sentence in exam.sentences:
            lines.insert(draw.randrange(len(lines) + 1), sentence)
        assert exam.answer == f" {right_answer(chr(10).join(lines), exam.question)}"
        seen[exam.kind] += 1
    assert min(seen.values()) > 400
    assert set(seen) == set(BOTH)


def test_a_task_depends_on_the_draws_and_the_text_alone():
    text = made_text(random.Random(0), 300)
    first, again, other = (draw_exam(text, BOTH, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_names_and_codes_do_not_stand_in_the_text_already():
    """The text holds all that the same draws would hide, so all of it is drawn anew."""
    text = made_text(random.Random(0), 100)
    exam = draw_exam(text, ("needle",), random.Random(5))
    again = draw_exam(f"{text}\n" + "\n".join(exam.sentences).upper(), ("needle",), random.Random(5))
    codes = [set(re.findall(r"\d{6}", " ".join(each.sentences))) for each in (exam, again)]
    assert codes[0].isdisjoint(codes[1])


def test_a_text_without_words_to_count_gets_the_other_task_or_none():
    assert draw_exam("a b c", ("count",), random.Random(0)) is None
    assert draw_exam("a b c", BOTH, random.Random(0)).kind == "needle"
    # Three different numbers of occurrences are needed.
    twice = "word word other other third third third"
    assert draw_exam(twice, ("count",), random.Random(0)) is None
    exam = draw_exam(twice + " more" * 4, ("count",), random.Random(0))
    assert right_answer(twice + " more" * 4, exam.question) == exam.answer.strip()


def test_parts_of_words_do_not_count():
    text = "self self_test myself self, Self self. " + "more " * 4 + "other " * 2
    exam = draw_exam(text, ("count",), random.Random(0))
    assert "self 3" in exam.answer
    assert right_answer(text, exam.question) == exam.answer.strip()


def test_no_benchmark_has_these_sentences_or_values():
    said = [
        path.read_text()
        for folder in evaluation.__path__
        for path in sorted(ROOT.joinpath(folder).rglob("*.py"))
    ]
    said.append(Path(retrieval.__file__).read_text())
    assert any("special magic" in each for each in said)
    for phrase in ("registry note", "access code", "How often does each", "as a whole word"):
        assert any(phrase.lower() in each.lower() for each in (SENTENCE, FIND, COUNT))
        assert not any(phrase.lower() in each.lower() for each in said)
    # Codes have six digits; RULER's numbers have seven, those of its chains, of passkey and LongEval five or fewer.
    assert {len(draw_word("numbers", random.Random(seed))) for seed in range(100)} == {7}
    assert max(LARGEST_KEY, LARGEST_VALUE) < 100_000
    codes = re.findall(r"\d+", " ".join(draw_exam("", ("needle",), random.Random(3)).sentences))
    assert {len(code) for code in codes} == {6}


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"synthetic_share": {"a": 0.1}}, "are for long documents; give long_from"),
        ({"synthetic_share": {"a": 1.5}, "long_from": 8}, "none above 1"),
        ({"synthetic_share": {"a": 0}, "long_from": 8}, "must contain a share above 0"),
        ({"synthetic_tasks": "needle"}, "synthetic_tasks needle has no effect without synthetic_share"),
        ({"synthetic_loss": "answers"}, "synthetic_loss answers has no effect"),
        ({"synthetic_share": {"a": 1}, "long_from": 8, "synthetic_tasks": "count,count"}, "each once"),
        ({"synthetic_share": {"a": 1}, "long_from": 8, "synthetic_tasks": "riddle"}, "needle"),
    ],
)
def test_settings_without_effect_are_refused(values, wrong):
    assert wrong in refusal(MixtureSettings, **values)


def test_a_report_is_explained_by_source():
    counts = WovenCounts("books", long_documents=7, too_long=2)
    settings = MixtureSettings(long_from="4k", synthetic_share={"books": 0.5})
    (sentence,) = explain_synthetic(synthetic_report([counts, WovenCounts("web")], settings, 0, 0))
    assert sentence == (
        "Synthetic tasks in 7 readings of documents of 4,096 tokens or more of source 'books': none; chosen but left "
        "as they are: 2 longer than a row."
    )
    assert explain_synthetic(None) == []
