"""A run's folder: who may go on in it, what is set aside, and what is removed."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from ropewalk import RopewalkError
from ropewalk.io.lock import locked
from tests.training.resume_cases import recipe_of, refused, weights_of, with_stage
from tests.training.run_cases import extend

HEX = "0123456789abcdef" * 2


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_file_in_the_models_place_is_moved_aside_or_refused(done, finished, tmp_path, capsys, checkpoints):
    values, summary = finished
    model = Path(values["output"]) / "model"
    shutil.rmtree(model)
    model.write_text("notes")
    if checkpoints:
        assert extend(recipe_of(values), resume=True)["after"] == summary["after"]
        assert weights_of(values["output"]) == weights_of(done[0]["output"])
        kept = Path(values["output"]) / "earlier" / "model" / "model"
        assert kept.read_text() == "notes"
    else:
        shutil.rmtree(Path(values["output"]) / "checkpoints")
        said = refused(capsys, tmp_path, values)
        assert f"the model in {model} is damaged (it is not a folder), and there is no checkpoint" in said
        assert model.read_text() == "notes"


def test_a_folder_that_another_process_writes_to_is_refused_by_its_number(finished, tmp_path, capsys):
    values, _ = finished
    with locked(Path(values["output"])):
        said = refused(capsys, tmp_path, values)
        assert f"process {os.getpid()} on " in said
        assert "give another output" in said
    extend(recipe_of(values), resume=True)


def test_what_killed_processes_left_is_removed_by_the_run_that_holds_the_folder(finished):
    values, _ = finished
    output = Path(values["output"])
    left = [
        output / f".model.{HEX}.partial",
        output / f".summary.{HEX}.json",
        output / "checkpoints" / f".stage0-step000006.{HEX}.partial",
        output / "checkpoints" / f".stage0-step000002.{HEX}.deleted",
        output / "checkpoints" / ".stage0-step000006.partial",
    ]
    for path in left:
        path.mkdir() if path.suffix != ".json" else path.write_text("")
    own = output / ".notes.old"
    own.write_text("of the user")
    # Killed while a checkpoint was replaced: the old one comes back.
    (output / "checkpoints" / "stage0-step000002").rename(
        output / "checkpoints" / f".stage0-step000002.{HEX}.old"
    )
    with locked(output), pytest.raises(RopewalkError):
        extend(recipe_of(values), resume=True)
    assert all(path.exists() for path in left)
    extend(recipe_of(values), resume=True)
    assert not any(path.exists() for path in left)
    assert own.read_text() == "of the user"
    assert (output / "checkpoints" / "stage0-step000002").is_dir()


def test_resume_where_no_run_lies_is_refused_and_leaves_nothing(done, tmp_path, capsys):
    values, _ = done
    nowhere = {**values, "output": str(tmp_path / "nowhere")}
    assert "nothing to resume" in refused(capsys, tmp_path, nowhere)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "thesis.tex").write_text("")
    assert "contains no recipe.yaml" in refused(capsys, tmp_path, nowhere)


def test_results_stay_in_their_place_where_a_run_does_not_go_on(done, tmp_path, monkeypatch, capsys):
    """A finished run that is to train on, and whose base another version would choose: it is refused as it lies."""
    from ropewalk.rope import target
    from ropewalk.rope.theory import recommended_theta

    values, _ = done
    output = shutil.copytree(values["output"], tmp_path / "run")
    there = {path.relative_to(output) for path in output.rglob("*")}

    def doubled(base, *lengths):
        found = recommended_theta(base, *lengths)
        return dataclasses.replace(found, rope_theta=2 * found.rope_theta)

    monkeypatch.setattr(target, "recommended_theta", doubled)
    longer = with_stage(values, steps=2 * values["stages"][0]["steps"])
    error = refused(capsys, tmp_path, {**longer, "output": str(output)})
    assert "stages.0.rope.rope_theta (" in error
    assert {path.relative_to(output) for path in output.rglob("*")} == there


def test_a_run_of_an_earlier_version_is_refused_in_one_sentence(finished, tmp_path, capsys):
    values, _ = finished
    (Path(values["output"]) / "run.json").unlink()
    said = refused(capsys, tmp_path, values)
    assert "was written by another version of ropewalk, which this one cannot continue" in said
