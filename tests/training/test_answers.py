"""The answers of a folder are found, and whole prompts are those that were answered."""

import json

import pytest

from ropewalk import RunContext
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import EvaluationSettings, Settings, evaluate
from ropewalk.evaluation.predictions import write_predictions
from ropewalk.evaluation.samples import prompt_digest
from ropewalk.evaluation.settings import ViewSettings
from ropewalk.reporting.answers import write_view
from ropewalk.training.answers import read_sides, whole_prompts
from tests.evaluation.test_excerpts import answered


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluated") / "base"
    what = Settings(suites=("passkey",), lengths=(96, 128), samples=2)
    evaluate(EvaluationSettings(model="embedded", what=what), RunContext(output=out))
    return out


def test_an_evaluation_keeps_an_excerpt_of_each_prompt_and_makes_whole_ones_again(evaluated):
    (side,) = read_sides(evaluated)
    assert (side.name, len(side.predictions)) == ("base", 4)
    whole = whole_prompts(evaluated, side, 1)
    assert [key[2:] for key in whole] == [(96, 0), (128, 0)]
    for key, sample in whole.items():
        known = side.predictions[key]
        assert prompt_digest(sample) == known.prompt_sha256
        # Shorter than an excerpt, so the evaluation kept all of it.
        assert "".join(part for _, part, _ in known.prompt) == sample.whole
        assert known.prompt_characters == len(sample.whole)
    found = write_view(ViewSettings(folder=evaluated, prompts=1, out=evaluated.parent / "pages"))
    assert found.whole_prompts == 2
    assert sorted(path.name for path in (found.page.parent / "data").glob("whole-*")) == [
        "whole-0.js",
        "whole-2.js",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/no/such/model"}, "--prompts needs the tokenizer of /no/such/model: "),
        ({"tokenizer": None}, "--prompts needs the files of a tokenizer, but .* leave out --prompts"),
        (
            {"settings": {"seed": 5}},
            "--prompts made another prompt for sample 0 of passkey passkey at 96 tokens",
        ),
        ({"settings": {"nonsense": 1}}, "--prompts cannot use the settings in .*results.json"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_prompts_that_cannot_be_made_again_are_refused(evaluated, tmp_path, change, message):
    record = json.loads((evaluated / "results.json").read_text())
    settings = {**record["settings"], **change.pop("settings", {})}
    (tmp_path / "results.json").write_text(json.dumps({**record, **change, "settings": settings}))
    (tmp_path / "predictions.jsonl").write_bytes((evaluated / "predictions.jsonl").read_bytes())
    with pytest.raises(RopewalkError, match=message):
        write_view(ViewSettings(folder=tmp_path, prompts=1))
    # Reading the answers needs none of it.
    assert write_view(ViewSettings(folder=tmp_path)).samples == 4


def test_numbers_of_samples_by_suite_stand_for_the_defaults(evaluated, tmp_path):
    record = json.loads((evaluated / "results.json").read_text())
    record["settings"]["samples"] = {"passkey": 50, "ruler": 20}
    (tmp_path / "results.json").write_text(json.dumps(record))
    (tmp_path / "predictions.jsonl").write_bytes((evaluated / "predictions.jsonl").read_bytes())
    assert write_view(ViewSettings(folder=tmp_path, prompts=5)).whole_prompts == 4


def test_a_task_whose_data_are_missing_or_unknown_is_named(evaluated, tmp_path, monkeypatch):
    (side,) = read_sides(evaluated)
    monkeypatch.setattr(
        "ropewalk.evaluation.tasks.passkey.PasskeyTask.unavailable", lambda task: "there are no essays"
    )
    with pytest.raises(
        RopewalkError, match="cannot make prompts again: passkey passkey: there are no essays"
    ):
        whole_prompts(evaluated, side, 1)


def test_a_folder_without_answers_says_what_is_missing(tmp_path):
    with pytest.raises(RopewalkError, match=r"has neither predictions.jsonl nor predictions-after.jsonl"):
        read_sides(tmp_path)
    write_predictions(tmp_path / "step-5" / "predictions.jsonl", [answered("x")])
    with pytest.raises(
        RopewalkError,
        match=r"holds the mean of several checkpoints; name the folder of one, such as .*step-5",
    ):
        read_sides(tmp_path)
    write_predictions(tmp_path / "predictions-after.jsonl", [answered("x")])
    assert [side.name for side in read_sides(tmp_path)] == ["after"]
    with pytest.raises(RopewalkError, match="--prompts needs the recipe of the run"):
        whole_prompts(tmp_path, read_sides(tmp_path)[0], 1)
