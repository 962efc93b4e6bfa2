"""The rows of a run are found again, packed again where they are gone, and refused where they are others."""

import json
import shutil
from pathlib import Path

import pytest

from ropewalk import RopewalkError
from tests.training.resume_cases import flip, metrics_of, recipe_of, refused, weights_of
from tests.training.run_cases import extend


@pytest.mark.parametrize("content", [None, "", "[]", '{"rows": [3]}', '{"rows": ["elsewhere"]}', b"\xff\xfe"])
def test_a_run_finds_its_rows_whatever_became_of_the_note_where_they_are(
    done, cut, tmp_path, monkeypatch, content
):
    path = Path(cut["output"]) / "rows.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setattr("ropewalk.training.documents.prepare_rows", None)
    extend(recipe_of(cut), resume=True)
    assert metrics_of(cut["output"]) == metrics_of(done[0]["output"])


@pytest.mark.parametrize(
    ("content", "why"), [("", "Expecting value"), ("{}", "identity is missing"), ("[" * 5000, "too deeply")]
)
def test_a_damaged_record_of_a_step_is_refused_in_one_sentence(cut, tmp_path, capsys, content, why):
    path = Path(cut["output"]) / "steps" / "train-1.json"
    path.write_text(content)
    said = refused(capsys, tmp_path, cut)
    assert str(path) in said
    assert why in said
    assert "restore the file, or delete it to make" in said


def test_a_run_goes_on_in_another_folder_on_its_own_rows(done, cut, monkeypatch):
    """Nothing is read from the documents: they are gone."""
    output = Path(cut["output"])
    record = json.loads((output / "rows.json").read_text())
    assert record["rows"][0].startswith("data/")
    monkeypatch.setattr("ropewalk.training.documents.prepare_rows", None)
    extend(recipe_of(cut), resume=True)
    assert metrics_of(output) == metrics_of(done[0]["output"])
    assert weights_of(output) == weights_of(done[0]["output"])


@pytest.mark.parametrize("harm", ["a flipped byte", "a short file", "the manifest"])
def test_damaged_rows_name_the_folder_to_delete(done, cut, tmp_path, capsys, harm):
    (folder,) = (path.parent for path in (Path(cut["output"]) / "data").glob("*/manifest.json"))
    file = next(folder.glob("rows-*.arrow"))
    if harm == "a flipped byte":
        flip(file)
    elif harm == "a short file":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        (folder / "manifest.json").write_text('{"format": "ropewalk packed rows", ')
    said = refused(capsys, tmp_path, cut)
    assert f"delete the folder {folder}" in said
    assert "--resume" in said
    shutil.rmtree(folder)
    extend(recipe_of(cut), resume=True)
    assert metrics_of(cut["output"]) == metrics_of(done[0]["output"])


def test_rows_that_another_run_has_packed_are_checked_before_training(done, tmp_path):
    values, _ = done
    cache = shutil.copytree(Path(values["output"]) / "data", tmp_path / "cache")
    flip(next(cache.glob("*/rows-*.arrow")))
    shared = {**values, "output": str(tmp_path / "run"), "data": {**values["data"], "cache": str(cache)}}
    with pytest.raises(
        RopewalkError, match=r"is damaged: its SHA-256 is not the one in manifest\.json; delete the folder"
    ):
        extend(recipe_of(shared))
