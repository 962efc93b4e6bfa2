"""LongProc's prompts, and its scores as the authors' program gives them (see longproc_fixture.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.published.longproc import PARTS, READ, SCORED
from tests.evaluation.tasks.published.longproc_cases import ANSWERS, ROWS, folder
from tests.evaluation.tasks.published.longproc_fixture import FIXTURE, sha256
from tests.evaluation.tasks.published.published_cases import results_of, samples_of, task_of, write_rows

RECORDED = json.loads(FIXTURE.read_text())


@pytest.mark.parametrize("dataset", ROWS)
def test_scores_are_the_published_ones(dataset: str, tmp_path: Path) -> None:
    row: dict[str, Any] = ROWS[dataset]
    _, right = READ[dataset](row, folder(tmp_path) / dataset)
    recorded = RECORDED["data"][dataset]
    assert sha256(right) == recorded["right_sha256"]
    answers = ANSWERS[dataset](right)
    metrics = [SCORED[dataset], *([PARTS[dataset]] if dataset in PARTS else [])]
    found = {answer: [metric(answer, [right], row) for metric in metrics] for answer in answers}
    # The share of a search is below zero with the authors if it has no step.
    expected = {
        answer: [max(0, score) for score in scores]
        for answer, scores in zip(answers, recorded["scores"], strict=True)
    }
    assert {answer: pytest.approx(scores) for answer, scores in expected.items()} == found
    assert len({tuple(scores) for scores in expected.values()}) > 3


def test_prompts_are_those_of_the_users_templates(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (sample,) = samples_of("longproc", path, 8192, "html_to_tsv_0.5k")
    assert sample.text == "<p>{cup}</p>\n\ncups: (1) name; (2) price\nname\tprice"
    assert (sample.max_new_tokens, sample.references) == (1024, (ROWS["html_to_tsv"]["gt"],))
    (sample,) = samples_of("longproc", path / "tom_tracking", 8192, "tom_tracking_0.5k")
    assert sample.text == "Say {so}.\nStep 0: Leon {x}.\nWhere?"
    (sample,) = samples_of("longproc", path, 1 << 17, "countdown_0.5k")
    assert sample.text.startswith(
        "# Example\nNumbers: [40, 19, 23, 7]\nTarget: 29\n\n# Search Procedure\nInitial "
    )
    assert sample.text.endswith("\n\nNumbers: [4, 8, 1, 3]\nTarget: 13")
    first, _, second = sample.text.partition("\n\n# Example\n")
    shown = [
        first.partition("\n\n")[2],
        second.partition("\n\n")[2].removesuffix("\n\nNumbers: [4, 8, 1, 3]\nTarget: 13"),
    ]
    assert [sha256(text.rstrip("\n") + "\n") for text in shown] == RECORDED["examples_sha256"]


def test_scores_through_the_suite(tmp_path: Path) -> None:
    route = f"<Route>{ROWS['path_traversal']['answer_nl']}</Route>"
    found = results_of("longproc", folder(tmp_path), 2048, lambda text: route, ["path_traversal_0.5k"])
    assert {task: result.score for task, result in found.items()} == {
        "path_traversal_0.5k": 100,
        "path_traversal_0.5k.longproc_route_part": 100,
    }


def test_pages_and_templates_are_part_of_the_digest_and_must_be_there(tmp_path: Path) -> None:
    path = folder(tmp_path)
    task = task_of("longproc", path, "html_to_tsv_0.5k")
    before = task.settings()
    page = path / "html_to_tsv/webpage/W1.html"
    page.write_text("<p>other</p>")
    assert task.settings() != before
    page.unlink()
    with pytest.raises(RopewalkError, match="there is no page"):
        list(task.questions())
    (path / "html_to_tsv/prompts.yaml").unlink()
    with pytest.raises(RopewalkError, match=r"has no prompts\.yaml; give the folder data of"):
        list(task.questions())
    missing = task_of("longproc", path, "countdown_8k")
    assert missing.unavailable() == f"{path / 'countdown'} has no question of the task countdown_8k"


def test_numbers_without_a_solution_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path)
    write_rows(path / "countdown/countdown_0.5k.json", [{"nums": [1, 1, 1, 1], "target": 99}])
    with pytest.raises(RopewalkError, match=r"no equations of \[1, 1, 1, 1\] reach 99"):
        list(task_of("longproc", path, "countdown_0.5k").questions())
