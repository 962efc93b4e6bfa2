"""Files of a source: which of a folder are read, in which order, and how their bytes become text."""

import gzip
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.data import ReadingCounts, read_documents
from ropewalk.data.read.files import decode, open_bytes, read_text, read_text_if_text
from tests.data.read.read_cases import jsonl, read


def test_folder_is_read_in_order_and_skips_binary_and_hidden(tmp_path: Path) -> None:
    folder = tmp_path / "my.corpus"
    for name, content in {
        "b.md": b"\xef\xbb\xbfwith a mark",
        "a.txt": b"line\r\nline\r\n",
        "sub/z.py": b"print()",
        "sub/a.unknown": "größer".encode(),
        "rows.jsonl": jsonl(["from a row"], source="named"),
        "settings.json": b'{"a": 1}',
        "lines.json": jsonl(["from json"]),
        "old.txt.gz": gzip.compress(b"compressed"),
        "blob.bin": b"\0\1\2",
        "latin.unknown": b"gr\xf6\xdfer",
        "archive.tar.gz": b"never opened",
        ".hidden.txt": b"secret",
        ".git/config": b"secret",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "dangling.txt").symlink_to(folder / "nothing")
    (folder / "sub" / "loop").symlink_to(folder)
    counts = ReadingCounts()
    documents = read(folder, counts)
    assert [(Path(d.origin.split(":")[0]).name, d.text) for d in documents] == [
        ("a.txt", "line\r\nline\r\n"),
        ("b.md", "with a mark"),
        ("lines.json", "from json"),
        ("old.txt.gz", "compressed"),
        ("rows.jsonl", "from a row"),
        ("settings.json", '{"a": 1}'),
        ("a.unknown", "größer"),
        ("z.py", "print()"),
    ]
    assert {document.source for document in documents} == {"my.corpus", "named"}
    assert counts == ReadingCounts(documents=8, binary_files=3, hidden_entries=2)


def test_folder_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0")
    (tmp_path / ".b").write_bytes(b"x")
    with pytest.raises(RopewalkError, match=r"\(1 binary files, 1 hidden files or folders skipped\)"):
        read(tmp_path)
    with pytest.raises(RopewalkError, match="give at least one"):
        list(read_documents([]))


FRAMES = st.lists(st.binary(max_size=40), min_size=1, max_size=4)


@given(FRAMES)
def test_compressed_files_of_several_frames_are_read_to_their_end(tmp_path_factory, frames):
    folder = tmp_path_factory.mktemp("compressed")
    for suffix, compress in ((".gz", gzip.compress), (".zst", zstandard.compress)):
        path = folder / f"a.txt{suffix}"
        path.write_bytes(b"".join(map(compress, frames)))
        with open_bytes(path) as stream:
            assert stream.read() == b"".join(frames)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_without_a_header_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.touch()
    with pytest.raises(RopewalkError, match="is damaged or cut off: the compressed file is empty"):
        read_text(path)


def test_bytes_that_are_no_text_are_refused_with_their_place_and_passed_over_in_a_folder(tmp_path):
    path = tmp_path / "a.txt"
    for content, message in (
        (b"abc\xff", "not UTF-8: byte 0xff at offset 3"),
        (b"ab\0c", "contains a NUL byte at offset 2"),
    ):
        path.write_bytes(content)
        with pytest.raises(RopewalkError, match=message):
            read_text(path)
        assert read_text_if_text(path) is None


def test_a_byte_order_mark_is_no_text_and_line_ends_stay(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    assert read_text(path) == read_text_if_text(path) == "a\r\nb\n"
    # Further on in a file it is a character like any other.
    assert decode(b"\xef\xbb\xbf", path, offset=7) == "\ufeff"


def test_a_url_is_no_file() -> None:
    with pytest.raises(
        RopewalkError, match=r"no file or folder 's3://b/x\.jsonl'; ropewalk does not read URLs; copy or"
    ):
        read("s3://b/x.jsonl")
