"""Files of a source: which of a folder are read, in which order, and how their bytes become text."""

import gzip
import re
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.data import ReadingCounts, read_documents
from ropewalk.data.read import files, records
from ropewalk.data.read.files import LONGEST_DOCUMENT, decode, open_bytes, read_text, read_text_if_text
from tests.data.read.read_cases import jsonl, read, texts, write_parquet


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


COMPRESS = {".gz": gzip.compress, ".zst": zstandard.compress}
OTHER_NAMES = [
    "s.jl",
    "s.jsonl.txt",
    "part-00000",
    "s.jsonl.bak",
    "s.log",
    "s.json",
    "s.jsonl.bak.gz",
    "part-1.zst",
]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_json_lines_under_any_name_are_read_as_records(tmp_path: Path, name: str, named: bool) -> None:
    path = tmp_path / name
    content = b"\xef\xbb\xbf\n" + jsonl(["one", "two"]) + b"\n" + jsonl(["three" * 3000])
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))
    assert texts(read(path if named else tmp_path)) == ["one", "two", "three" * 3000]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (jsonl(["one", "two"]) + b'{"text": "thr\n', r"s\.jl:3: broken JSON line"),
        (b'{"text": "cut\n' + jsonl(["two"]), r"s\.jl:1: broken JSON line"),
        (jsonl(["one"]) + b"plain\n" + jsonl(["two"]), r"s\.jl:2: broken JSON line"),
        (b'{"body": "one"}\n{"body": "two"}\n', r"s\.jl:1: no text field 'text'; the fields are 'body'"),
        (
            b'[{"text": "one"},\n {"text": "two"}]',
            r"s\.jl is a JSON array of 2 records; write one record per line",
        ),
        (b'[\n  {"text": "one"}\n]\n', r"s\.jl is a JSON array of 1 records"),
    ],
)
def test_other_files_of_records_are_never_one_text(tmp_path: Path, content: bytes, said: str) -> None:
    for name in ("s.jl", "s.json"):
        path = tmp_path / name.removeprefix("s.") / name
        path.parent.mkdir()
        path.write_bytes(content)
        for place in (path.parent, path):
            with pytest.raises(RopewalkError, match=said.replace("s\\.jl", re.escape(name))):
                read(place)


@pytest.mark.parametrize(
    "text",
    [
        "module Knots\nfunction tie(n)\n  n + 1\nend\nend\n",
        '{"name": "knot", "version": 1}',
        '{\n  "text": "pretty"\n}\n',
        "{ 1, 2 },\n{ 3, 4 },\n",
        'A line such as\n{"text": "x"}\nis a record.\n',
        '[{"name": "no record"}]',
        "[1, 2]",
        "[link]: x\n",
        "[" * 100_000,
    ],
)
def test_texts_that_only_look_a_little_like_records_stay_texts(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.jl").write_text(text)
    (tmp_path / "s.json").write_text(text)
    assert texts(read(tmp_path)) == [text, text]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "a.arrow", "a.txt", "a.bin", "a.npy"]
)
def test_a_git_lfs_pointer_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(RopewalkError, match=rf"{name} is a Git LFS pointer .* run `git lfs pull`"):
        read(tmp_path / name)


def test_a_git_lfs_pointer_in_place_of_a_picture_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(POINTER)
    (tmp_path / "a.txt").write_text("text")
    counts = ReadingCounts()
    assert texts(read(tmp_path, counts)) == ["text"]
    assert counts.binary_files == 1


@pytest.mark.slow
def test_a_line_or_text_beyond_the_limit_is_refused_before_it_is_held(tmp_path: Path) -> None:
    """A file of 1 MB that decompresses to 1 GiB, of which no more than the limit is read."""
    member = gzip.compress(b"a" * (1 << 23), 1)
    for name in ("a.jsonl.gz", "a.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b'{"text": "') + member * 128)
        tracemalloc.start()
        try:
            with pytest.raises(RopewalkError, match=rf"{name}(:1)?: the text is longer than 128 MiB"):
                read(tmp_path / name)
            # The buffer of a line that grows, and its copy.
            assert tracemalloc.get_traced_memory()[1] < 4 * LONGEST_DOCUMENT
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_document_may_be_as_long_as_the_limit(tmp_path, monkeypatch, suffix):
    longest = jsonl(["a" * 50])
    monkeypatch.setattr(files, "LONGEST_DOCUMENT", len(longest))
    monkeypatch.setattr(records, "LONGEST_DOCUMENT", len(longest))
    compress = COMPRESS.get(suffix, bytes)
    for name in (f"a.jsonl{suffix}", f"a.txt{suffix}"):
        (tmp_path / name).write_bytes(compress(longest))
        assert texts(read(tmp_path / name)) == ["a" * 50]
    (tmp_path / f"b.jsonl{suffix}").write_bytes(compress(jsonl(["b"]) + jsonl(["a" * 51]) + jsonl(["c"])))
    with pytest.raises(RopewalkError, match=rf"b.jsonl{suffix}:2: the text is longer"):
        read(tmp_path / f"b.jsonl{suffix}")
    write_parquet(tmp_path / "d.parquet", {"text": ["a" * (len(longest) + 1)]})
    with pytest.raises(RopewalkError, match=r"d\.parquet:row 0: the text is longer"):
        read(tmp_path / "d.parquet")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "c.unknown").write_bytes(b"a" * (len(longest) + 1))
    with pytest.raises(RopewalkError, match=r"c\.unknown: the text is longer"):
        read(tmp_path / "folder")


def test_a_url_is_no_file() -> None:
    with pytest.raises(
        RopewalkError, match=r"no file or folder 's3://b/x\.jsonl'; ropewalk does not read URLs; copy or"
    ):
        read("s3://b/x.jsonl")
