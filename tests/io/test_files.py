"""Names that manifests give lead nowhere else; folders appear whole or not at all, with the modes of the umask."""

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.record import read_record as read_results
from ropewalk.evaluation.tasks.benchmark_files import read_rows
from ropewalk.io.files import (
    check_model_place,
    new_folder,
    parse_json,
    plain_name,
    remove_left_overs,
    room_for,
    write_json,
)
from ropewalk.models.config.file import read_config_file
from ropewalk.planning.bases import factor_lists
from ropewalk.search import read_factors

MANIFEST = Path("part/manifest.json")
HEX = "0f" * 16


@given(st.text("ab.:/\\\0 é", max_size=6) | st.text(max_size=12))
def test_a_plain_name_is_one_entry_of_the_folder(name: str) -> None:
    try:
        plain = plain_name(name, MANIFEST)
    except RopewalkError:
        # What is refused would lead elsewhere here, or on Windows.
        assert name in ("", ".", "..") or set(name) & set("/\\\0:")
    else:
        assert plain == name
        assert not set(name) & set("/\\\0")
        assert os.path.normpath(Path("folder") / name) == os.path.join("folder", name)


@pytest.mark.parametrize(
    "name", ["rows-00000.arrow", "model.safetensors", "__0_1.distcp", ".metadata", "a b", "..."]
)
def test_names_as_programs_give_them_are_plain(name: str) -> None:
    assert plain_name(name, MANIFEST) == name


@pytest.mark.parametrize(
    "name",
    [None, 7, ["a"], {"a": 1}, b"a", "../a", "/a", "a/", "a/b", "a\\b", "C:a", "a\0b", "a\ud800b", ".."],
)
def test_other_names_are_refused_by_name(name: object) -> None:
    with pytest.raises(RopewalkError, match=r"^part/manifest\.json lists the file .* own folder"):
        plain_name(name, MANIFEST)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_modes_that_the_umask_asks_for(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with new_folder(tmp_path / "model") as partial:
            # safetensors writes into a temporary file of its own, which nobody else may read.
            save_file({"weight": torch.zeros(1)}, partial / "model.safetensors")
            (partial / "config.json").write_text("{}")
            (partial / "shards").mkdir()
            save_file({"weight": torch.zeros(1)}, partial / "shards" / "0.safetensors")
        write_json(tmp_path / "record.json", {})
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {
        path.name: oct(mode) for path in files
    }


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, '{"a": ' * 100_000, "", "{", b"\x00"])
def test_whatever_is_wrong_with_json_is_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        parse_json(text)
    assert parse_json('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}


@pytest.mark.parametrize("content", ["[" * 100_000, '{"n": ' + "1" * 5000 + "}"])
def test_readers_of_json_refuse_what_python_cannot_hold(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    for read in (
        lambda: read_factors(path),
        lambda: read_results(tmp_path),
        lambda: factor_lists(path),
        lambda: read_config_file(str(path)),
        lambda: read_rows(path),
    ):
        with pytest.raises(RopewalkError, match=r"results\.json"):
            read()


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


def test_a_folder_that_cannot_be_cleared_is_named(tmp_path, monkeypatch):
    (tmp_path / f".model.{HEX}.partial").mkdir()

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("ropewalk.io.files.shutil.rmtree", refuse)
    with pytest.raises(RopewalkError, match="Permission denied"):
        remove_left_overs(tmp_path)


def test_a_model_without_a_name_is_refused():
    with pytest.raises(RopewalkError, match="the name of the model is empty"):
        check_model_place("")


def test_what_takes_more_than_the_disk_has_is_refused_and_what_is_large_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def usage(place: Path) -> Any:
        asked.append(place)
        return SimpleNamespace(free=5 * 10**9)

    monkeypatch.setattr("ropewalk.io.files.shutil.disk_usage", usage)
    new = tmp_path / "new" / "deep"
    assert room_for(new, 10**9 - 1, "rows") is None
    assert room_for(new, 5 * 10**9, "rows") == f"rows take 5.0 GB in {new}, whose disk has 5.0 GB left"
    with pytest.raises(
        RopewalkError, match=r"^rows take 5\.1 GB, but the disk of .*deep has only 5\.0 GB left; free"
    ):
        room_for(new, 51 * 10**8, "rows")
    # The folder is not there yet, so that its disk is that of the one above.
    assert set(asked) == {tmp_path}
