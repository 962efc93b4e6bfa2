"""Shards hold what was put in, and show when a single byte of them is not as written."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data.read.readers import ReadingCounts
from ropewalk.data.tokens import token_shards
from ropewalk.data.tokens.token_shards import (
    ShardFile,
    TokenShard,
    open_shard,
    writing_shard,
)
from ropewalk.errors import RopewalkError
from ropewalk.io.files import remove_left_overs


def all_tokens(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a shard and its documents' bounds, read back."""
    file = ShardFile(path)
    ids = np.empty(file.offsets[-1], np.int32)
    file.read(0, ids)
    with pytest.raises(RopewalkError, match=r"ends too soon"):
        file.read(len(ids), np.empty(1 << 20, np.int32))
    file.close()
    return ids, file.offsets


Row = tuple[list[int], str, int, int]
ROWS: list[Row] = [([5, 6, 7], "b", 2**64 - 1, 9), ([], "a", 0, 1), ([8], "b", 7, 2)]


def write(path: Path, rows: list[Row]) -> TokenShard:
    with writing_shard(path) as writer:
        for ids, *rest in rows:
            writer.add(np.array(ids, np.int32), *rest)
    return open_shard(path)


@pytest.fixture
def shard(tmp_path: Path) -> TokenShard:
    return write(tmp_path / "p.tokens", ROWS)


def test_a_shard_holds_what_was_put_in(tmp_path: Path) -> None:
    with writing_shard(tmp_path / "new" / "p.tokens") as writer:
        writer.reading.binary_files += 1
        writer.reading.empty_documents += 2
        writer.reading.dropped_nulls += 3
        for ids, *rest in ROWS:
            writer.add(np.array(ids, np.int32), *rest)
        assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".tokens"]
        assert not (tmp_path / "new" / "p.tokens").exists()
    shard = open_shard(tmp_path / "new" / "p.tokens")
    assert shard.reading == ReadingCounts(3, empty_documents=2, binary_files=1, dropped_nulls=3)
    assert shard.sources == ("b", "a")
    expected = {
        "lengths": (np.int64, [3, 0, 1]),
        "source_ids": (np.int32, [0, 1, 0]),
        "hashes": (np.uint64, [2**64 - 1, 0, 7]),
        "characters": (np.int64, [9, 1, 2]),
        "first_ids": (np.int32, [5, -1, 8]),
        "last_ids": (np.int32, [7, -1, 8]),
    }
    for name, (kind, values) in expected.items():
        assert (getattr(shard, name).dtype, getattr(shard, name).tolist()) == (kind, values)
    ids, offsets = all_tokens(shard.path)
    assert (shard.tokens, ids.tolist(), offsets.tolist()) == (4, [5, 6, 7, 8], [0, 3, 3, 4])


def test_tokens_that_are_never_targets_count_as_their_ids_at_the_ends(tmp_path: Path) -> None:
    shard = write(tmp_path / "p.tokens", [([~5, 6, ~7], "a", 0, 1)])
    assert (shard.first_ids.tolist(), shard.last_ids.tolist()) == ([5], [7])
    assert all_tokens(shard.path)[0].tolist() == [~5, 6, ~7]


def test_the_file_is_plain_numbers_and_a_header(shard: TokenShard) -> None:
    content = shard.path.read_bytes()
    body, seal = content[:-64], content[-64:]
    assert seal == hashlib.sha256(body).hexdigest().encode()
    size = int(body[-16:], 16)
    header = json.loads(body[-16 - size : -16])
    assert (header["format"], header["name"], header["documents"], header["tokens"]) == (3, "p", 3, 4)
    numbers = b""
    for values, width in (
        ([5, 6, 7, 8], 4), ([3, 0, 1], 8), ([0, 1, 0], 4), ([2**64 - 1, 0, 7], 8), ([9, 1, 2], 8),
    ):  # fmt: skip
        numbers += b"".join(value.to_bytes(width, "little") for value in values)
    for values in ([5, -1, 8], [7, -1, 8]):
        numbers += b"".join(value.to_bytes(4, "little", signed=True) for value in values)
    assert body[: -16 - size] == numbers


def test_the_digest_is_that_of_the_plain_numbers(shard: TokenShard) -> None:
    ids = b"".join(value.to_bytes(4, "little") for value in (5, 6, 7, 8))
    content = json.dumps([hashlib.sha256(ids).hexdigest(), ["b", "a"]]).encode()
    for numbers, size in (([3, 0, 1], 8), ([0, 1, 0], 4), ([2**64 - 1, 0, 7], 8)):
        content += b"".join(number.to_bytes(size, "little") for number in numbers)
    assert shard.digest == hashlib.sha256(content).hexdigest()


CHANGES: list[list[Row]] = [
    [([5, 6, 9], "b", 2**64 - 1, 9), *ROWS[1:]],
    [([5, 6], "b", 2**64 - 1, 9), ([7], "a", 0, 1), ROWS[2]],
    [([5, 6, 7], "c", 2**64 - 1, 9), *ROWS[1:]],
    [*ROWS[:2], ([8], "a", 7, 2)],
    [*ROWS[:2], ([8], "b", 6, 2)],
]


@pytest.mark.parametrize("rows", CHANGES)
def test_the_digest_follows_ids_lengths_sources_and_hashes(
    shard: TokenShard, tmp_path: Path, rows: list[Row]
) -> None:
    assert write(tmp_path / "other.tokens", rows).digest != shard.digest


def test_a_split_without_documents_is_an_empty_shard(tmp_path: Path) -> None:
    shard = write(tmp_path / "p.tokens", [])
    assert (shard.tokens, len(shard.lengths), shard.sources) == (0, 0, ())
    assert all_tokens(shard.path)[0].tolist() == []


ROW = st.tuples(
    st.lists(st.integers(0, 2**31 - 1), max_size=6),
    st.sampled_from(["a", "b", 'quoted "sha256": "', "ü\n"]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
)


@given(rows=st.lists(ROW, max_size=30))
def test_what_is_read_is_what_was_written(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    path = tmp_path_factory.mktemp("shard") / "p.tokens"
    shard = write(path, rows)
    ids, offsets = all_tokens(path)
    found = [
        (
            ids[offsets[n] : offsets[n + 1]].tolist(),
            shard.sources[source],
            int(shard.hashes[n]),
            int(shard.characters[n]),
        )
        for n, source in enumerate(shard.source_ids.tolist())
    ]
    assert found == rows
    content = path.read_bytes()
    assert write(path, rows).digest == shard.digest
    assert path.read_bytes() == content


def test_every_flipped_byte_and_every_cut_is_noticed(shard: TokenShard) -> None:
    content = shard.path.read_bytes()
    message = r"p\.tokens is damaged; delete it and run again$"
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        shard.path.write_bytes(damaged)
        with pytest.raises(RopewalkError, match=message):
            open_shard(shard.path)
    for length in [*range(0, len(content), 61), len(content) - 1]:
        shard.path.write_bytes(content[:length])
        with pytest.raises(RopewalkError, match=message):
            open_shard(shard.path)
    shard.path.write_bytes(content + b"x")
    with pytest.raises(RopewalkError, match=message):
        open_shard(shard.path)
    shard.path.write_bytes(content)
    assert open_shard(shard.path).digest == shard.digest


def test_a_shard_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(token_shards, "FORMAT", 99)
        write(tmp_path / "p.tokens", ROWS)
    with pytest.raises(
        RopewalkError,
        match=r"p\.tokens has format 99, but this version of ropewalk reads format 3; delete the file",
    ):
        open_shard(tmp_path / "p.tokens")


def test_a_shard_in_the_place_of_another_is_refused(shard: TokenShard) -> None:
    other = shard.path.rename(shard.path.with_name("other.tokens"))
    with pytest.raises(
        RopewalkError,
        match=r"other\.tokens has the contents of another file, p\.tokens; delete other\.tokens and run again",
    ):
        open_shard(other)


def test_an_unreadable_shard_is_told(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match=r"cannot read .*p\.tokens: No such file or directory"):
        open_shard(tmp_path / "p.tokens")
    with pytest.raises(RopewalkError, match=r"cannot read .*p\.tokens.*; run again"):
        ShardFile(tmp_path / "p.tokens")
    (tmp_path / "p.tokens").write_bytes(b"short")
    with pytest.raises(RopewalkError, match=r"cannot read .*p\.tokens.*; run again"):
        ShardFile(tmp_path / "p.tokens")


def test_a_failed_shard_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RopewalkError, match="line 3"), writing_shard(tmp_path / "p.tokens"):
        raise RopewalkError("line 3")
    assert list(tmp_path.iterdir()) == []

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RopewalkError, match=r"cannot write .*p\.tokens: No space left on device"):
        write(tmp_path / "p.tokens", ROWS)
    assert list(tmp_path.iterdir()) == []


def test_only_these_shards_temporary_files_are_cleared(tmp_path: Path) -> None:
    name, digits = "0123456789abcdef" * 2, "fedcba9876543210" * 2
    mine = f".{name}.{digits}.tokens"
    others = [
        f".{digits}.{digits}.tokens",
        f".{name}.{digits}.arrow",
        f"{name}.tokens",
        ".hidden",
        f".{name}.{digits[:-1]}.tokens",
    ]
    for each in [mine, *others]:
        (tmp_path / each).touch()
    remove_left_overs(tmp_path, f"{name}.tokens")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
