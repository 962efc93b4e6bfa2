"""RULERv2's basic tasks: the lines of a prompt give its answers, and the score is the published one."""

import re

import pytest

from benchmarks.task_checkers import check
from benchmarks.task_checkers import ruler2_values as solved
from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import demo_model_path
from ropewalk.evaluation.tasks.ruler2.basic import VALUES
from tests.evaluation.tasks.task_cases import samples_of, scores_of

LENGTH = 10_000
TASKS = tuple(VALUES)


@pytest.mark.parametrize("task", TASKS)
def test_lines_give_the_answer(task: str) -> None:
    places = []
    for sample in samples_of("ruler2", task, LENGTH, 30):
        check(sample)
        lines = re.findall(r"One of the special magic numbers for (.+) is: (\d{10})\.\n", sample.text)
        assert len(lines) == sample.details["lines"] + VALUES[task]
        assert len({value for _, value in lines}) == len(lines)
        keys = [key for key, _ in lines]
        # All keys have as many values, but for at most three that miss one, as upstream.
        counts = sorted(map(keys.count, set(keys)))
        assert set(counts[3:]) == {VALUES[task]}
        assert all(VALUES[task] - 1 <= count <= VALUES[task] for count in counts)
        if VALUES[task] > 1:
            # Shuffled: in turn, the first quarter would name each key once.
            quarter = [key for key in keys if key != sample.details["key"]][: len(keys) // 4]
            assert len(set(quarter)) < len(quarter)
        assert len(sample.references) == len(sample.details["spans"]) == VALUES[task]
        places += [start / len(sample.text) for start, _ in sample.details["spans"]]
    assert min(places) < 0.2
    assert max(places) > 0.8


def test_prompts_of_4k_tokens_are_full() -> None:
    tokenizer = load_tokenizer(str(demo_model_path()))
    for task in TASKS:
        for sample in samples_of("ruler2", task, 4096, 10, tokenizer=tokenizer):
            check(sample)


def test_prompts_are_the_published_ones() -> None:
    (one,), (four,) = (samples_of("ruler2", task, 3000, 1) for task in TASKS)
    key = one.details["key"]
    assert one.text.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\nOne of the special magic numbers for "
    )
    assert one.text.endswith(
        f".\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for "
        f"{key} mentioned in the provided text is"
    )
    key = four.details["key"]
    assert four.text.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you "
        "about the numbers afterwards.\nOne of the special magic numbers for "
    )
    assert four.text.endswith(
        f".\nWhat are all the special magic numbers for {key} mentioned in the provided text? The special magic "
        f"numbers for {key} mentioned in the provided text are"
    )


@pytest.mark.parametrize("task", TASKS)
def test_models_score_what_they_know(task: str) -> None:
    def half(prompt: str) -> str:
        values = solved(prompt)
        return f"{values[0]}, {values[1]}" if len(values) == 4 else values[0][:9]

    def score(say) -> float:  # type: ignore[no-untyped-def]
        return scores_of("ruler2", task, 4000, 6, say)[task]

    assert score(lambda prompt: f" {', '.join(solved(prompt))}.") == 100
    assert score(lambda prompt: "") == 0
    assert score(half) == (50 if VALUES[task] == 4 else 0)
