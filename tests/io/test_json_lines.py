"""A log grows by whole lines; only an unfinished last one is passed over, whatever else is wrong is named."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.io.files import parse_json
from ropewalk.io.json_lines import BLOCK, append_line, read_lines

LINES = [{"step": 1, "text": "é\ud800\n\u2028"}, {"step": 2, "text": ""}, {"step": 3, "text": "x" * 200}]


def read(path: Path) -> list[dict[str, Any]]:
    def parse(number: int, values: dict[str, Any]) -> dict[str, Any]:
        assert values["step"] == number
        return values

    return list(read_lines(path, parse, "restore it"))


def written(path: Path, lines: list[dict[str, Any]]) -> bytes:
    for line in lines:
        append_line(path, line)
    return path.read_bytes()


def test_a_log_that_was_cut_at_any_byte_goes_on_to_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log.jsonl"
    content = written(path, LINES)
    ends = [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == len(LINES)
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        whole = sum(end <= cut for end in ends)
        assert read(path) == LINES[:whole]
        # Who only reads leaves the file as it is.
        assert path.stat().st_size == cut
        assert written(path, LINES[whole:]) == content


@pytest.mark.parametrize("unfinished", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("whole", [0, 1, 2])
def test_an_unfinished_line_is_cut_off_whatever_its_length(
    tmp_path: Path, whole: int, unfinished: int
) -> None:
    path = tmp_path / "log.jsonl"
    content = b"" if whole == 0 else written(path, LINES[:whole])
    path.write_bytes(content + b"x" * unfinished)
    append_line(path, LINES[2])
    assert path.read_bytes() == content + json.dumps(LINES[2]).encode() + b"\n"


@given(
    st.dictionaries(
        st.text(), st.none() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
    )
)
def test_values_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    append_line(path, values)
    assert list(read_lines(path, lambda _, found: found, "")) == [values]
    assert path.read_bytes().isascii()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b'{"step": 2}}', "Extra data"),
        (b'{"step": 2, "text": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
        ('{"step": 2}'.encode("utf-16"), "'utf-8' codec"),
        (b"\x00" * 40, "Expecting value"),
        (b"[2]", "it is not a JSON object"),
        (b"null", "it is not a JSON object"),
        (b'{"stop": 2}', "the field 'step' is missing"),
        (b'{"step": 2, "loss": NaN}', "NaN is not a JSON value"),
        (b'{"step": 2, "loss": -Infinity}', "-Infinity is not a JSON value"),
        (b'{"step": 2, "loss": 1e999}', "1e999 is beyond the largest float64"),
        (b'{"step": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "its brackets are nested too deeply"),
        (b'{"step": ' + b"2" * 5000 + b"}", "Exceeds the limit"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("last", [True, False])
def test_a_damaged_line_is_named_and_nothing_is_written_back(
    tmp_path: Path, line: bytes, reason: str, last: bool
) -> None:
    path = tmp_path / "log.jsonl"
    content = b'{"step": 1}\n' + line + b"\n" + (b"" if last else b'{"step": 3}\n{"st')
    path.write_bytes(content)
    with pytest.raises(RopewalkError) as refused:
        read(path)
    assert str(refused.value).startswith(f"line 2 of {path} is damaged: {reason}")
    assert str(refused.value).endswith("; restore it")
    assert path.read_bytes() == content


def test_there_need_be_no_file_but_what_is_there_must_be_one(tmp_path: Path) -> None:
    assert read(tmp_path / "none.jsonl") == []
    with pytest.raises(RopewalkError, match=f"^cannot read {tmp_path}: Is a directory"):
        read(tmp_path)
    with pytest.raises(RunFailure, match=f"^cannot write {tmp_path}: Is a directory"):
        append_line(tmp_path, {})


@pytest.mark.parametrize("truncates", [True, False])
def test_a_full_disk_is_one_sentence_and_costs_that_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    path = tmp_path / "log.jsonl"
    content = written(path, LINES[:1])
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    opened = Path.open

    class FullDisk:
        """Half of what is written goes into the file, then no more."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 20

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, data: memoryview) -> int:
            if not self.room:
                raise full
            wrote: int = self.file.write(data[: self.room])
            self.room -= wrote
            return wrote

        def truncate(self, size: int) -> None:
            if not truncates:
                raise full
            self.file.truncate(size)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *mode, **how: FullDisk(opened(self, *mode, **how)))
        with pytest.raises(
            RunFailure, match=r"^cannot write .*log\.jsonl: No space left on device; earlier lines"
        ):
            append_line(path, LINES[1])
    assert path.read_bytes() == (content if truncates else content + json.dumps(LINES[1]).encode()[:20])
    append_line(path, LINES[1])
    assert read(path) == LINES[:2]


def test_a_line_that_does_not_reach_the_disk_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    content = written(path, LINES[:1])

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailure, match="No space left on device"):
        append_line(path, LINES[1])
    assert path.read_bytes() == content


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_does_not_have_is_not_written(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_line(tmp_path / "log.jsonl", {"loss": value})
    assert list(tmp_path.iterdir()) == []


def test_strict_json_takes_what_the_standard_takes_alone() -> None:
    assert parse_json(b'{"a": [1, -2.5e3, null, true, "\\ud800"]}', strict=True) == {
        "a": [1, -2500.0, None, True, "\ud800"]
    }
    for text in (b"NaN", b"-Infinity", b"1e999", b"\xff", b"[" * 100_000):
        with pytest.raises(json.JSONDecodeError):
            parse_json(text, strict=True)
