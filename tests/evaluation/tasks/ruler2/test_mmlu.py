"""RULERv2's tasks with MMLU: prompts as published, and one right answer in the text alone."""

import re
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.registry import METRICS
from ropewalk.evaluation.tasks.ruler2.mmlu import KINDS, read_mmlu
from tests.evaluation.tasks.ruler2.ruler2_cases import (
    TEST_ROWS,
    copied,
    letter_of,
    mmlu_folder,
    samples_of,
    settings_of,
)

LENGTH = 8000


@pytest.mark.parametrize("task", KINDS)
def test_the_text_gives_the_answer(task: str, tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    samples = samples_of(settings, task, LENGTH, TEST_ROWS)
    assert [sample.index for sample in samples] == [*range(TEST_ROWS)]
    assert len({sample.details["question"] for sample in samples}) == TEST_ROWS
    for sample in samples:
        texts, nth = copied(sample.text)
        assert len(texts) == KINDS[task].values
        assert (nth is not None) == (task in ("mv_niah_medium", "mv_niah_hard"))
        needle = texts[nth or 0]
        if KINDS[task].metric == "ruler2_letter":
            said = f"{needle}\nIt is \\boxed{{{letter_of(needle)}}}"
        else:
            said = "\n\n".join([*texts, needle])
        assert METRICS[sample.metric](said, sample.references, sample.details) == 1
        assert METRICS[sample.metric]("I do not know", sample.references, sample.details) < 0.1
        assert sample.max_new_tokens >= 128
        assert (sample.max_new_tokens & (sample.max_new_tokens - 1)) == 0
        # A question has at most 3 % of it.
        assert 0.96 < sample.fill <= 1
        right = [sample.text[start:end] for start, end in sample.details["spans"]]
        assert right == [
            line
            for line in sample.text.partition("\n\nHere are")[0].split("\n\n")
            if any(line.endswith(f": {each}") for each in (texts if KINDS[task].all_texts else [needle]))
        ]
        numbers = re.findall(r"^Question (\d{7}): ", sample.text.partition("\n\nHere are")[0], re.MULTILINE)
        assert len(numbers) == sample.details["texts"]
        counts = sorted(numbers.count(number) for number in set(numbers))
        assert set(counts[1:]) == {KINDS[task].values}


def test_the_question_stands_anywhere_and_is_any_of_its_number(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    places, nths = [], set()
    for seed in range(6):
        for sample in samples_of(settings, "mv_niah_hard", LENGTH, TEST_ROWS, seed):
            ((start, _),) = sample.details["spans"]
            places.append(start / len(sample.text))
            nths.add(copied(sample.text)[1])
    assert min(places) < 0.2
    assert max(places) > 0.8
    assert nths == {0, 1, 2, 3}


def test_prompts_are_the_published_ones(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    def prompt(task: str) -> str:
        (sample,) = samples_of(settings, task, 5000, 1)
        return sample.text

    number = r"\d{7}"
    line = rf"Question {number}: (?:test|training) \d+: [^\n]+ \{{i\}}\? A\. [^\n]+ B\. [^\n]+ C\. [^\n]+ D\. [^\n]+"
    lines = rf"(?:{line}\n\n)+"
    copy = "Below are some questions. I will ask you to copy one of them. Please copy and paste the question you find."
    solve = (
        "Below are some questions. I will ask you to solve one of them. Please solve the question you find and make "
        "sure to put the answer (and only answer) inside \\boxed\\{\\}."
    )
    solved = rf"with an answer from A, B, C, D\.\n(?:{line}\n)?Solution: \\boxed\{{[ABCD]\}}"
    forms = {
        "mk_niah_easy": (copy, lines, rf"Please copy the Question {number} from the context\."),
        "mv_niah_easy": (
            "Below are some questions. I will ask you to copy some of them. Please copy and paste the questions you "
            "find.",
            lines,
            rf"Please find and copy all the Question {number} from the context\.",
        ),
        "mv_niah_medium": (
            copy,
            lines,
            rf"Please first copy all the Question {number} from the context and then copy the \d\w\w \(1 indexed\) "
            rf"Question {number} at the end\.",
        ),
        "mv_niah_hard": (
            copy,
            lines,
            rf"Please copy the \d\w\w \(1 indexed\) Question {number} from the context\.",
        ),
        "mk_niah_medium": (
            solve,
            lines,
            r"Here are some examples to help you understand the task:\n\n"
            rf"(?:Please copy the Question {number} from the context and then solve it {solved}\n\n){{5}}"
            r"Here is the actual task you need to solve:\n\n"
            rf"Please copy the Question {number} from the context and then solve it with an answer from A, B, C, D\.",
        ),
        "mk_niah_hard": (
            solve,
            lines,
            r"Here are some examples to help you understand the task:\n\n"
            rf"(?:Please solve the Question {number} from the context {solved}\n\n){{5}}"
            r"Here is the actual task you need to solve:\n\n"
            rf"Please solve the Question {number} from the context with an answer from A, B, C, D\.",
        ),
    }
    assert forms.keys() == KINDS.keys()
    for task, (introduction, middle, end) in forms.items():
        assert re.fullmatch(rf"{re.escape(introduction)}\n\n{middle}{end}", prompt(task)), task


def test_examples_are_right_and_none_is_the_question(tmp_path: Path) -> None:
    for sample in samples_of(settings_of(tmp_path), "mk_niah_medium", 5000, TEST_ROWS):
        shots = re.findall(r"\nQuestion \d{7}: (.+)\nSolution: \\boxed\{(.)\}", sample.text)
        assert len(shots) == 5
        assert all(letter_of(text) == letter for text, letter in shots)
        assert copied(sample.text)[0][0] not in {text for text, _ in shots}


def test_rows_of_something_else_and_missing_files_are_named(tmp_path: Path) -> None:
    folder = mmlu_folder(tmp_path / "all")
    assert len(read_mmlu(folder).training) == 150
    (folder / "auxiliary_train-00000-of-00001.jsonl").unlink()
    with pytest.raises(
        RopewalkError, match="has no file whose name begins with auxiliary_train; give the folder"
    ):
        read_mmlu(folder)
    (folder / "test.jsonl").write_text('{"question": "x", "choices": ["a"], "answer": 0}\n')
    with pytest.raises(RopewalkError, match=r"row \d+ of .* is not one of MMLU: it needs a question, four"):
        read_mmlu(folder)
