"""The copy of a run at a URL: what makes a checkpoint of it complete, and what is refused."""

import fsspec
import pytest

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.training.checkpoint.files import RECORD
from ropewalk.training.checkpoint.remote import RemoteCopy


@pytest.fixture
def copy(tmp_path):
    url = f"memory://{tmp_path.name}/run"
    yield RemoteCopy(url)
    if fsspec.filesystem("memory").exists(f"/{tmp_path.name}"):
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def checkpoint(run, step, content="weights"):
    path = run / "checkpoints" / f"stage0-step{step:06d}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text(f"{content} {step}")
    (path / RECORD).write_text(f"record {step}")
    return path


def small(run):
    (run / "recipe.yaml").write_text("recipe")
    (run / "metrics.jsonl").write_text("metrics")
    (run / "evaluations").mkdir(exist_ok=True)
    (run / "evaluations" / "stage0-step000002.json").write_text("{}")
    return [run / "evaluations" / "stage0-step000002.json", run / "metrics.jsonl", run / "recipe.yaml"]


def uploaded(copy, run):
    path = checkpoint(run, 2)
    copy.upload(run, small(run), path)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_copy_restores_what_was_copied(tmp_path, protocol):
    copy = RemoteCopy(f"{protocol}://{tmp_path}/copy")
    run, other = tmp_path / "run", tmp_path / "other"
    for step in (2, 4):
        copy.check()
        path = checkpoint(run, step)
        copy.upload(run, small(run), path)
    assert copy.restore(other, "recipe.yaml") == ["stage0-step000002", "stage0-step000004"]
    assert contents(other) == contents(run)


def test_what_the_run_deletes_is_deleted_from_its_copy(copy, tmp_path):
    run = tmp_path / "run"
    first = checkpoint(run, 2)
    copy.upload(run, small(run), first)
    for path in first.iterdir():
        path.unlink()
    first.rmdir()
    second = checkpoint(run, 4)
    copy.upload(run, small(run), second)
    assert copy.restore(tmp_path / "other", "recipe.yaml") == ["stage0-step000004"]


def test_a_checkpoint_counts_once_its_record_is_there(copy, tmp_path, monkeypatch):
    run = tmp_path / "run"
    first = checkpoint(run, 2)
    copy.upload(run, small(run), first)
    put = copy.files.put_file

    def full(source, target):
        if target.endswith(RECORD):
            raise OSError("No space left on device")
        put(source, target)

    monkeypatch.setattr(copy.files, "put_file", full)
    with pytest.raises(
        RunFailure, match=r"cannot copy .*stage0-step000004 to memory://.*: No space left on device"
    ):
        copy.upload(run, [], checkpoint(run, 4))
    monkeypatch.undo()
    assert copy.restore(tmp_path / "other", "recipe.yaml") == ["stage0-step000002"]
    # A repeated copy replaces the half of the earlier one, files that no longer exist included.
    copy.files.pipe_file(f"{copy.root}/checkpoints/stage0-step000004/stray", b"")
    copy.upload(run, [], run / "checkpoints" / "stage0-step000004")
    assert copy.restore(tmp_path / "third", "recipe.yaml")[-1] == "stage0-step000004"
    assert contents(tmp_path / "third") == contents(run)


def test_no_copy_and_a_copy_without_a_checkpoint_are_told_apart(copy, tmp_path):
    assert copy.restore(tmp_path / "other", "recipe.yaml") == []
    copy.files.pipe_file(f"{copy.root}/recipe.yaml", b"recipe")
    with pytest.raises(RopewalkError, match="contains a run without a complete checkpoint"):
        copy.restore(tmp_path / "other", "recipe.yaml")
    assert not (tmp_path / "other" / "recipe.yaml").exists()


@pytest.mark.parametrize(
    "key",
    [
        "/{outside}",
        "../stolen",
        "evaluations/../../stolen",
        "evaluations//x",
        "./x",
        "..\\stolen",
        "C:stolen",
        "a\0b",
        "a\ud800b",
        "checkpoints/stage0-step000002/../../../stolen",
        "checkpoints/stage0-step000002//{outside}",
        "checkpoints/stage0-step000002/..\\stolen",
    ],
)
def test_names_that_lead_out_of_the_folder_are_refused(copy, tmp_path, key):
    run, other = tmp_path / "run", tmp_path / "other"
    uploaded(copy, run)
    # An object's key may be any text.
    key = key.format(outside=str(tmp_path / "stolen"))
    copy.files.pipe_file(f"{copy.root}/{key}", b"")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RopewalkError, match=r"which ropewalk would copy outside the run's folder") as caught:
        copy.restore(other, "recipe.yaml")
    assert repr(key) in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("link", ["evaluations", "checkpoints", "checkpoints/stage0-step000002"])
def test_a_link_that_leads_out_of_the_folder_is_not_followed(copy, tmp_path, link):
    run, other, outside = tmp_path / "run", tmp_path / "other", tmp_path / "outside"
    uploaded(copy, run)
    outside.mkdir()
    (other / link).parent.mkdir(parents=True)
    (other / link).symlink_to(outside)
    with pytest.raises(RopewalkError, match=rf"outside the run's folder; remove the link from {other}"):
        copy.restore(other, "recipe.yaml")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    "key", ["Metrics.JSONL", "evaluations", "metrics.jsonl/x", "checkpoints/stage0-step000002"]
)
def test_names_that_are_one_on_some_disks_are_refused(copy, tmp_path, monkeypatch, key):
    run, other = tmp_path / "run", tmp_path / "other"
    uploaded(copy, run)
    find = copy.files.find
    # An object store accepts them; this storage refuses most.
    monkeypatch.setattr(copy.files, "find", lambda root: [*find(root), f"{root}/{key}"])
    with pytest.raises(RopewalkError, match=r"beside a file or folder of the same name; delete this file"):
        copy.restore(other, "recipe.yaml")
    assert not other.exists()


def test_hidden_files_and_marks_of_folders_stay_in_the_copy(copy, tmp_path, monkeypatch):
    run, other = tmp_path / "run", tmp_path / "other"
    uploaded(copy, run)
    copy.files.pipe_file(f"{copy.root}/.lock", b"")
    find = copy.files.find
    # An object store may list an empty object whose key ends in a slash; this storage strips the slash.
    monkeypatch.setattr(copy.files, "find", lambda root: [f"{root}/", f"{root}/evaluations/", *find(root)])
    copy.restore(other, "recipe.yaml")
    assert contents(other) == contents(run)


def test_a_file_that_cannot_be_read_is_an_error_of_the_url(copy, tmp_path, monkeypatch):
    run = tmp_path / "run"
    path = checkpoint(run, 2)
    copy.upload(run, small(run), path)

    def denied(*_):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(copy.files, "get_file", denied)
    with pytest.raises(RopewalkError, match=r"cannot read memory://.*/run: Access Denied"):
        copy.restore(tmp_path / "other", "recipe.yaml")
    assert contents(tmp_path / "other") == {}


def test_a_check_leaves_nothing_and_says_why_writing_fails(copy, monkeypatch):
    copy.check()
    assert copy.files.find(copy.root) == []

    def denied(*_):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(copy.files, "pipe_file", denied)
    with pytest.raises(RopewalkError, match=r"cannot write to memory://.*/run: Access Denied"):
        copy.check()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("runs/copy?sig=secret", r"copy_to must be a URL with a protocol, .*, got 'runs/copy'$"),
        ("runs/copy", r"copy_to must be a URL with a protocol, .*, got 'runs/copy'"),
        ("nope://bucket/run", "cannot use nope://bucket/run: Protocol not known: nope"),
        (
            "nope://bucket/run?sig=secret",
            r"cannot use nope://bucket/run\?sig=\*\*\*: Protocol not known: nope",
        ),
        ("sftp://me:secret@host/run", r"checkpoints\.copy_to \(host host\) contains a user name or password"),
    ],
)
def test_urls_that_cannot_work_are_refused_without_their_secrets(url, why):
    with pytest.raises(RopewalkError, match=why) as caught:
        RemoteCopy(url)
    assert "secret" not in str(caught.value)
