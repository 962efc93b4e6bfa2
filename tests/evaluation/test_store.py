"""The folder of an evaluation: what would make another result is another evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.store import path_digest, read_record


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
