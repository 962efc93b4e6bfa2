"""RULERv2 as a suite: twelve tasks, and a mean only of all of them."""

from pathlib import Path

import pytest

from ropewalk.evaluation import Settings
from ropewalk.evaluation.suite_loop import not_running
from ropewalk.evaluation.tasks.ruler2.tasks import SUITE, TASKS
from tests.evaluation.tasks.ruler2.ruler2_cases import results_of, settings_of


def test_the_mean_is_that_of_all_twelve_tasks(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, lengths=(6000,), samples=3)
    found = results_of(settings, lambda prompt: prompt)
    assert [*found] == [*TASKS, "overall"]
    assert found["mv_niah_basic"].score == found["mk_niah_easy"].score == 100
    # Copied documents are no answer, and the last paragraph is the request.
    assert found["qa_basic"].score == 0
    assert found["mv_niah_medium"].score < 50
    mean = sum(found[task].score for task in TASKS) / 12
    assert found["overall"].score == pytest.approx(mean)
    assert found["overall"].reason is None


def test_there_is_no_mean_of_some_tasks(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, lengths=(6000,), samples=2, exclude=("qa_hard",))
    assert "overall" not in results_of(settings, lambda prompt: "")


def test_without_files_the_basic_tasks_run_and_the_others_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = Settings(suites=("ruler2",), lengths=(6000,), samples=2)
    found = results_of(settings, lambda prompt: "")
    ran = [task for task, result in found.items() if result.status == "ok"]
    assert ran == ["mk_niah_basic", "mv_niah_basic"]
    mmlu, hotpotqa = not_running(settings, False)
    assert mmlu == (
        "ruler2: mk_niah_easy, mk_niah_medium, mk_niah_hard, mv_niah_easy, mv_niah_medium, mv_niah_hard will not run: "
        "it needs --benchmark-data ruler2=PATH, the folder all of https://huggingface.co/datasets/cais/mmlu"
    )
    assert hotpotqa.startswith("ruler2: qa_basic, qa_easy, qa_medium, qa_hard will not run: HotpotQA's dev")


def test_tasks_have_fewer_prompts_where_they_share_a_mean(tmp_path: Path) -> None:
    assert SUITE.samples_of(Settings(suites=("ruler2",))) == 50
    assert SUITE.samples_of(settings_of(tmp_path)) == 20
    assert SUITE.samples_of(settings_of(tmp_path, exclude=("qa_hard",))) == 50
    assert SUITE.samples_of(settings_of(tmp_path, tasks=("qa_hard",))) == 50
