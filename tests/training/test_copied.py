"""A run whose folder is lost goes on from its copy at a URL, which no other run overwrites."""

import json
import shutil
import signal

import pytest

from ropewalk.cli.app import main
from ropewalk.errors import RopewalkError
from ropewalk.runs import Store
from ropewalk.training.copied import refuse_other_copy
from ropewalk.training.folder import HOLDS
from tests.training.resume_cases import weights_of, write
from tests.training.run_cases import signalled


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_whose_folder_is_lost_goes_on_from_its_copy(done, tmp_path, monkeypatch, capsys, keep):
    values, _ = done
    output = tmp_path / "run"
    checkpoints = {"every": 1, "keep": keep, "copy_to": f"file://{tmp_path}/copy"}
    recipe = write(tmp_path / "recipe.yaml", {**values, "output": str(output), "checkpoints": checkpoints})
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGTERM, 3)
        assert main(["extend", recipe]) == 75
    shutil.rmtree(output)
    capsys.readouterr()
    assert main(["extend", recipe, "--resume"]) == 0
    said = capsys.readouterr().err
    assert f"the run was copied from file://{tmp_path}/copy, with " in said
    assert "resuming stage 1 after step 3" in said
    assert weights_of(output) == weights_of(values["output"])
    names = sorted(path.name for path in (tmp_path / "copy" / "checkpoints").iterdir())
    assert names == [f"stage0-step{step:06d}" for step in (3, 4)][-keep:]


def test_the_signature_of_a_copys_url_is_used_and_stored_nowhere(done, tmp_path, monkeypatch, capsys):
    # The query is a part of the folder's name here; an object store would read the signature in it.
    url = f"file://{tmp_path}/copy?sig=c0ffee-secret&sv=2026"
    values = {**done[0], "output": str(tmp_path / "run"), "checkpoints": {"every": 1, "copy_to": url}}
    recipe = write(tmp_path / "recipe.yaml", values)
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGTERM, 3)
        assert main(["extend", recipe]) == 75
    shutil.rmtree(tmp_path / "run")
    assert main(["extend", recipe, "--resume"]) == 0
    copy = tmp_path / "copy?sig=c0ffee-secret&sv=2026"
    shown = f"file://{tmp_path}/copy?sig=***&sv=***"
    said = capsys.readouterr()
    assert f"the run was copied from {shown}, with" in said.err
    assert "c0ffee" not in said.out + said.err
    for folder in (tmp_path / "run", copy):
        assert shown in (folder / "recipe.yaml").read_text()
        for path in folder.rglob("*"):
            assert not path.is_file() or b"c0ffee" not in path.read_bytes()
    # The recipe of the run lacks the signature, so the user's own is needed.
    assert main(["extend", str(tmp_path / "run" / "recipe.yaml"), "--resume"]) == 2
    assert "copy?sig=***&sv=***, whose credentials were left out when" in capsys.readouterr().err

    def denied(files, path, value):
        raise PermissionError(f"no access to {path}")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.pipe_file", denied)
    assert main(["extend", recipe, "--resume"]) == 2
    refused = capsys.readouterr().err
    assert f"cannot write to {shown}: no access to " in refused
    assert "c0ffee" not in refused


def test_the_copy_of_another_run_is_never_overwritten(done, tmp_path, capsys):
    copy = tmp_path / "copy"
    values = {**done[0], "output": str(tmp_path / "run"), "checkpoints": {"copy_to": f"file://{copy}"}}
    recipe = write(tmp_path / "recipe.yaml", values)
    assert main(["extend", recipe]) == 0
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    # Its own run may go on.
    assert main(["extend", recipe, "--resume"]) == 0
    capsys.readouterr()
    assert main(["extend", recipe, "--set", f"output={tmp_path}/second"]) == 2
    assert "contains the copy of a run; add --resume" in capsys.readouterr().err
    other = shutil.copytree(done[0]["output"], tmp_path / "other")
    assert main(["extend", recipe, "--resume", "--set", f"output={other}"]) == 2
    assert "contains the copy of another run" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_only_the_copy_of_the_run_itself_is_written_to(tmp_path):
    store, copy = Store(tmp_path / "run", HOLDS), tmp_path / "copy"
    copy.mkdir()
    url = f"file://{copy}"
    # A copy whose recipe never came is none of a run.
    (copy / "run.json").write_text("{")
    refuse_other_copy(store, url)
    (copy / "recipe.yaml").write_text("")
    store.note_changes([])
    own = (tmp_path / "run" / "run.json").read_text()
    without_id = json.dumps(json.loads(own) | {"id": ""})
    for about in (None, "{", "[]", "{}", without_id):
        (copy / "run.json").unlink(missing_ok=True)
        if about is not None:
            (copy / "run.json").write_text(about)
        with pytest.raises(RopewalkError, match="contains the copy of another run; set"):
            refuse_other_copy(store, url)
    (copy / "run.json").write_text(own)
    refuse_other_copy(store, url)


def test_a_copy_that_cannot_be_written_is_refused_before_anything_is(done, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    values = {
        **done[0],
        "output": str(tmp_path / "run"),
        "checkpoints": {"copy_to": f"file://{tmp_path}/file/copy"},
    }
    assert main(["extend", write(tmp_path / "recipe.yaml", values)]) == 2
    assert f"error: cannot write to file://{tmp_path}/file/copy: " in capsys.readouterr().err
    assert not (tmp_path / "run" / "recipe.yaml").exists()
