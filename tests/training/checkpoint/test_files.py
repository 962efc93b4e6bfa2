"""A checkpoint's files: damage is named, what is half written is no checkpoint, and other versions' are refused."""

import dataclasses
import json
import shutil

import pytest

from ropewalk import RopewalkError
from ropewalk.io.digests import write_sealed
from ropewalk.io.files import remove_left_overs
from ropewalk.training.checkpoint.files import (
    RECORD,
    FileDigest,
    Position,
    Record,
    check_checkpoint,
    checkpoints_in,
    latest_whole,
    read_export_record,
    read_position,
    read_record,
    write_export_record,
    write_record,
)
from ropewalk.training.checkpoint.sharded import load_checkpoint
from ropewalk.training.checkpoint.single import save_checkpoint
from tests.marks import slow_after
from tests.training.checkpoint.checkpoint_cases import NAME, POSITION
from tests.training.checkpoint.rank_cases import (
    ALONE,
    Trainee,
    checked_on_ranks,
    files_of,
    latest_on_ranks,
    sentence,
)


def test_training_goes_on_from_a_copy_and_not_from_a_state_that_is_cut_off(
    tied_llama, rows, by_one, tmp_path
):
    precision, path, _, _, losses, fingerprint = by_one
    copy = shutil.copytree(path, tmp_path / NAME)
    assert read_position(copy) == POSITION
    assert check_checkpoint(copy) is None
    one = Trainee(tied_llama, rows, precision)
    assert load_checkpoint(copy, one.model, one.optimizer, ALONE) == POSITION
    assert one.train(2) == losses
    assert one.fingerprint() == fingerprint
    (copy / "training_state.safetensors").write_bytes(b"short")
    with pytest.raises(RopewalkError, match="is damaged or incomplete"):
        load_checkpoint(copy, one.model, one.optimizer, ALONE)


def harmed(path, name, how):
    file = path / name
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
        return f"{name} is missing"
    if how == "short":
        file.write_bytes(content[:-10])
        return f"{name} is 10 bytes short"
    if how == "long":
        file.write_bytes(content + b"...")
        return f"{name} is 3 bytes too long"
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return f"{name} was altered: its SHA-256 differs"


@pytest.fixture(scope="module", params=["sharded", "whole"])
def checkpoint(request, by_ranks, whole):
    return by_ranks[0] / "sync" / NAME if request.param == "sharded" else whole


@pytest.mark.parametrize("how", slow_after(2, ["missing", "short", "long", "flipped"]))
def test_harm_to_any_file_is_named(two_ranks, checkpoint, tmp_path, how):
    expected = []
    for number, name in enumerate(sorted(set(files_of(checkpoint)) - {RECORD})):
        path = shutil.copytree(checkpoint, tmp_path / f"{number:02d}")
        assert check_checkpoint(path) is None
        expected.append(harmed(path, name, how))
        assert check_checkpoint(path) == expected[-1]
    assert len(expected) >= 4
    assert two_ranks.run(checked_on_ranks, tmp_path) == [expected] * 2


def test_a_flipped_bit_anywhere_in_the_record_is_noticed(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / NAME)
    content = (path / RECORD).read_bytes()
    # Every third place, to be quick: each number and name of the record has one.
    for place in range(0, len(content), 3):
        altered = bytearray(content)
        altered[place] ^= 1
        (path / RECORD).write_bytes(altered)
        with pytest.raises(RopewalkError, match=r"is not a checkpoint of a run|has format version"):
            read_record(path)
    (path / RECORD).unlink()
    assert check_checkpoint(path) == f"{RECORD} cannot be read: No such file or directory"
    (path / RECORD).write_text("[1, 2]")
    assert f"{RECORD} is damaged" in check_checkpoint(path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "shards/0", "..\\secret", "", "..", "a\0b"])
def test_a_record_leads_to_no_file_outside_its_folder(tmp_path, name):
    (tmp_path / "secret").write_bytes(b"1")
    path = tmp_path / NAME
    path.mkdir()
    write_record(path, Record(Position(0, 1, 2), {name: FileDigest.of(tmp_path / "secret")}, (0.9, 0.95)))
    with pytest.raises(RopewalkError, match=rf"{RECORD} lists the file .* only files in its own folder"):
        read_record(path)
    assert "lists the file" in check_checkpoint(path)


def test_a_checkpoint_of_an_earlier_version_is_refused_by_name(tmp_path):
    path = tmp_path / NAME
    path.mkdir()
    write_record(path, Record(POSITION, {}, (0.9, 0.95)))
    assert read_record(path).betas == (0.9, 0.95)
    values = json.loads((path / RECORD).read_text())
    del values["betas"]
    write_sealed(path / RECORD, {key: values[key] for key in values if key not in ("files", "sha256")}, {})
    for read in (read_record, check_checkpoint, lambda path: latest_whole(path.parent)):
        with pytest.raises(RopewalkError, match=r"step000002 was written by an earlier version of ropewalk"):
            read(path)


@pytest.mark.parametrize("stage", ["../../x", None, 1.0, True])
def test_the_position_of_an_exported_model_leads_to_no_folder_elsewhere(tmp_path, stage):
    write_export_record(tmp_path, Position(stage, 2, 999))
    with pytest.raises(RopewalkError, match=f"is damaged: stage has the wrong type: {stage!r}"):
        read_export_record(tmp_path)


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(two_ranks, by_ranks, whole, tmp_path):
    assert latest_whole(tmp_path / "none") is None
    second, third = tmp_path / "stage0-step000010", tmp_path / "stage0-step000020"
    # The two formats side by side, as after a run that went on with more processes.
    first = shutil.copytree(whole, tmp_path / NAME)
    record = read_record(by_ranks[0] / "sync" / NAME)
    for path, step in ((second, 10), (third, 20)):
        shutil.copytree(by_ranks[0] / "sync" / NAME, path)
        write_record(path, dataclasses.replace(record, position=Position(0, step, 0)))
    assert checkpoints_in(tmp_path) == [first, second, third]
    assert latest_whole(tmp_path) == third
    harmed(third, "__1_0.distcp", "short")
    words = (
        "checkpoint stage0-step000020 is damaged (__1_0.distcp is 10 bytes short), and the latest intact checkpoint is "
        f"stage0-step000010; delete the folder {third}, and --resume will continue from stage0-step000010"
    )
    assert sentence(lambda: latest_whole(tmp_path)) == ("RopewalkError", words)
    assert two_ranks.run(latest_on_ranks, tmp_path) == [("RopewalkError", words), ("Echo", words)]
    harmed(second, ".metadata", "missing")
    assert (
        f"is {NAME}; delete the folders {third} and {second}, and"
        in sentence(lambda: latest_whole(tmp_path))[1]
    )
    harmed(first, "model.safetensors", "flipped")
    assert "and no checkpoint is intact" in sentence(lambda: latest_whole(tmp_path))[1]


def test_what_a_killed_process_left_is_no_checkpoint_and_left_to_whoever_holds_the_folder(
    tied_llama, rows, tmp_path
):
    """Another process may be writing it: what is written here takes nothing away."""
    one = Trainee(tied_llama, rows)
    hidden = [".stage0-step000001.partial", f".stage0-step000002.{'0f' * 16}.partial", ".stage0-notes"]
    for name in hidden:
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORD).write_text("{}")
    assert checkpoints_in(tmp_path) == []
    for step in (2, 3, 10):
        save_checkpoint(tmp_path, one.model.model, None, one.optimizer, Position(0, step, 0), 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*hidden, "stage0-step000003", "stage0-step000010"])
    remove_left_overs(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".stage0-notes", "stage0-step000003", "stage0-step000010"]
