"""LongBench Pro's prompts, groups and scores; those of the authors' code are recorded (test_registry_scorers)."""

import json
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import Settings
from ropewalk.evaluation.tasks.published.longbench_pro import KINDS, SUITE, in_order, score
from tests.evaluation.tasks.published.published_cases import results_of, samples_of, task_of, write_rows


def row(task: str = "T3.2 Single-Hop Fact QA", **changes: Any) -> dict[str, Any]:
    return {
        "id": "a",
        "context": "Once there was a fox.",
        "language": "English",
        "token_length": "8k",
        "primary_task": "T3. Evidence-Grounded QA",
        "secondary_task": task,
        "contextual_requirement": "Partial",
        "question_nonthinking": "Who? Answer after [Answer].",
        "question_thinking": "Who? Think, then answer after [Answer].",
        "answer": ["A fox"],
        "difficulty": "Easy",
        **changes,
    }


def test_prompts_scores_and_groups(tmp_path: Path) -> None:
    rows = [row(), row("T4.1 Global-Coverage Constrained Summary"), row(difficulty="Hard", answer=["A wolf"])]
    path = write_rows(tmp_path / "longbench_pro.jsonl", rows)
    first, second = samples_of("longbench_pro", path, 2048)
    assert first.text == "Once there was a fox.\n\n\n\nWho? Answer after [Answer]."
    assert (first.index, second.index) == (0, 2)
    found = results_of("longbench_pro", path, 2048, lambda text: "It was\n[Answer]\na  FOX")
    assert found["longbench_pro"].score == found["longbench_pro.longbench_pro_order"].score == 50
    groups = found["longbench_pro"].details["groups"]
    assert {each["label"]: each["score"] for each in groups["difficulty"]} == {"Easy": 100, "Hard": 0}
    assert set(groups) == {"primary_task", "token_length", "contextual_requirement", "difficulty", "language"}


def test_a_thinking_model_gets_the_thinking_question(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "longbench_pro.jsonl", [row()])
    settings = Settings(
        suites=("longbench_pro",), benchmark_data={"longbench_pro": path}, thinking_tokens=100, chat=True
    )
    ((_, asked),) = SUITE.tasks(settings)["longbench_pro"].questions()  # type: ignore[attr-defined]
    assert asked.after == "\n\n\n\nWho? Think, then answer after [Answer]."


def test_every_task_but_the_summaries_has_a_score() -> None:
    # The numbers of secondary tasks of each primary one.
    tasks = dict(zip(range(1, 12), (2, 2, 2, 2, 2, 3, 3, 3, 2, 2, 2), strict=True))
    numbers = {f"T{primary}.{n}" for primary, count in tasks.items() for n in range(1, count + 1)}
    assert set(KINDS) == numbers - {"T4.1", "T4.2"}


def test_two_lines_are_not_all_of_an_order() -> None:
    right, details = ["a", "b", "c", "d"], {"kind": "order"}
    assert score("a\nb", right, details) == 1
    assert in_order("a\nb", right, details) == pytest.approx(1 / 6)
    assert in_order("a\nb\nc\nd", right, details) == score("a\nb\nc\nd", right, details) == 1
    assert in_order("a\nb\nc\nd\ne", right, details) == score("a\nb\nc\nd\ne", right, details) == 0.6
    assert in_order("", right, details) == 0
    assert in_order("a", ["a"], {"kind": "first"}) == 1


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "longbench_pro.json"
    path.write_text(json.dumps([row("T12.1 Something")]))
    with pytest.raises(RopewalkError, match=r"row 1 of .* is odd \(its task is 'T12.1 Something'"):
        list(task_of("longbench_pro", path).questions())
