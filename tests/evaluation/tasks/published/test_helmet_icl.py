"""HELMET's in-context learning: its prompt, balanced shots, permuted labels, and files of the user."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import ModelUnderTest, Settings, evaluate_model
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks.published.helmet_icl import SUITE, TASKS, HelmetIcl
from tests.evaluation.evaluation_cases import word_tokenizer
from tests.evaluation.tasks.published.published_cases import write_rows
from tests.evaluation.tasks.task_cases import Reader, check_full

LABELS = 4


def rows(name: str, count: int, field: str) -> list[dict[str, Any]]:
    # Label 0 has most texts, as in real data.
    return [{"text": f"{name} {n}", field: 0 if n % 2 else n // 2 % LABELS} for n in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for source in TASKS.values():
        place = tmp_path / source.folder
        place.mkdir(exist_ok=True)
        fields = [each.field for each in TASKS.values() if each.folder == source.folder]
        for split in ("train", *([source.split] if source.split else [])):
            own = [
                {k: v for field in fields for k, v in rows(split, 60, field)[n].items()} for n in range(60)
            ]
            write_rows(place / f"{split}-00000-of-00001.jsonl", own)
    return tmp_path


def samples_of(folder: Path, task: str, length: int = 2000, count: int = 12) -> list[Sample]:
    return list(HelmetIcl(task, folder).samples(PromptEncoder(word_tokenizer()), length, count, 0))


def shots_in(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(\w+ \d+)\nlabel: (\d+)\n\n", text)


@pytest.mark.parametrize("task", TASKS)
def test_shots_are_balanced_and_decide_the_label(folder: Path, task: str) -> None:
    found = samples_of(folder, task)
    check_full(found)
    truth = {each["text"]: each["n"] for each in rows("train", 60, "n") + rows(TASKS[task].split, 60, "n")}
    for sample in found:
        assert sample.text.startswith(
            'Use the provided mapping from the text to label to assign a label to the text. Only output "label: '
            '{label}" and nothing else. \n\n'
        )
        shots, question = shots_in(sample.text), sample.text.splitlines()[-1]
        assert (len(shots), sample.answer_prefix) == (sample.details["shots"], "label:")
        counts = Counter(shown for _, shown in shots)
        assert max(counts.values()) - min(counts.values()) <= 1
        # One permutation of the labels, by which the question has its label, too.
        mapping = {truth[text]: shown for text, shown in shots}
        assert len(set(mapping.values())) == LABELS == len(mapping)
        assert all(mapping[truth[text]] == shown for text, shown in shots)
        assert sample.references == (mapping[truth[question]],)
        assert question not in {text for text, _ in shots}
        assert question.startswith(TASKS[task].split or "train")
    assert len({tuple(shots_in(each.text)[:3]) for each in found}) == len(found)
    # Another permutation in other samples.
    mappings = [sorted({(truth[text], shown) for text, shown in shots_in(each.text)}) for each in found]
    assert any(each != mappings[0] for each in mappings)


def test_no_text_is_a_shot_twice_before_all_of_its_label_were(folder: Path) -> None:
    (sample,) = samples_of(folder, "banking77", 6000, 1)
    texts = Counter(text for text, _ in shots_in(sample.text))
    by_label: dict[str, list[int]] = {}
    for text, shown in dict(shots_in(sample.text)).items():
        by_label.setdefault(shown, []).append(texts[text])
    assert all(max(each) - min(each) <= 1 for each in by_label.values())


def test_questions_are_balanced_and_fewer_than_asked_for_if_there_are_fewer(folder: Path) -> None:
    of = {each["text"]: each["n"] for each in rows("test", 60, "n")}
    asked = [of[each.text.splitlines()[-1]] for each in samples_of(folder, "trec_fine", count=8)]
    assert Counter(asked) == dict.fromkeys(range(LABELS), 2)
    assert len(samples_of(folder, "trec_fine", count=1000)) == 60


def test_a_reader_of_the_shots_is_right_and_the_mean_is_over_all_five(folder: Path) -> None:
    def say(text: str) -> str:
        shots: Sequence[tuple[str, str]] = shots_in(text)
        question = text.splitlines()[-2]
        number = int(question.split()[1])
        # The rule by which the rows were made.
        label = 0 if number % 2 else number // 2 % LABELS
        same = (
            s for t, s in shots if (0 if int(t.split()[1]) % 2 else int(t.split()[1]) // 2 % LABELS) == label
        )
        return f" {next(same)}"

    settings = Settings(
        suites=("helmet_icl",), lengths=(2000,), samples=6, benchmark_data={"helmet_icl": folder}
    )
    results = evaluate_model(ModelUnderTest(word_tokenizer(), Reader(say)), settings)
    assert {each.task: each.score for each in results} == dict.fromkeys([*TASKS, "overall"], 100)


def test_missing_folders_and_other_rows_are_named(folder: Path, tmp_path: Path) -> None:
    assert "it needs --benchmark-data helmet_icl=PATH" in str(HelmetIcl("nlu", None).unavailable())
    assert HelmetIcl("nlu", tmp_path / "trec").unavailable() == (
        f"{tmp_path / 'trec'} has no folder nlu_evaluation_data"
    )
    place = folder / "banking77"
    write_rows(place / "train-00000-of-00001.jsonl", [{"text": "x", "label": "card"}])
    with pytest.raises(RopewalkError, match="has no text with a number as label"):
        samples_of(folder, "banking77")
    write_rows(place / "train-00000-of-00001.jsonl", [{"text": "x", "label": 9}])
    with pytest.raises(RopewalkError, match="has no texts with labels in files train and test"):
        samples_of(folder, "banking77")
    assert {*SUITE.tasks(Settings(suites=("helmet_icl",)))} == {*TASKS}
