"""Graph walks: answers are what another library finds in the prompt."""

import re

import pytest

from benchmarks.task_checkers import check
from benchmarks.task_checkers import graphwalks_answer as answer
from benchmarks.task_checkers import graphwalks_nodes as solved
from ropewalk.evaluation.tasks.graphwalks import MOST_NODES, exact, f1, openai
from tests.evaluation.tasks.task_cases import check_full, samples_of, scores_of

LENGTH = 8000
TASKS = ("bfs", "parents")


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_is_what_another_library_finds(task: str) -> None:
    samples = samples_of("graphwalks", task, LENGTH, 40)
    check_full(samples)
    for sample in samples:
        check(sample)
        assert set(sample.references) == solved(sample.text)
        assert 1 <= len(sample.references) <= MOST_NODES
        edges = re.findall(r"(\w{8}) -> (\w{8})\n", sample.text)
        assert len(set(edges)) == len(edges) == sample.details["edges"]
        assert all(start != end for start, end in edges)
    if task == "bfs":
        assert {sample.details["difficulty"] for sample in samples} == {1, 2, 3, 4}


@pytest.mark.parametrize("task", TASKS)
def test_questions_share_a_graph_four_at_a_time(task: str) -> None:
    samples = samples_of("graphwalks", task, LENGTH, 10)
    graphs = [sample.text.rpartition("Operation: ")[0] for sample in samples]
    assert [graphs.index(each) // 4 for each in graphs] == [sample.details["context"] for sample in samples]
    assert len(set(graphs)) == 3
    assert len({sample.text for sample in samples}) == 10


@pytest.mark.parametrize("task", TASKS)
def test_models_score_what_they_know(task: str) -> None:
    def half(prompt: str) -> str:
        # Right for each second node that is asked about.
        return answer(prompt) if int(prompt.split("node ")[-1][:8], 16) % 2 else "no idea"

    assert scores_of("graphwalks", task, LENGTH, 8, answer)[task] == 100
    assert scores_of("graphwalks", task, LENGTH, 8, lambda prompt: "") == {
        task: 0,
        f"{task}.exact": 0,
        f"{task}.openai": 100,
    }
    scores = scores_of("graphwalks", task, LENGTH, 8, half)
    asked = [int(sample.details["node"], 16) % 2 for sample in samples_of("graphwalks", task, LENGTH, 8)]
    assert scores[task] == scores[f"{task}.exact"] == pytest.approx(100 * sum(asked) / 8)


@pytest.mark.parametrize(
    ("said", "right", "score", "same", "published"),
    [
        ("Final Answer: [a, b]", ("a", "b"), 1, 1, 0.5),
        ("Final Answer: [a, b]\n", ("a", "b"), 1, 1, 1),
        ("so\nFinal Answer: ['b', \"a\"]", ("a", "b"), 1, 1, 1),
        ("Final Answer: [a, c]", ("a", "b"), 0.5, 0, 1),
        ("Final Answer: [a, b, b, c]", ("a", "b"), 0.8, 0, 0.4),
        ("Final Answer: []", (), 1, 1, 1),
        ("Final Answer: []", ("a",), 0, 0, 1),
        ("Final Answer: [a]", (), 0, 0, 1),
        ("no idea", ("a",), 0, 0, 1),
        ("no idea", (), 0, 0, 1),
        ("Final Answer: [a]\nI hope so", ("a",), 0, 0, 1),
    ],
)
def test_scores(said: str, right: tuple[str, ...], score: float, same: float, published: float) -> None:
    assert f1(said, right) == pytest.approx(score)
    assert exact(said, right) == same
    assert openai(said, right) == pytest.approx(published)
