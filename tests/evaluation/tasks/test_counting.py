"""Counting: a reader who counts the lines again is right, and scores are those of Oolong's scorer."""

import re
from collections import Counter

import pytest

from benchmarks.task_checkers import check
from benchmarks.task_checkers import counting_answer as solved
from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import demo_model_path
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks import counting
from ropewalk.evaluation.tasks.counting import CLASSES, KINDS, Line, closeness, questions_about, strict
from tests.evaluation.tasks.task_cases import samples_of, scores_of

LENGTH = 24_000
"""In bytes; about 280 lines."""


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Questions about two texts, and some about a third."""
    return samples_of("counting", "counting", LENGTH, 60)


def test_a_reader_who_counts_is_right(samples: list[Sample]) -> None:
    for sample in samples:
        check(sample)
        lines = re.findall(r"Date: \w{3} \d\d, 2024 \|\| User: \d{5} \|\| Instance: .+\n", sample.text)
        assert len(lines) == sample.details["lines"]
        assert all(sum(word in line for words in CLASSES.values() for word in words) == 1 for line in lines)
    kinds = Counter(sample.details["kind"] for sample in samples[:50])
    # A question about a month stands in for one about the busiest of users that tie.
    assert all(kinds[kind] == 10 for kind in KINDS if kind not in ("most", "month"))
    assert kinds["most"] >= 6
    # Most questions need more than one line.
    assert sum(sample.details["difficulty"] > 1 for sample in samples) > 40


def test_questions_share_a_text_25_at_a_time(samples: list[Sample]) -> None:
    texts = [sample.text.partition("\n\nQuestion: ")[0] for sample in samples]
    assert [sample.details["context"] for sample in samples] == [index // 25 for index in range(60)]
    assert [texts.index(each) // 25 for each in texts] == [index // 25 for index in range(60)]
    assert len({sample.text for sample in samples}) == 60


def test_few_users_write_most_lines() -> None:
    (sample,) = samples_of("counting", "counting", 60_000, 1)
    users = Counter(re.findall(r"User: (\d+)", sample.text))
    assert len(users) == 20
    busiest = sum(number for _, number in users.most_common(4))
    assert busiest / users.total() == pytest.approx(0.8, abs=0.07)


def test_prompts_of_4k_tokens_are_full_but_for_a_line() -> None:
    tokenizer = load_tokenizer(str(demo_model_path()))
    for sample in samples_of("counting", "counting", 4096, 10, tokenizer=tokenizer):
        assert closeness(solved(sample.text), sample.references, sample.details) == 1
        # A line takes more than a percent, and the longest question about a text decides.
        assert 0.97 <= sample.fill <= 1


def test_no_question_has_a_tie() -> None:
    lines = [Line("May", user, of, "") for of, user in (("tools", "1"), ("tools", "2"), ("animals", "1"))]
    names = [names for names, *_ in questions_about(lines, "compare")]
    assert ("tools", "animals") in names
    # Classes without any line tie with each other.
    assert ("garments", "vehicles") not in names
    assert questions_about(lines, "most") == [(("animals",), "1", 1)]
    assert questions_about([*lines, lines[0]], "most")[1] == (("tools",), "1", 3)


def test_texts_with_ties_alone_are_asked_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tuple(
        Line("May", "10000", of, f"Date: May 01, 2024 || User: 10000 || Instance: A {words[0]}.")
        for of, words in CLASSES.items()
    )
    monkeypatch.setattr(counting, "lines_of", lambda seed, count: lines)
    samples = samples_of("counting", "counting", 9000, 25)
    kinds = Counter(sample.details["kind"] for sample in samples)
    # Each class has one line, so only the first of the months' questions has an answer of its own.
    assert kinds == {"count": 5, "user": 5, "most": 5, "month": 10}
    assert all(solved(sample.text).endswith(f": {sample.references[0]}") for sample in samples)


def test_models_score_what_they_know() -> None:
    def beside(prompt: str) -> str:
        return re.sub(r": (\d{1,4})$", lambda found: f": {int(found[1]) + 1}", solved(prompt))

    def scores(say) -> tuple[float, float]:  # type: ignore[no-untyped-def]
        found = scores_of("counting", "counting", 6000, 25, say)
        return found["counting"], found["counting.strict"]

    assert scores(solved) == (100, 100)
    assert scores(lambda prompt: "") == (0, 0)
    asked = [sample.details["kind"] for sample in samples_of("counting", "counting", 6000, 25)]
    numbers = sum(kind in ("count", "user", "month") for kind in asked)
    assert 15 <= numbers < 25
    assert scores(beside) == pytest.approx((100 - numbers, 100 - 4 * numbers))


@pytest.mark.parametrize(
    ("said", "right", "kind", "score"),
    [
        ("Answer: 12", "12", "count", 1),
        ("I count.\n**Answer: [12]**", "12", "month", 1),
        ("12", "12", "user", 1),
        ("Answer: 10", "12", "count", 0.75**2),
        ("Answer: 15", "12", "count", 0.75**3),
        ("Answer: -1", "1", "count", 0.75**2),
        ("Answer: 12 instances", "12", "count", 0),
        ("Answer: 12\nNote: sure", "12", "count", 0),
        (f"Answer: {'9' * 5000}", "12", "count", 0),
        ("Answer: 48291", "48291", "most", 1),
        ("Answer: 48292", "48291", "most", 0),
        ("Answer: tools are more common than animals", "more common than", "compare", 1),
        ("more common than", "more common than", "compare", 1),
        ("Answer: tools are less common than animals", "more common than", "compare", 0),
        ("Answer: more common than or less common than", "more common than", "compare", 1),
        ("Answer: more common than or less common than", "less common than", "compare", 0),
        ("", "12", "count", 0),
        ("", "more common than", "compare", 0),
    ],
)
def test_scores(said: str, right: str, kind: str, score: float) -> None:
    assert closeness(said, (right,), {"kind": kind}) == pytest.approx(score)
    assert strict(said, (right,), {"kind": kind}) == (score == 1)
