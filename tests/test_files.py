"""Names that manifests give lead nowhere else; what is written has the modes that the user's umask asks for."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ropewalk.cli.rope import _factor_lists
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.benchmark_files import read_rows
from ropewalk.evaluation.record import read_record as read_results
from ropewalk.files import new_folder, parse_json, plain_name, write_json
from ropewalk.integrations.config_file import read_config_file
from ropewalk.search import read_factors

MANIFEST = Path("part/manifest.json")


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
    "name", [None, 7, ["a"], {"a": 1}, b"a", "../a", "/a", "a/", "a/b", "a\\b", "C:a", "a\0b", ".."]
)
def test_other_names_are_refused_by_name(name: object) -> None:
    with pytest.raises(RopewalkError, match=r"^part/manifest\.json lists the file .* alone"):
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
        lambda: _factor_lists(path),
        lambda: read_config_file(str(path)),
        lambda: read_rows(path),
    ):
        with pytest.raises(RopewalkError, match=r"results\.json"):
            read()
