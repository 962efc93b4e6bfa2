"""Shards hold what was put in, end between records, and show when a single byte of them is not as written."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data.tokens import token_shards as token_shards
from ropewalk.data.tokens.token_shards import (
    ShardWriter,
    TokenFile,
    TokenShard,
    committed_shards,
    open_shard,
    remove_leftovers,
)
from ropewalk.errors import RopewalkError


def all_tokens(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a shard and its documents' bounds, read back."""
    file = TokenFile(path)
    ids = np.empty(file.offsets[-1], np.int32)
    file.read(0, ids)
    with pytest.raises(RopewalkError, match=r"ends too soon"):
        file.read(len(ids), np.empty(1 << 20, np.int32))
    file.close()
    return ids, file.offsets


ENTRIES = ("lengths", "source_ids", "hashes", "characters", "first_ids", "last_ids")

Row = tuple[list[int], str, int, int]
ROWS: list[Row] = [([5, 6, 7], "b", 2**64 - 1, 9), ([], "a", 0, 1), ([8], "b", 7, 2)]


def write(
    folder: Path, records: list[list[Row]], known: tuple[TokenShard, ...] = ()
) -> tuple[TokenShard, ...]:
    writer = ShardWriter(folder, known)
    for record in records:
        writer.next_record()
        for ids, *rest in record:
            writer.add(np.array(ids, np.int32), *rest)
    return writer.finish()


def same(first: TokenShard, second: TokenShard) -> bool:
    plain = {name: value for name, value in vars(first).items() if name not in ENTRIES}
    return plain == {name: vars(second)[name] for name in plain} and all(
        getattr(first, name).dtype == getattr(second, name).dtype
        and np.array_equal(getattr(first, name), getattr(second, name))
        for name in ENTRIES
    )


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_shards, "SHARD_TOKENS", 4)


def test_a_block_holds_what_was_put_in(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "p", ())
    writer.next_record(binary=True)
    writer.next_record()
    writer.add_empty()
    for ids, *rest in ROWS:
        writer.add(np.array(ids, np.int32), *rest)
    (written,) = writer.finish()
    shard = open_shard(written.path)
    assert same(written, shard)
    assert written.path == tmp_path / "p" / "00000.arrow"
    assert (shard.last, shard.records, shard.empty_documents, shard.binary_files) == (True, 2, 1, 1)
    assert shard.sources == ("b", "a")
    assert shard.source_ids.tolist() == [0, 1, 0]
    assert shard.lengths.tolist() == [3, 0, 1]
    assert shard.hashes.tolist() == [2**64 - 1, 0, 7]
    assert shard.characters.tolist() == [9, 1, 2]
    assert shard.first_ids.tolist() == [5, -1, 8]
    assert shard.last_ids.tolist() == [7, -1, 8]
    ids, offsets = all_tokens(shard.path)
    assert (shard.tokens, ids.tolist(), offsets.tolist()) == (4, [5, 6, 7, 8], [0, 3, 3, 4])


def test_any_arrow_reader_reads_a_shard(tmp_path: Path) -> None:
    (shard,) = write(tmp_path, [ROWS])
    # Behind the Arrow file stands its digest.
    table = pyarrow.ipc.open_file(pyarrow.py_buffer(shard.path.read_bytes()[:-64])).read_all()
    assert table.column("input_ids").to_pylist() == [ids for ids, *_ in ROWS]
    header = json.loads(table.schema.metadata[b"ropewalk"])
    assert [header["sources"][n] for n in table.column("source").to_pylist()] == ["b", "a", "b"]
    assert {name: header[name] for name in ("format", "last", "records", "documents", "tokens")} == {
        "format": token_shards.FORMAT, "last": True, "records": 1, "documents": 3, "tokens": 4
    }  # fmt: skip


def test_the_digest_is_that_of_the_plain_numbers(tmp_path: Path) -> None:
    (shard,) = write(tmp_path, [ROWS])
    content = b'[4, 3, ["b", "a"]]'
    for numbers, size in (([5, 6, 7, 8], 4), ([3, 0, 1], 8), ([0, 1, 0], 4), ([2**64 - 1, 0, 7], 8)):
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
def test_the_digest_follows_ids_lengths_sources_and_hashes(tmp_path: Path, rows: list[Row]) -> None:
    assert write(tmp_path / "a", [rows])[0].digest != write(tmp_path / "b", [ROWS])[0].digest


@pytest.mark.usefixtures("small_shards")
def test_a_block_ends_with_the_record_that_fills_it(tmp_path: Path) -> None:
    three, five = ([1] * 3, "a", 0, 3), ([1] * 5, "a", 0, 5)
    shards = write(tmp_path, [[three], [], [three, three], [], [five], [three], [([1], "a", 0, 1)]])
    assert [(shard.records, shard.tokens, shard.last) for shard in shards] == [
        (3, 9, False),
        (2, 5, False),
        (2, 4, True),
    ]
    assert [shard.path.name for shard in shards] == ["00000.arrow", "00001.arrow", "00002.arrow"]


def test_a_portion_without_records_is_one_empty_shard(tmp_path: Path) -> None:
    (written,) = write(tmp_path, [])
    (shard,) = committed_shards(tmp_path)
    assert same(written, shard)
    assert (shard.last, shard.records, shard.tokens, len(shard.lengths)) == (True, 0, 0, 0)
    assert all_tokens(shard.path)[0].tolist() == []


ROW = st.tuples(
    st.lists(st.integers(0, 2**31 - 1), max_size=6),
    st.sampled_from(["a", "b", 'quoted "file_sha256": "', "ü\n"]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**40),
)


@given(records=st.lists(st.lists(ROW, max_size=3), max_size=12), seen=st.integers(0, 12))
@pytest.mark.usefixtures("small_shards")
def test_blocks_put_together_are_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, records: list[list[Row]], seen: int
) -> None:
    folder = tmp_path_factory.mktemp("portion")
    written = write(folder, records)
    found = committed_shards(folder)
    assert all(map(same, written, found))
    assert [shard.last for shard in found] == [False] * (len(found) - 1) + [True]
    assert sum(shard.records for shard in found) == len(records)
    rows = []
    for shard in found:
        ids, offsets = all_tokens(shard.path)
        for n, source in enumerate(shard.source_ids.tolist()):
            own = ids[offsets[n] : offsets[n + 1]].tolist()
            assert len(own) == shard.lengths[n]
            rows.append((own, shard.sources[source], int(shard.hashes[n]), int(shard.characters[n])))
    assert rows == [row for record in records for row in record]
    content = [shard.path.read_bytes() for shard in found]
    # From any shard on, the same bytes are written again.
    kept = found[: min(seen, len(found) - 1)]
    for shard in found[len(kept) :]:
        shard.path.unlink()
    again = write(folder, records[sum(shard.records for shard in kept) :], kept)
    assert [shard.path.read_bytes() for shard in again] == content


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    (shard,) = write(tmp_path, [ROWS])
    content = shard.path.read_bytes()
    message = r"00000\.arrow is damaged; delete it and run again$"
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
    assert same(open_shard(shard.path), shard)


def test_a_block_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_shards, "FORMAT", 99)
    (shard,) = write(tmp_path, [ROWS])
    monkeypatch.undo()
    with pytest.raises(
        RopewalkError,
        match=r"00000\.arrow has format 99, but this version of ropewalk reads format 2; delete the file",
    ):
        open_shard(shard.path)


@pytest.mark.usefixtures("small_shards")
def test_a_block_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    shards = write(tmp_path / "one", [ROWS, ROWS])
    shards[0].path.rename(tmp_path / "kept")
    shards[1].path.rename(shards[0].path)
    with pytest.raises(
        RopewalkError,
        match=r"00000\.arrow has the contents of another file, one/00001\.arrow; delete 00000\.arrow",
    ):
        committed_shards(tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "kept").rename(tmp_path / "two" / "00000.arrow")
    with pytest.raises(
        RopewalkError,
        match=r"00000\.arrow has the contents of another file, one/00000\.arrow; delete 00000\.arrow",
    ):
        committed_shards(tmp_path / "two")


def test_an_unreadable_block_is_told(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match=r"cannot read .*00000\.arrow: No such file or directory"):
        open_shard(tmp_path / "00000.arrow")
    with pytest.raises(RopewalkError, match=r"cannot read .*00000\.arrow.*; run again"):
        TokenFile(tmp_path / "00000.arrow")


@pytest.mark.usefixtures("small_shards")
def test_blocks_count_up_to_the_first_that_is_missing(tmp_path: Path) -> None:
    assert committed_shards(tmp_path / "nowhere") == ()
    shards = write(tmp_path, [ROWS, ROWS, ROWS])
    shards[1].path.unlink()
    assert len(committed_shards(tmp_path)) == 1
    assert committed_shards(tmp_path, shards) == shards, "known shards are not looked for again"


def test_only_this_format_s_temporary_files_are_cleared(tmp_path: Path) -> None:
    remove_leftovers(tmp_path / "nowhere")
    digits = "0123456789abcdef" * 2
    names = [f".00000.{digits}.arrow", f".00012.{digits}.arrow"]
    others = [
        f".00000.{digits}.txt",
        f"00000.{digits}.arrow",
        "00000.arrow",
        ".hidden",
        f".00000.{digits[:-1]}.arrow",
    ]
    for name in [*names, *others]:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_block_is_written_although_its_temporary_file_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = write(tmp_path / "a" / "p", [ROWS])[0].path.read_bytes()
    folder = tmp_path / "b" / "p"
    losses = []
    replace = token_shards.replacing.__globals__["os"].replace

    def disturbed(source: Path, target: Path) -> None:
        if len(losses) < 3:
            losses.append(source)
            remove_leftovers(folder)
        replace(source, target)

    monkeypatch.setattr("os.replace", disturbed)
    (shard,) = write(folder, [ROWS])
    assert len(set(losses)) == 3, "each attempt has a name of its own"
    assert shard.path.read_bytes() == undisturbed
    assert [path.name for path in folder.iterdir()] == ["00000.arrow"]


def test_a_folder_that_always_loses_its_files_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(source: Path, target: Path) -> None:
        source.unlink()
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("os.replace", lost)
    with pytest.raises(RopewalkError, match=r"cannot write .*00000\.arrow: No such file or directory"):
        write(tmp_path, [ROWS])


def test_a_record_too_large_for_a_block_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_shards, "_MOST_TOKENS", 6)
    assert len(write(tmp_path / "a", [[([1] * 6, "a", 0, 6)]])) == 1
    with pytest.raises(
        RopewalkError,
        match=r"a record of source 'a' is too long: it fills .* to 7 tokens, but the limit is 6",
    ):
        write(tmp_path / "b", [[([1] * 6, "a", 0, 6), ([1], "a", 0, 1)]])
