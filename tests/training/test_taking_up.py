"""What a resumed run finds of its result: damage is made good from a checkpoint, or refused where none is left."""

import json
import shutil
from pathlib import Path

import pytest

from ropewalk.cli.app import main
from ropewalk.training.checkpoint.files import EXPORT_RECORD
from tests.training.resume_cases import (
    Notes,
    flip,
    metrics_of,
    recipe_of,
    refused,
    weights_of,
    with_stage,
    write,
)
from tests.training.run_cases import extend


def test_a_flipped_byte_in_the_result_is_found_and_the_result_made_again(done, finished, tmp_path, capsys):
    values, summary = finished
    output = Path(values["output"])
    flip(output / "model" / "model.safetensors")
    damaged = weights_of(output)
    (output / "summary.json").unlink()
    assert main(["extend", write(tmp_path / "recipe.yaml", values), "--resume", "--json"]) == 0
    printed = capsys.readouterr()
    assert "model.safetensors was altered: its SHA-256 differs" in printed.err
    assert "exported again from stage0-step000004" in printed.err
    assert weights_of(output) == weights_of(done[0]["output"]) != damaged
    assert json.loads(printed.out)["after"] == summary["after"]
    earlier = output / "earlier"
    assert (earlier / "model" / "model" / "model.safetensors").read_bytes() == damaged
    assert (earlier / "after" / "evaluation-after.json").is_file()
    assert metrics_of(output) == metrics_of(done[0]["output"])


@pytest.mark.parametrize("how", ["a file is missing", "the record is altered", "the record is missing"])
def test_a_result_that_cannot_be_trusted_is_made_again(done, finished, how):
    values, summary = finished
    model = Path(values["output"]) / "model"
    if how == "a file is missing":
        (model / "tokenizer.json").unlink()
    elif how == "the record is altered":
        flip(model / EXPORT_RECORD)
    else:
        (model / EXPORT_RECORD).unlink()
    notes = Notes()
    assert extend(recipe_of(values), resume=True, reporter=notes)["after"] == summary["after"]
    assert any("is not what the run saved" in line for line in notes.told)
    assert weights_of(values["output"]) == weights_of(done[0]["output"])
    assert sorted(path.name for path in model.iterdir()) == sorted(
        path.name for path in (Path(done[0]["output"]) / "model").iterdir()
    )


def test_a_damaged_result_without_checkpoints_is_refused_by_name(finished, tmp_path, capsys):
    values, _ = finished
    output = Path(values["output"])
    shutil.rmtree(output / "checkpoints")
    flip(output / "model" / "model.safetensors")
    before = weights_of(output)
    said = refused(capsys, tmp_path, values)
    assert "model.safetensors was altered" in said
    assert "there is no checkpoint" in said
    assert weights_of(output) == before
    assert len(metrics_of(output)) == 4


def test_a_finished_run_without_its_checkpoints_is_done_and_trains_nothing(finished, tmp_path, capsys):
    values, summary = finished
    output = Path(values["output"])
    shutil.rmtree(output / "checkpoints")
    (output / "summary.json").write_text("{damaged")
    assert extend(recipe_of(values), resume=True)["after"] == summary["after"]
    assert json.loads((output / "summary.json").read_text())["after"] == summary["after"]
    assert not (output / "checkpoints").exists()
    assert len(metrics_of(output)) == 4
    said = refused(capsys, tmp_path, with_stage(values, steps=6))
    assert (
        f"has no checkpoint left to continue training from; start a new run with model: {output}/model"
        in said
    )
