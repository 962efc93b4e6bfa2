"""Prompts and answers of a run are read as they were written, and long prompts keep what a reader looks for."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.answered_samples import (
    AT_EACH_END,
    AnsweredSample,
    Prompts,
    answers_file,
    gaps,
    prompt_parts,
    read_answers,
    write_answers,
)
from ropewalk.evaluation.predictions import Prediction
from ropewalk.evaluation.samples import Sample


def prediction(index: int = 0, answer: str = " 42", score: float = 1.0, task: str = "passkey") -> Prediction:
    return Prediction(
        "passkey", task, 1024, index, "ab", answer, ("42",), "first integer", score, 1000, 1, 0.9, 3, True
    )


def answered(text: str, **more) -> AnsweredSample:
    made = prediction(**more)
    return AnsweredSample(made, prompt_parts(text, made.references), len(text))


@settings(max_examples=50)
@given(st.text(), st.lists(st.text(max_size=3), max_size=3), st.integers(0, 5000))
def test_parts_are_places_of_the_prompt_and_gaps_the_rest(text, references, filler):
    whole = text + "x" * filler + text
    parts = prompt_parts(whole, references)
    assert all(whole[start : start + len(part)] == part for start, part in parts)
    sample = AnsweredSample(prediction(), parts, len(whole))
    assert sum(len(part) + left_out for part, left_out in gaps(sample)) == len(whole)
    assert AnsweredSample.from_json(json.loads(json.dumps(sample.to_json()))) == sample
    if len(whole) <= 2 * AT_EACH_END:
        assert parts == ((0, whole),)
    assert sum(len(part) for _, part in parts) <= 2 * AT_EACH_END + 3 * 300


def test_the_place_of_an_expected_answer_is_kept():
    text = "a" * 50_000 + "the key is 42." + "b" * 70_000
    (_, head), (_, near), (start, tail) = prompt_parts(text, ("no such", "42"))
    assert "the key is 42." in near
    assert (head, tail) == ("a" * AT_EACH_END, "b" * AT_EACH_END)
    assert start + len(tail) == len(text)
    # A reference as long as a book.
    assert len(prompt_parts(text, (text[10_000:100_000],))[1][1]) == 900


def test_what_is_written_is_read_and_no_answers_write_nothing(tmp_path):
    samples = [answered("What?\n" * n, index=n, answer="\ud800</script>") for n in (1, 900)]
    write_answers(tmp_path, "after", samples)
    assert read_answers(tmp_path, "after") == samples
    assert read_answers(tmp_path, "before") == []
    write_answers(tmp_path, "before", [])
    assert [path.name for path in tmp_path.iterdir()] == [answers_file("after")]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "text"},
        {"prompt": [[0, 1]]},
        {"prompt": [[3, "longer than it"]]},
        {"prompt_characters": "9"},
        {"score": 2},
    ],
)
def test_a_damaged_line_is_named(tmp_path, change):
    value = {**answered("What?").to_json(), **change}
    (tmp_path / answers_file("after")).write_text(json.dumps(value) + "\n")
    with pytest.raises(
        RopewalkError, match=r"line 1 of .*predictions-after.jsonl is damaged: .*; restore the file"
    ):
        read_answers(tmp_path, "after")


def test_prompts_belong_to_their_samples():
    prompts = Prompts()
    for index in (1, 0):
        sample = Sample(
            "passkey", "passkey", 1024, index, f"text {index}", " is", ("42",), "first integer", 5, 1000, 1
        )
        prompts.add(sample)
    found = prompts.answered({each.key: each for each in (prediction(0), prediction(1))})
    assert [(each.prediction.index, each.prompt) for each in found] == [
        (1, ((0, "text 1 is"),)),
        (0, ((0, "text 0 is"),)),
    ]
