"""In-context learning: the shots alone decide the label, and nothing else does."""

import re
from collections import Counter

import pytest

from benchmarks.task_checkers import check
from benchmarks.task_checkers import icl_label as solved
from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import demo_model_path
from ropewalk.evaluation.tasks.icl import CATEGORIES, TEMPLATES, label
from tests.evaluation.tasks.task_cases import samples_of, scores_of

LENGTH = 8000
TASKS = ("permuted", "natural")


def shots_in(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(.+)\nlabel: (\d+)\n\n", text)


@pytest.mark.parametrize("task", TASKS)
def test_shots_decide_the_label(task: str) -> None:
    for sample in samples_of("icl", task, LENGTH, 40):
        check(sample)
        shots = shots_in(sample.text)
        assert len(shots) == sample.details["shots"]
        counts = Counter(shown for _, shown in shots)
        assert set(counts) == {str(number) for number in range(CATEGORIES)}
        assert max(counts.values()) - min(counts.values()) <= 1
        question = sample.text.splitlines()[-1]
        assert question not in {text for text, _ in shots}
        assert sample.answer_prefix == "label:"


def test_prompts_of_4k_tokens_are_full() -> None:
    tokenizer = load_tokenizer(str(demo_model_path()))
    for task in TASKS:
        for sample in samples_of("icl", task, 4096, 12, tokenizer=tokenizer):
            check(sample)


def test_a_category_has_words_of_its_own_and_no_other_mark() -> None:
    (sample,) = samples_of("icl", "permuted", 50_000, 1)
    shared = set(re.findall(r"\w+", " ".join(TEMPLATES)))
    labels: dict[str, set[str]] = {}
    for text, shown in shots_in(sample.text):
        for word in re.findall(r"\w+", text):
            labels.setdefault(word, set()).add(shown)
    assert {word for word, found in labels.items() if len(found) > 1} <= shared
    assert all(len(labels[word]) == CATEGORIES for word in shared)


def test_labels_are_permuted_for_each_sample_or_natural() -> None:
    def mapping(text: str) -> dict[str, str]:
        return {word: shown for said, shown in shots_in(text) for word in re.findall(r"[a-z]{6,}", said)}

    first, second, *_ = (mapping(sample.text) for sample in samples_of("icl", "permuted", LENGTH, 5))
    both = first.keys() & second.keys() - {"before"}
    assert len(both) > CATEGORIES
    assert sum(first[word] == second[word] for word in both) < len(both) / 3
    natural = samples_of("icl", "natural", LENGTH, 25)
    assert [sample.details["context"] for sample in natural] == [index // 10 for index in range(25)]
    assert len({sample.text.rpartition("\n\n")[0] for sample in natural}) == 3
    assert len({sample.text for sample in natural}) == 25
    first, second = mapping(natural[0].text), mapping(natural[10].text)
    assert all(first[word] == second[word] for word in first.keys() & second.keys() - {"before"})


@pytest.mark.parametrize("task", TASKS)
def test_models_score_what_they_know(task: str) -> None:
    def half(prompt: str) -> str:
        found = solved(prompt)
        return found if int(found) % 2 else "I do not know."

    odd = [int(sample.references[0]) % 2 for sample in samples_of("icl", task, LENGTH, 12)]
    assert 0 < sum(odd) < 12
    assert scores_of("icl", task, LENGTH, 12, solved) == {task: 100}
    assert scores_of("icl", task, LENGTH, 12, lambda prompt: "") == {task: 0}
    assert scores_of("icl", task, LENGTH, 12, half) == {task: pytest.approx(100 * sum(odd) / 12)}


@pytest.mark.parametrize(
    ("said", "score"),
    [
        (" 7", 1),
        ("7\n\nThe next text.\nlabel: 3", 1),
        ("label: 7", 1),
        ("**7**.", 1),
        ("label: 17", 0),
        ("77", 0),
        ("3\nlabel: 7", 0),
        ("7 or 3", 0),
        ("The label is 7", 0),
        ("", 0),
    ],
)
def test_scores(said: str, score: float) -> None:
    assert label(said, ("7",)) == score
