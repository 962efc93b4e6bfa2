"""No answer is lost or given twice, wherever a run is killed and whatever a model says."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import Answer
from ropewalk.evaluation.predictions import Prediction, PredictionLog, predicted, read_predictions
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import prompt_digest
from tests.disk_cases import files_no_larger_than
from tests.evaluation.core_cases import WILD_TEXTS, answered, asked_sample, byte_tokenizer, lines_of

ENCODER = PromptEncoder(byte_tokenizer())
SAMPLES = [asked_sample(ENCODER, index) for index in range(len(WILD_TEXTS))]
WILD = [answered(sample, f"{text} 7") for sample, text in zip(SAMPLES, WILD_TEXTS, strict=True)]


def written(path: Path, predictions: list[Prediction]) -> bytes:
    log = PredictionLog(path)
    for each in predictions:
        log.add(each)
    return path.read_bytes()


def test_prediction_is_the_answer_and_what_scoring_needs() -> None:
    sample = asked_sample(ENCODER, 5)
    found = predicted(sample, Answer(3, " 5. 99", 6, False))
    assert found.score == 1
    assert found.prediction == " 5. 99"
    assert (found.new_tokens, found.finished) == (6, False)
    assert found.key == sample.key == ("ruler", "niah", 64, 5)
    assert (found.prompt_tokens, found.bos_count) == (sample.prompt_tokens, 1)
    assert found.fill == sample.fill == (sample.prompt_tokens + 8) / 64
    assert found.details == {"depth": 0.5}
    assert predicted(sample, Answer(3, " 6. 5")).score == 0


@pytest.mark.parametrize("text", [*WILD_TEXTS, "x" * 1_000_000])
def test_any_answer_survives_its_line(text: str, tmp_path: Path) -> None:
    prediction = answered(SAMPLES[0], text)
    content = written(tmp_path / "p.jsonl", [prediction])
    assert content.count(b"\n") == 1
    assert content.isascii()
    assert read_predictions(tmp_path / "p.jsonl") == [prediction]
    assert list(PredictionLog(tmp_path / "p.jsonl").known.values()) == [prediction]


@given(st.text(st.characters(), max_size=40))
def test_prediction_survives_json(text: str) -> None:
    prediction = answered(SAMPLES[0], text)
    assert Prediction.from_json(json.loads(json.dumps(prediction.to_json()))) == prediction


def test_run_that_is_killed_at_any_byte_goes_on_without_loss_or_repetition(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    chosen = WILD[1:3]
    content = written(path, chosen)
    ends = [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == 2
    # Every byte around the ends of lines, and every fifth of the rest.
    cuts = {*range(0, len(content), 5), *(end + around for end in [0, *ends] for around in range(-4, 5))}
    for cut in sorted(cut for cut in cuts if 0 <= cut <= len(content)):
        path.write_bytes(content[:cut])
        complete = sum(end <= cut for end in ends)
        # Who only reads passes over the unfinished line and leaves the file as it is.
        assert read_predictions(path) == chosen[:complete]
        assert path.stat().st_size == cut
        log = PredictionLog(path)
        assert list(log.known.values()) == chosen[:complete]
        for sample, prediction in zip(SAMPLES[1:3], chosen, strict=True):
            if log.get(sample) is None:
                log.add(prediction)
        assert path.read_bytes() == content


def test_lines_are_in_the_file_before_the_next_answer(tmp_path: Path) -> None:
    """A process that is killed flushes nothing."""
    path = tmp_path / "folder" / "p.jsonl"
    log = PredictionLog(path)
    for number, each in enumerate(WILD, start=1):
        log.add(each)
        assert len(lines_of(path)) == number


def test_nothing_is_written_before_the_first_answer(tmp_path: Path) -> None:
    assert PredictionLog(tmp_path / "folder" / "p.jsonl").get(SAMPLES[0]) is None
    assert list(tmp_path.iterdir()) == []
    assert read_predictions(tmp_path / "none.jsonl") == []


def test_log_without_a_path_keeps_predictions_in_memory() -> None:
    log = PredictionLog()
    log.add(WILD[0])
    assert log.get(SAMPLES[0]) == WILD[0]


def test_disk_that_is_full_in_the_middle_of_a_line_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    first = len(written(path, WILD[:1]))
    log = PredictionLog(path)
    said = r"cannot write .*p\.jsonl: File too large; earlier lines are kept"
    with files_no_larger_than(first + 40), pytest.raises(RunFailure, match=said):
        log.add(WILD[1])
    assert log.get(SAMPLES[1]) is None
    log = PredictionLog(path)
    assert list(log.known.values()) == WILD[:1]
    log.add(WILD[1])
    assert read_predictions(path) == WILD[:2]


def test_log_whose_disk_was_full_for_a_while_can_still_be_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    first = len(written(path, WILD[:1]))
    log = PredictionLog(path)
    with files_no_larger_than(first + 40), pytest.raises(RunFailure, match="cannot write"):
        log.add(WILD[1])
    log.add(WILD[2])
    assert read_predictions(path) == [WILD[0], WILD[2]]


def test_file_size_limit_is_the_system_s_own() -> None:
    """The tests before would pass for nothing if the limit were left behind, or never held."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with files_no_larger_than(10):
        assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == 10
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before


def test_answer_given_twice_is_refused_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    content = written(path, WILD[:1])
    with pytest.raises(RopewalkError, match=r"sample 0 of niah at \d+ tokens already has an answer"):
        PredictionLog(path).add(WILD[0])
    assert path.read_bytes() == content


def test_answer_to_another_prompt_is_never_taken_for_this_one(tmp_path: Path) -> None:
    log = PredictionLog(tmp_path / "p.jsonl")
    log.add(WILD[1])
    log = PredictionLog(tmp_path / "p.jsonl")
    assert log.get(SAMPLES[1]) == WILD[1]
    with pytest.raises(
        RopewalkError,
        match=r"the answer to sample 1 of niah at 64 tokens in .* belongs to a different prompt; give another",
    ):
        log.get(replace(SAMPLES[1], text="What is the number of sample 2?"))
    for field, value in {"suite": "needle", "task": "vt", "length": 65, "index": 9}.items():
        assert log.get(replace(SAMPLES[1], **{field: value})) is None


def test_prompts_are_told_apart_where_text_ends_and_the_prefix_begins() -> None:
    pieces = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("1:a", ""), ("", "1:a"), ("\ud800", "")]
    samples = [replace(SAMPLES[0], text=text, answer_prefix=prefix) for text, prefix in pieces]
    assert len({prompt_digest(sample) for sample in samples}) == len(pieces)
    assert prompt_digest(samples[0]) == prompt_digest(replace(samples[0], index=4, length=9))


def test_predictions_are_judged_again_from_their_file_alone(tmp_path: Path) -> None:
    stale = [replace(each, score=0.25) for each in WILD]
    written(tmp_path / "p.jsonl", stale)
    assert [each.scored_again() for each in read_predictions(tmp_path / "p.jsonl")] == WILD
    assert stale[0].score == 0.25


GOOD = json.dumps(WILD[0].to_json())


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        (GOOD.replace('"task"', '"tusk"'), "the field 'task' is missing"),
        (GOOD.replace('"references": [', '"references": 5, "x": ['), "references has the wrong type: 5"),
        (GOOD.replace('"references": [', '"references": [7, '), "references must be strings, got [7, "),
        (GOOD.replace('"ruler"', "[]"), "suite has the wrong type: []"),
        (GOOD.replace('"index": 0', '"index": "0"'), "index has the wrong type: '0'"),
        (GOOD.replace('"index": 0', '"index": false'), "index has the wrong type: False"),
        (GOOD.replace('"score": ', '"score": null, "x": '), "score has the wrong type: None"),
        (GOOD.replace('"score": ', '"score": 7.0, "x": '), "score must be from 0 to 1, got 7.0"),
        (GOOD.replace('"metric": "', '"metric": "no '), "unknown metric 'no "),
        (GOOD[:-1] + ', "extra": 1}', "Prediction.__init__() got an unexpected keyword argument 'extra'"),
    ],
)
def test_line_that_is_no_prediction_is_named(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(RopewalkError) as refused:
        PredictionLog(path)
    assert str(refused.value).startswith(f"line 2 of {path} is damaged: {reason}")
    assert str(refused.value).endswith("or delete the line to generate that sample's answer again")
    assert path.read_text() == f"{GOOD}\n{line}\n"


def test_same_sample_twice_in_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}\n")
    with pytest.raises(
        RopewalkError, match=r"line 2 of .* is damaged: it is a second prediction for sample 0 of niah"
    ):
        PredictionLog(path)


def test_path_that_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match=r"cannot read .*: Is a directory"):
        PredictionLog(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RopewalkError, match=r"cannot read .*: Not a directory"):
        PredictionLog(tmp_path / "file" / "p.jsonl")
