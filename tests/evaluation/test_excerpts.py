"""Excerpts of prompts keep what a reader looks for, and are read as they were written."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.excerpts import AT_EACH_END, excerpt, gaps, needles, parts_of
from ropewalk.evaluation.predictions import Prediction, read_predictions, write_predictions
from ropewalk.evaluation.prompt import plain_chat, turn_starts
from ropewalk.evaluation.samples import Sample


def prediction(index: int = 0, answer: str = " 42", score: float = 1.0, task: str = "passkey") -> Prediction:
    return Prediction(
        "passkey", task, 1024, index, "ab", answer, ("42",), "first integer", score, 1000, 1, 0.9, 3, True
    )


def sample(text: str, references: tuple[str, ...] = ("42",), **more) -> Sample:
    return Sample("passkey", "passkey", 1024, 0, text, "", references, "first integer", 5, 1000, 1, **more)


def answered(text: str, **more) -> Prediction:
    return replace(prediction(**more), prompt=excerpt(sample(text)), prompt_characters=len(text))


@settings(max_examples=50)
@given(st.text(), st.lists(st.text(max_size=3), max_size=3), st.integers(0, 5000))
def test_parts_are_places_of_the_prompt_and_gaps_the_rest(text, references, filler):
    whole = text + "x" * filler + text
    parts = excerpt(sample(whole, tuple(references)))
    assert all(whole[start : start + len(part)] == part for start, part, _ in parts)
    assert sum(len(part) + left_out for (_, part, _), left_out in gaps(parts, len(whole))) == len(whole)
    found = replace(prediction(), prompt=parts, prompt_characters=len(whole) if parts else None)
    assert Prediction.from_json(json.loads(json.dumps(found.to_json()))) == found
    if 0 < len(whole) <= 2 * AT_EACH_END:
        assert parts == ((0, whole, ""),)
    assert sum(len(part) for _, part, _ in parts) <= 2 * AT_EACH_END + 3 * 300


def test_the_place_of_an_expected_answer_is_kept():
    text = "a" * 50_000 + "the key is 42." + "b" * 70_000
    (_, head, _), (_, near, _), (start, tail, _) = excerpt(sample(text, ("no such", "42")))
    assert "the key is 42." in near
    assert (head, tail) == ("a" * AT_EACH_END, "b" * AT_EACH_END)
    assert start + len(tail) == len(text)
    # A reference as long as a book.
    assert len(excerpt(sample(text, (text[10_000:100_000],)))[1][1]) == 900


def test_the_places_that_a_task_names_count_and_not_the_first_reference():
    text = "42 " + "a" * 50_000 + "the key is 42." + "b" * 70_000
    spans = [(50_003, 50_017), (90_000, 90_004)]
    parts = excerpt(sample(text, details={"spans": spans}))
    assert [part[300:-300] for _, part, _ in parts[1:-1]] == ["the key is 42.", "bbbb"]
    assert needles(text, ("42",)) == [(0, 2)]
    assert needles(text, ("42",), spans) == spans


turns = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=900)), max_size=12)


@settings(max_examples=50)
@given(turns, st.text())
def test_a_part_belongs_to_one_turn_whose_role_it_names(earlier, text):
    asked = sample(text, earlier=tuple(earlier))
    whole, starts = plain_chat(earlier, text), turn_starts(earlier, text)
    for start, role in starts:
        assert whole[start:].startswith(f"{role.capitalize()}:")
    for start, part, role in excerpt(asked):
        begun = max((each for each in starts if each[0] <= start), default=(0, ""))
        assert role == begun[1]
        assert not any(start < other < start + len(part) for other, _ in starts)
    everything = parts_of(whole, [(0, len(whole))], starts)
    assert "".join(part for _, part, _ in everything) == whole


def test_what_is_written_is_read_in_the_order_of_the_index_and_no_answers_write_nothing(tmp_path):
    path = tmp_path / "answers.jsonl"
    samples = [answered("What?\n" * n, index=n, answer="\ud800</script>") for n in (900, 1)]
    write_predictions(path, samples)
    assert read_predictions(path) == samples[::-1]
    write_predictions(tmp_path / "none.jsonl", [])
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "text"},
        {"prompt": [[0, 1]]},
        {"prompt": [[0, "a", 1]]},
        {"prompt": [[0, "a", "user", "more"]]},
        {"prompt": [[3, "longer than it"]]},
        {"prompt": [[0, "What?"], [2, "at"]]},
        {"prompt": [[-1, "What?"]]},
        {"prompt": []},
        {"prompt_characters": "9"},
        {"prompt_characters": None},
        {"score": 2},
    ],
)
def test_a_damaged_line_is_named(tmp_path, change):
    value = {**answered("What?").to_json(), **change}
    path = tmp_path / "predictions-after.jsonl"
    path.write_text(json.dumps(value) + "\n")
    with pytest.raises(
        RopewalkError, match=r"line 1 of .*predictions-after.jsonl is damaged: .*; restore the file"
    ):
        read_predictions(path)
