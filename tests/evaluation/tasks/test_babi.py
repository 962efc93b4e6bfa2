"""bAbI's worlds: another algorithm finds the answer of each story, and as many facts as are named suffice for it."""

import random
from collections import Counter

import pytest

from benchmarks.task_checkers import FACT, babilong_answer
from ropewalk.evaluation.tasks.babi import Story
from ropewalk.evaluation.tasks.babilong import KINDS, one_label

DIFFICULTIES = {"qa1": 1, "qa2": 2, "qa3": 3, "qa4": 1, "qa5": 1}


def stories(task: str, count: int) -> list[Story]:
    draw = random.Random(7)
    found: list[Story] = []
    while len(found) < count:
        if story := KINDS[task].told(draw):
            found.append(story)
    return found


def solved(facts: list[str], question: str) -> str:
    return babilong_answer(f"<context>\n{' '.join(facts)}\n</context>\nQuestion: {question}")


@pytest.mark.parametrize("task", DIFFICULTIES)
def test_the_needed_facts_alone_give_the_answer_of_all_facts(task: str) -> None:
    for story in stories(task, 300):
        assert all(FACT.fullmatch(fact) for fact in story.facts)
        needed = sorted({*story.needed})
        assert len(needed) == DIFFICULTIES[task]
        for facts in (list(story.facts), [story.facts[each] for each in needed]):
            said = solved(facts, story.question)
            assert one_label(said, (story.answer,), {"question": story.question}) == 1, (facts, said)


@pytest.mark.parametrize("task", DIFFICULTIES)
def test_no_answer_and_no_place_of_it_is_much_more_likely_than_others(task: str) -> None:
    made = stories(task, 300)
    answers = Counter(story.answer for story in made)
    assert max(answers.values()) < 0.3 * len(made)
    if task in ("qa2", "qa3", "qa5"):
        # The last fact alone would else tell the answer.
        assert sum(len(story.facts) - 1 in story.needed for story in made) < 0.6 * len(made)
