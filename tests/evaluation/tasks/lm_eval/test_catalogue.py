"""The catalogue of lm_eval's tasks: names are found wherever they lie, and an unknown one is refused."""

import pytest
from lm_eval.tasks import TaskManager

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.lm_eval import catalogue as harness_tasks
from ropewalk.evaluation.tasks.lm_eval.catalogue import Catalogue


def test_known_tasks_are_found_without_an_index_of_all(monkeypatch):
    def of_some_folders(include_path, include_defaults):
        assert include_path
        assert not include_defaults
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(harness_tasks, "TaskManager", of_some_folders)
    catalogue = Catalogue(("hellaswag", "mmlu", "arc_challenge", "truthfulqa_mc2", "longbench", "wikitext"))
    assert [t.name for t in catalogue.tasks_of("hellaswag")] == ["hellaswag"]
    assert len(catalogue.tasks_of("mmlu")) == 57
    assert len(catalogue.tasks_of("longbench")) == 21
    (arc,) = catalogue.tasks_of("arc_challenge")
    assert arc == harness_tasks.StockTask(
        "arc_challenge", "allenai/ai2_arc", "ARC-Challenge", ("train", "validation", "test"), "test", True
    )
    anatomy = catalogue.tasks_of("mmlu")[-1]
    assert anatomy.splits == ("test", "dev")


def test_names_are_found_wherever_they_lie():
    (task,) = Catalogue(("mmlu_flan_cot_zeroshot_anatomy",)).tasks_of("mmlu_flan_cot_zeroshot_anatomy")
    assert task.config == "anatomy"
    assert {t.name for t in Catalogue(("ai2_arc",)).tasks_of("ai2_arc")} == {"arc_challenge", "arc_easy"}


OWN = {
    "a": "task: own_a\ntag: own_tag\ndataset_path: json\ntest_split: test\n",
    "b": "task: own_b\ntag: own_tag\ndataset_path: json\nvalidation_split: validation\n",
    "inner": "group: own_inner\ntask: [own_tag]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n",
    "outer": (
        "group: own_outer\ntask:\n  - own_inner\n  - group: inline\n    task:\n      - task: own_a\n"
        "        dataset_name: other\n"
    ),
    "broken": "group: own_broken\ntask: [own_a, nowhere_at_all]\n",
}


@pytest.fixture
def own(tmp_path):
    for name, text in OWN.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_groups_tags_and_groups_in_groups_are_followed(own):
    catalogue = Catalogue(("own_outer", "own_tag"), own)
    tasks = catalogue.tasks_of("own_outer")
    assert [(task.name, task.config) for task in tasks] == [
        ("own_a", None),
        ("own_b", None),
        ("own_a", "other"),
    ]
    assert [task.evaluated for task in tasks] == ["test", "validation", "test"]
    assert not any(task.from_hub for task in tasks)


def test_the_users_own_tasks_need_no_search_among_lm_evals(own, monkeypatch):
    monkeypatch.setattr(harness_tasks, "_names_in_files", lambda: pytest.fail("all files were searched"))
    assert [task.name for task in Catalogue(("own_tag",), own).tasks_of("own_tag")] == ["own_a", "own_b"]


def test_an_index_that_lacks_a_member_is_not_complete(own):
    index = TaskManager(include_path=str(own), include_defaults=False).task_index
    assert harness_tasks._complete(index, "own_outer")
    assert not harness_tasks._complete(index, "own_broken")
    assert not harness_tasks._complete(index, "nowhere_at_all")


def test_the_users_data_leave_no_trace_in_the_catalogue():
    catalogue = Catalogue(("mmlu",))
    row = {"question": "Why?", "subject": "anatomy", "choices": list("wxyz"), "answer": 1}
    tasks, groups = catalogue.build("mmlu", {"mmlu_anatomy": {"test": [row], "dev": [row]}})
    assert list(tasks) == ["mmlu_anatomy"]
    assert [task.task_name for task in groups["mmlu"].get_all_tasks()] == ["mmlu_anatomy"]
    assert tasks["mmlu_anatomy"].task_docs[0] == row
    assert len(catalogue.tasks_of("mmlu")) == 57
    assert catalogue.tasks_of("mmlu")[0].from_hub


def test_a_folder_of_tasks_goes_before_lm_evals(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: hellaswag\ndataset_path: json\ntest_split: test\n")
    (task,) = Catalogue(("hellaswag",), tmp_path).tasks_of("hellaswag")
    assert task.dataset == "json"


@pytest.mark.parametrize("name", ["helaswag", "mmlu_anatomi", "qqqqqqqqqqqqqqqqqqqqqqqq"])
def test_an_unknown_task_is_refused_and_the_nearest_named(name):
    nearest = {"helaswag": "did you mean hellaswag", "mmlu_anatomi": "did you mean mmlu_anatomy"}
    with pytest.raises(
        RopewalkError, match=f"unknown lm_eval task '{name}'; {nearest.get(name, 'lm-eval ls')}"
    ):
        Catalogue((name,))
