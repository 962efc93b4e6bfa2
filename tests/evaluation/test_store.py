"""The folder of an evaluation: what would make another result is another evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.store import RUN_FILE, begin, path_digest, read_record


def test_same_identity_goes_on_and_another_is_refused_by_name(tmp_path: Path) -> None:
    begin(tmp_path / "new", {"seed": 0, "haystack_sources": {"essays": "a"}})
    begin(tmp_path / "new", {"haystack_sources": {"essays": "a"}, "seed": 0})
    with pytest.raises(RopewalkError, match="differs in haystack_sources, seed; give another --out"):
        begin(tmp_path / "new", {"seed": 1, "haystack_sources": {"essays": "b"}})
    assert json.loads((tmp_path / "new" / RUN_FILE).read_text())["seed"] == 0
    (tmp_path / "new" / RUN_FILE).write_text('{"format": 1, "settings": [1]}')
    with pytest.raises(RopewalkError, match="differs in settings; give another --out"):
        begin(tmp_path / "new", {"settings": {"seed": 1}})


def test_foreign_folder_and_file_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RopewalkError, match="is not empty and contains no evaluation"):
        begin(tmp_path, {})
    with pytest.raises(RopewalkError, match="is a file"):
        begin(tmp_path / "thesis.txt", {})
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.txt"]


def test_digest_of_a_path_is_of_names_and_contents(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.txt", tmp_path / "folder"
    file.write_text("one")
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "b.txt").write_text("one")
    first = path_digest(file), path_digest(folder)
    assert first[0] != first[1]
    file.write_text("two")
    (folder / "deep" / "b.txt").rename(folder / "deep" / "c.txt")
    assert path_digest(file) != first[0]
    assert path_digest(folder) != first[1]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"no": "results"}',
        '{"results": [7]}',
        '{"results": 7}',
        '{"model": "m", "settings": {"threshold": "a"}, "results": []}',
        '{"model": "m", "settings": [1], "results": []}',
        '{"model": 7, "settings": {"threshold": 1}, "results": []}',
    ],
)
def test_what_is_no_record_is_said_in_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(RopewalkError, match=r"results\.json|result must be a JSON object"):
        read_record(tmp_path)


def test_a_folder_of_before_goes_on_under_the_new_name_of_its_sources(tmp_path):
    begin(tmp_path / "old", {"materials": {"essays": "a"}, "seed": 0})
    begin(tmp_path / "old", {"haystack_sources": {"essays": "a"}, "seed": 0})
    with pytest.raises(RopewalkError, match="differs in haystack_sources; give another --out"):
        begin(tmp_path / "old", {"haystack_sources": {"essays": "b"}, "seed": 0})
