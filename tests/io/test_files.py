"""Folders that appear whole or not at all, whoever else writes the same one, and what killed processes leave."""

import json

import pytest

from ropewalk import RopewalkError
from ropewalk.files import new_folder, remove_left_overs
from ropewalk.io.digests import FileDigest, damage, digests, read_sealed, write_sealed

HEX = "0f" * 16


def test_two_writers_of_one_folder_leave_each_others_work_alone(tmp_path):
    """Each fills a folder of its own; the last one to end has the name, and nothing else is left."""
    with new_folder(tmp_path / "model") as first:
        (first / "a").write_text("first")
        with new_folder(tmp_path / "model") as second:
            assert (first / "a").read_text() == "first"
            (second / "a").write_text("second")
        assert (tmp_path / "model" / "a").read_text() == "second"
        assert (first / "a").read_text() == "first"
    assert (tmp_path / "model" / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_left_overs_of_one_name_are_removed_and_others_stay(tmp_path):
    ours = [f".out.{HEX}.partial", f".out.{HEX}.json", f".rows.{HEX}.arrow", ".stage0-step000002.old"]
    theirs = [".out.partial", ".out.json", f"out.{HEX}.partial", f".out.{HEX[1:]}.partial", ".git"]
    for name in (*ours, *theirs):
        (tmp_path / name).write_text("")
    remove_left_overs(tmp_path, "out.json")
    assert not (tmp_path / ours[1]).exists()
    assert (tmp_path / ours[0]).exists()
    remove_left_overs(tmp_path, "out")
    assert not (tmp_path / ours[0]).exists()
    assert (tmp_path / ours[2]).exists()
    remove_left_overs(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(theirs)
    remove_left_overs(tmp_path / "nowhere")


def test_what_was_taken_away_and_not_replaced_comes_back(tmp_path):
    (tmp_path / f".model.{HEX}.old").mkdir()
    (tmp_path / f".model.{HEX}.old" / "a").write_text("old")
    (tmp_path / "other").mkdir()
    (tmp_path / f".other.{HEX}.old").mkdir()
    remove_left_overs(tmp_path)
    assert (tmp_path / "model" / "a").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "other"}


def test_a_record_knows_its_files_and_itself(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    # SHA-256 of "abc" as FIPS 180-2 gives it.
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digests([tmp_path / "a"]) == {"a": FileDigest(3, sha256)}
    write_sealed(tmp_path / "record.json", {"step": 3}, digests([tmp_path / "a"]))
    values = {"step": 3, "files": {"a": {"bytes": 3, "sha256": sha256}}}
    written = json.loads((tmp_path / "record.json").read_text())
    assert {key: value for key, value in written.items() if key != "sha256"} == values
    assert read_sealed(written, tmp_path / "record.json") == {"a": FileDigest(3, sha256)}
    with pytest.raises(ValueError, match=r"record\.json was altered"):
        read_sealed({**written, "step": 4}, tmp_path / "record.json")
    (tmp_path / "a").write_bytes(b"abd")
    assert damage(tmp_path / "a", FileDigest(3, sha256)) == "a was altered: its SHA-256 differs"


def test_a_folder_that_cannot_be_cleared_is_named(tmp_path, monkeypatch):
    (tmp_path / f".model.{HEX}.partial").mkdir()

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("ropewalk.files.shutil.rmtree", refuse)
    with pytest.raises(RopewalkError, match="Permission denied"):
        remove_left_overs(tmp_path)
