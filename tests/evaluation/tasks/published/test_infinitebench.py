"""InfiniteBench's prompts and what is read from its files."""

from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.settings import Settings
from ropewalk.evaluation.tasks.published import rows
from ropewalk.evaluation.tasks.published.infinitebench import FORMS, SUITE
from ropewalk.evaluation.tasks.published.rows import PublishedTask
from tests.evaluation.evaluation_cases import word_tokenizer
from tests.evaluation.tasks.published.published_cases import results_of, samples_of, task_of, write_rows

OPTIONS = ["one {x}", "two", "three", "four"]
ROWS: dict[str, dict[str, Any]] = {
    "passkey": {"input": "What is the pass key?", "answer": ["71432"]},
    "number_string": {"input": "What is the sequence of digits?", "answer": "0071432711"},
    "kv_retrieval": {"input": '\nKey: "a"\nThe value associated with the specified key is: ', "answer": "b"},
    "longbook_sum_eng": {"input": "", "answer": ["She leaves.", "She stays."]},
    "longbook_choice_eng": {"input": "Who?", "answer": ["two"], "options": OPTIONS},
    "longbook_qa_eng": {"input": "Who?", "answer": ["a", "the b"]},
    "longbook_qa_chn": {"input": "谁？", "answer": ["福气龙"]},
    "longdialogue_qa_eng": {"input": "", "answer": ["ACE", "ACE ROTHSTEIN"]},
    "math_find": {"input": "The 2nd largest number of the list above is: ", "answer": [88]},
    "math_calc": {"input": "", "answer": [[1, 4, 8]]},
    "code_run": {"input": "Please give me the value of func_6351(-2).", "answer": [4]},
    "code_debug": {"input": "", "answer": ["three", "C"], "options": OPTIONS},
}


def folder(path: Path, words: int = 3) -> Path:
    for task, row in ROWS.items():
        write_rows(path / f"{task}.jsonl", [{"id": 7, "context": "word " * words, **row}])
    # Files of other tasks of the same folder.
    write_rows(path / "longbook_sum_chn.jsonl", [{"id": 7, "context": "", "input": "", "answer": [""]}])
    return path


def test_each_task_reads_its_own_file_alone(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "longbook_sum_chn.jsonl").write_text("broken")
    references = {}
    for task in ROWS:
        (sample,) = samples_of("infinitebench", tmp_path, 40_000, task)
        assert "word word word" in sample.text
        assert sample.max_new_tokens == FORMS[task].room
        references[task] = sample.references
    assert references == {
        **{task: (row["answer"],) for task, row in ROWS.items() if isinstance(row["answer"], str)},
        "passkey": ("71432",),
        "longbook_sum_eng": ("She leaves.", "She stays."),
        "longbook_choice_eng": ("two", "B"),
        "longbook_qa_eng": ("a", "the b"),
        "longbook_qa_chn": ("福气龙",),
        "longdialogue_qa_eng": ("ACE", "ACE ROTHSTEIN"),
        "math_find": ("88",),
        "math_calc": ("[1, 4, 8]",),
        "code_run": ("4",),
        "code_debug": ("three", "C"),
    }
    alone = task_of("infinitebench", tmp_path / "passkey.jsonl", "math_find")
    assert alone.unavailable() == f"{tmp_path / 'passkey.jsonl'} has no question of the task math_find"


def test_prompts_are_the_published_ones(tmp_path: Path) -> None:
    folder(tmp_path)

    def text(task: str, chat: bool = False) -> str:
        settings = Settings(suites=("infinitebench",), benchmark_data={"infinitebench": tmp_path}, chat=chat)
        made = SUITE.tasks(settings)[task]
        assert isinstance(made, PublishedTask)
        ((_, found),) = made.questions()
        return found.draft().text

    assert text("passkey") == (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        "about the important information.\n\nword word word \n\nWhat is the pass key?\n\nThe pass key is"
    )
    assert text("passkey", chat=True).endswith(
        "information there.\n\nword word word \n\nWhat is the pass key?"
    )
    assert text("longbook_choice_eng").endswith(
        "\n\nQuestion: Who?\nA. one {x}\nB. two\nC. three\nD. four\n\nThe letter of the correct answer is"
    )
    assert text("math_find") == (
        "What is the 2nd largest number in the following list?\n\nword word word \n\n"
        "The 2nd largest number of the list above is: "
    )
    assert "a function called func_6351 in" in text("code_run")
    assert text("code_run").endswith("exact value of func_6351(-2). The value of func_6351(-2) is")


def test_what_is_too_long_loses_its_middle(tmp_path: Path) -> None:
    folder(tmp_path, 800)
    found = results_of(
        "infinitebench", tmp_path, 400, lambda text: "The key: 71432", ["passkey", "math_find"]
    )
    assert {task: result.score for task, result in found.items()} == {"passkey": 100, "math_find": 0}
    assert "1 of 1 prompts were too long, and part of their text was left out" in str(found["passkey"].reason)
    # The further metric of the same answers.
    named = results_of("infinitebench", tmp_path, 400, lambda text: "Ace?", ["longdialogue_qa_eng"])
    assert [*named] == ["longdialogue_qa_eng", "longdialogue_qa_eng.infinitebench_any_name"]


def test_without_names_all_tasks_but_the_longest_run() -> None:
    assert set(FORMS) - set(SUITE.default) == {"math_calc"}


@pytest.mark.parametrize(
    ("task", "row", "what"),
    [
        ("math_find", {"input": "Find it"}, "its input is 'Find it'"),
        ("code_debug", {"answer": ["five"]}, "'five' is not in"),
        ("code_debug", {"options": ["one", "two"]}, "'OPTION_C'"),
    ],
)
def test_another_row_is_refused(tmp_path: Path, task: str, row: dict[str, Any], what: str) -> None:
    path = write_rows(tmp_path / f"{task}.jsonl", [{"context": "word", **ROWS[task], **row}])
    with pytest.raises(RopewalkError, match=what):
        task_of("infinitebench", path, task).samples(PromptEncoder(word_tokenizer()), 1000, 1, 0)


def test_without_its_package_the_summary_alone_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path)
    monkeypatch.setattr(rows, "find_spec", lambda name: None)
    reasons = {task: task_of("infinitebench", tmp_path, task).unavailable() for task in ROWS}
    assert {task for task, reason in reasons.items() if reason} == {"longbook_sum_eng"}
    assert reasons["longbook_sum_eng"] == (
        "its score needs the package rouge_score; run pip install 'ropewalk[infinitebench]'"
    )
