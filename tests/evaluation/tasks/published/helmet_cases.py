"""HELMET's files in small: questions with passages, the right one at two depths, and examples."""

from pathlib import Path
from typing import Any

from tests.evaluation.tasks.published.published_cases import write_rows


def passages(count: int, right: int, words: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{number}",
            "title": f"T{number} {{x}}",
            "text": f"{'right' if number == right else 'other'} " * words,
        }
        for number in range(count)
    ]


def rag_folder(folder: Path, questions: int = 5, words: int = 3, name: str = "nq", count: int = 50) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [
        {
            "question": f"question {number}?",
            "answers": [f"answer {number}", "The yes"],
            "depth": depth,
        }
        | {"ctxs": passages(count, int(depth * (count - 1)), words)}
        # Only the last of five questions is too popular.
        | ({"s_pop": 1000 if number == 4 else 999} if name == "popqa" else {})
        for number in range(questions)
        for depth in (0.0, 1.0)
    ]
    examples = [{**row, "ctxs": row["ctxs"][:3]} for row in rows]
    if name == "popqa":
        test, shots = f"popqa_test_1000_k{count}_dep6.jsonl", "popqa_test_1000_k3_dep6.jsonl"
    else:
        depths = 3 if name == "hotpotqa" else 6
        test = f"{name}-dev-multikilt_1000_k{count}_dep{depths}.jsonl"
        shots = f"{name}-train-multikilt_1000_k3_dep{depths}.jsonl"
        examples = [{**row, "question": f"{row['question']} of examples"} for row in examples]
    write_rows(folder / test, rows)
    write_rows(folder / shots, examples)
    return folder


def ranking_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [
        {"qid": f"q{number}", "query": f"query {number}"}
        | {"ctxs": [{"id": f"{each}", "text": f"text {each}", "label": each % 4} for each in range(50)]}
        for number in range(4)
    ]
    write_rows(folder / "test_reranking_data_k50_dep3.jsonl", rows)
    short = [{**row, "ctxs": row["ctxs"][:3]} for row in rows]
    write_rows(folder / "test_reranking_data_k10_dep3.jsonl", short)
    return folder
