"""AA-LCR's prompts and what its judge reads."""

from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import Settings
from ropewalk.evaluation.tasks.published.aa_lcr import SUITE, judge_prompt, plain_name, verdict
from ropewalk.evaluation.tasks.suite import JUDGED_BY, VERDICTS, judged_grade
from tests.evaluation.tasks.published.lcr_cases import NAMED, STORED, write_lcr
from tests.evaluation.tasks.published.published_cases import results_of, samples_of, task_of


def test_the_prompt_has_all_documents_and_the_question_as_published(tmp_path: Path) -> None:
    first, *others = samples_of("aa_lcr", write_lcr(tmp_path), 8192)
    assert first.text == (
        "BEGIN INPUT DOCUMENTS\n\nBEGIN DOCUMENT 1:\nACME earned 12 dollars.\nEND DOCUMENT 1\n\nBEGIN DOCUMENT 2:\n"
        "Nothing here.\nEND DOCUMENT 2\n\nEND INPUT DOCUMENTS\n\nAnswer the following question using the input "
        "documents provided above.\n\nSTART QUESTION\n\nHow much 0?\n\nEND QUESTION\n"
    )
    assert (first.references, len(others)) == (("12 dollars",), 2)


def test_names_are_those_of_the_archive(tmp_path: Path) -> None:
    assert plain_name(NAMED) == plain_name(STORED) == "Q1 - ACME's report.txt"
    assert plain_name("Türk Telekom.txt".encode().decode("cp437")) == "Türk Telekom.txt"
    assert plain_name("s\u0327.txt") == "\u015f.txt"


@pytest.mark.parametrize("names", ["c.txt", "../set1/b.txt", "/etc/passwd"])
def test_a_document_outside_the_folder_or_missing_is_refused(tmp_path: Path, names: str) -> None:
    with pytest.raises(RopewalkError, match=r"its document .* is not in "):
        list(task_of("aa_lcr", write_lcr(tmp_path, names)).questions())


def test_a_set_outside_the_folder_is_refused(tmp_path: Path) -> None:
    table = write_lcr(tmp_path) / "AA-LCR_Dataset.csv"
    table.write_text(table.read_text().replace("set1", "../../lcr"))
    with pytest.raises(RopewalkError, match=r"'\.\./\.\./lcr' is not the name of a folder"):
        list(task_of("aa_lcr", tmp_path).questions())


def test_a_table_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no folder lcr; give the folder of"):
        SUITE.tasks(Settings(suites=("aa_lcr",), benchmark_data={"aa_lcr": tmp_path}))


def test_a_changed_document_changes_the_digest(tmp_path: Path) -> None:
    before = task_of("aa_lcr", write_lcr(tmp_path)).settings()
    assert task_of("aa_lcr", tmp_path).settings() == before
    (tmp_path / "lcr" / "Company Documents" / "set1" / "b.txt").write_text("Something.")
    assert task_of("aa_lcr", tmp_path).settings() != before


def test_answers_wait_for_a_judge(tmp_path: Path) -> None:
    result = results_of("aa_lcr", write_lcr(tmp_path), 8192, lambda text: "12 dollars")["aa_lcr"]
    assert (result.status, result.reason) == (
        "not run",
        "its 3 answers wait for a judge: ropewalk eval judge",
    )


def test_what_the_judge_reads_and_says() -> None:
    prompt = judge_prompt("It is {12}.", ["12 dollars"], {"question": "How much?"})
    assert prompt.endswith(
        "The question, for reference only: How much?\nThe OFFICIAL ANSWER: 12 dollars\nCANDIDATE ANSWER TO ASSESS: "
        "It is {12}.\n\nReply only with CORRECT or INCORRECT."
    )
    said = {"CORRECT": True, "correct.": True, "**INCORRECT**": False, "It is CORRECT": None, "": None}
    assert {each: verdict(each) for each in said} == said


def test_the_verdict_of_the_judge_that_counts_is_the_score() -> None:
    verdicts = {"a": 1.0, "b": 0.0, "c": None}
    assert judged_grade("", [], {VERDICTS: verdicts, JUDGED_BY: "a"}) == 1
    assert judged_grade("", [], {VERDICTS: verdicts, JUDGED_BY: "b"}) == 0
    assert judged_grade("", [], {VERDICTS: verdicts, JUDGED_BY: "c"}) == 0
    assert judged_grade("", [], {}) == 0
