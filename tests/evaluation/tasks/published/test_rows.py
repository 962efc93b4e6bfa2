"""Questions from files: which a length has, what is cut of them, and what is said of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import demo_model_path, embedded_documents
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import LengthTooShort
from ropewalk.evaluation.tasks.published import rows
from ropewalk.evaluation.tasks.published.rows import PublishedTask, Question, cut_to
from tests.evaluation.evaluation_cases import word_tokenizer
from tests.evaluation.tasks.published.published_cases import write_rows


def question(row: Any, file: str) -> Question | None:
    if row["kind"] != "mine":
        return None
    return Question(row["text"], ("yes",), "before ", " after", {"file": file}, answer=row.get("answer", ""))


def written(folder: Path, sizes: list[int], kind: str = "mine") -> Path:
    return write_rows(
        folder / f"{kind}.jsonl",
        [{"kind": kind, "text": " ".join(["the"] * size)} for size in sizes],
    )


def task(path: Path | None, **fields: Any) -> PublishedTask:
    return PublishedTask("suite", "task", "choice", 10, "the file of the authors", question, path, **fields)


def encoder() -> PromptEncoder:
    return PromptEncoder(word_tokenizer())


def test_a_length_has_what_fits_and_says_what_does_not(tmp_path: Path) -> None:
    path = written(tmp_path, [5, 60, 200, 30, 500])
    found = list(task(path).samples(encoder(), 100, 1000, 0))
    assert [sample.index for sample in found] == [0, 1, 3]
    assert all(sample.prompt_tokens + sample.max_new_tokens <= 100 for sample in found)
    assert {sample.details["too_long"] for sample in found} == {2}
    # Exactly as long as the length: prompt and room take all of it.
    longest = found[1].prompt_tokens + 10
    assert 1 in {sample.index for sample in task(path).samples(encoder(), longest, 1000, 0)}
    assert 1 not in {sample.index for sample in task(path).samples(encoder(), longest - 1, 1000, 0)}


def test_bins_share_no_prompt_and_lose_none(tmp_path: Path) -> None:
    path = written(tmp_path, list(range(1, 400, 7)))
    lengths = [32, 64, 128, 256, 512]
    found = {length: list(task(path, binned=True).samples(encoder(), length, 1000, 0)) for length in lengths}
    for length, samples in found.items():
        assert all(length / 2 < each.prompt_tokens + each.max_new_tokens <= length for each in samples)
        assert not any("too_long" in each.details for each in samples)
    indices = [each.index for samples in found.values() for each in samples]
    fitting = [each.index for each in task(path).samples(encoder(), 512, 1000, 0)]
    longer = [
        each for each in fitting if each not in {s.index for s in task(path).samples(encoder(), 16, 99, 0)}
    ]
    assert sorted(indices) == longer


def test_fewer_samples_are_some_of_more(tmp_path: Path) -> None:
    path = written(tmp_path, [20] * 40)
    few, more = ([each.index for each in task(path).samples(encoder(), 100, count, 0)] for count in (10, 20))
    assert len(few) == 10
    assert set(few) < set(more)
    assert few == sorted(few)
    assert few != [each.index for each in task(path).samples(encoder(), 100, 10, 1)]


def test_room_is_twice_the_right_answer_and_at_least_the_fewest(tmp_path: Path) -> None:
    lines = [{"kind": "mine", "text": "a b", "answer": " ".join(["the"] * size)} for size in (2, 30)]
    path = write_rows(tmp_path / "a.jsonl", lines)
    found = list(task(path, twice_the_answer=True).samples(encoder(), 100, 9, 0))
    assert [each.max_new_tokens for each in found] == [10, 60]


@pytest.mark.parametrize("tokens", [64, 100, 333, 700])
def test_a_cut_leaves_out_as_little_of_the_middle_as_it_must(tokens: int) -> None:
    text = "\n".join(each.text for each in embedded_documents("validation"))[:6000]
    real = PromptEncoder(load_tokenizer(str(demo_model_path())))
    asked = Question(text, ("x",), "Read this:\n", "\nWhat is it?")
    kept, prompt_tokens, whole = cut_to(asked, real, tokens)
    draft = asked.draft(kept)
    assert real.count(*draft.asked) == prompt_tokens
    assert 0.98 * tokens <= prompt_tokens <= tokens < whole == real.count(*asked.draft().asked)
    middle = draft.text.removeprefix(asked.before).removesuffix(asked.after)
    head = (kept + 1) // 2
    assert (middle[:head], middle[head:]) == (text[:head], text[len(text) - kept + head :])


def test_what_fits_is_not_cut(tmp_path: Path) -> None:
    path = written(tmp_path, [5, 80, 200])
    found = list(task(path, cut=True).samples(encoder(), 120, 1000, 0))
    assert [("tokens_cut" in each.details) for each in found] == [False, False, True]
    assert (
        found[2].details["tokens_cut"]
        == encoder().count("before " + " ".join(["the"] * 200) + " after") - found[2].prompt_tokens
    )
    with pytest.raises(LengthTooShort) as caught:
        task(path, cut=True).samples(encoder(), 12, 1000, 0)
    assert list(task(path, cut=True).samples(encoder(), caught.value.shortest, 1000, 0))


def test_files_of_a_folder_are_read_in_order_and_other_rows_left_out(tmp_path: Path) -> None:
    written(tmp_path, [5, 6])
    written(tmp_path, [7], "another")
    made = task(tmp_path)
    assert [(number, each.details["file"]) for number, each in made.questions()] == [(1, "mine"), (2, "mine")]
    assert task(written(tmp_path, [7], "another")).unavailable() == (
        f"{tmp_path / 'another.jsonl'} has no question of the task task"
    )


def test_without_a_file_it_says_where_the_file_is() -> None:
    reason = task(None).unavailable()
    assert reason == "it needs --benchmark-data suite=PATH, the file of the authors"


def test_a_row_of_something_else_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"kind": "mine", "text": "x"}, {"kind": "mine"}])
    with pytest.raises(RopewalkError, match=r"row 2 of .*a\.jsonl has no field 'text'; give the"):
        list(task(path).questions())
    (tmp_path / "empty").mkdir()
    with pytest.raises(RopewalkError, match="has no file whose name ends in one of"):
        list(task(tmp_path / "empty").questions())


def test_a_changed_file_changes_the_digest_and_the_rows(tmp_path: Path) -> None:
    path = written(tmp_path, [5])
    before = task(path).settings()
    assert task(path).settings() == before
    written(tmp_path, [5, 6])
    assert task(path).settings() != before
    assert len(list(task(path).questions())) == 2


def test_very_long_rows_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [5, 3000])
    counted: list[int] = []

    class Counting(PromptEncoder):
        def counts(self, pieces: Any) -> list[int]:
            counted.extend(len(each[0]) for each in pieces)
            return super().counts(pieces)

    (sample,) = task(path).samples(Counting(word_tokenizer()), 100, 9, 0)
    assert sample.details["too_long"] == 1
    assert max(counted) < 1000
    # With a limit that lets it pass, counting it gives the same.
    monkeypatch.setattr(rows, "MOST_BYTES", 10_000)
    (again,) = task(path).samples(Counting(word_tokenizer()), 100, 9, 0)
    assert again == replace(sample)
    assert max(counted) > 1000


def test_a_text_without_tokens_is_refused_before_the_work(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "a.jsonl", [{"kind": "mine", "text": "x"}, {"kind": "mine", "text": "half \ud800"}]
    )
    assert task(path).unavailable() is None
    for cut in (False, True):
        with pytest.raises(RopewalkError, match=r"row 2 of .* is odd \('utf-8' codec can't encode"):
            task(path, cut=cut).samples(encoder(), 100, 9, 0)


def test_the_first_question_says_that_a_task_is_there(tmp_path: Path) -> None:
    path = written(tmp_path, [5, 6, 7])
    read: list[str] = []

    def counted(row: Any, file: str) -> Question | None:
        read.append(row["text"])
        return question(row, file)

    assert replace(task(path), question=counted).unavailable() is None
    assert len(read) == 1
