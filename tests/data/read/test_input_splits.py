"""Input splits one after the other are the sources, whatever they are cut into, and wherever reading begins."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data.read import input_splits as module
from ropewalk.data.read.documents import Document, Record, TokenisedDocument
from ropewalk.data.read.draw import draw_documents
from ropewalk.data.read.embedded import embedded_documents
from ropewalk.data.read.input_splits import (
    InputSplit,
    check_specs,
    is_blank,
    plan_input_splits,
    read_input_split,
)
from ropewalk.data.read.readers import ReadingCounts, read_documents
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError
from tests.data.cases import refusal
from tests.data.read.split_cases import lines, texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("splits")


def plain(record: Record) -> tuple[object, ...]:
    """What a record holds, without its place, which a stretch of a file tells in another way."""
    kept = [
        (d.source, d.text) if isinstance(d, Document) else (d.source, d.input_ids.tolist())
        for d in record.documents
    ]
    return (record.binary, *kept)


def read(path: object, **fields: object) -> list[tuple[object, ...]]:
    planned = plan_input_splits([SourceSpec(path=str(path), **fields)])
    return [plain(record) for split in planned for record in read_input_split(split)]


def test_json_lines_under_another_name_have_tokens_of_their_own(tmp_path):
    """Earlier versions stored the tokens of such a file as those of one text, under the identity of the file."""
    for name, content in (("s.txt", lines(["a", "b"])), ("t.txt", b"text"), ("u.jsonl", lines(["a"]))):
        (tmp_path / name).write_bytes(content)
    found = [
        split.identity.get("kind")
        for name in ("s.txt", "t.txt", "u.jsonl")
        for split in plan_input_splits([SourceSpec(path=str(tmp_path / name))])
    ]
    assert found == ["lines", None, None]


def test_the_portions_of_a_folder_are_the_folder(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(mixed)
    assert len(whole) == 1 + 1 + 22 + 1 + 1 + 1 + 2 + 12 + 30 + 1 + 13 + 1 + 2
    for size in (1, 7, 100, 1000):
        monkeypatch.setattr(module, "SPLIT_BYTES", size)
        assert read(mixed) == whole


def test_how_a_folder_is_cut(mixed: Path, small: None) -> None:
    planned = plan_input_splits([SourceSpec(path=str(mixed))])
    names = [[str(path.relative_to(mixed)) for path in split.files] for split in planned]
    assert names[:2] == [["a.txt"], ["b.md"]]
    assert names[2:6] == [["c.jsonl"]] * 4
    assert names[6:8] == [["d.txt", "e.bin", "f.json"], ["g.json"]]
    assert names[8:12] == [["h.json"]] * 4
    assert names[12:14] == [["i.jsonl.gz"], ["j.tar.gz"]]
    assert names[14:19] == [["k.parquet"]] * 5
    assert names[19:] == [["l.jsonl"], ["sub/m.py", "sub/n.txt"]]
    assert [(p.start, p.stop) for p in planned[2:6]] == [(0, 100), (100, 200), (200, 300), (300, None)]
    assert [(p.start, p.stop) for p in planned[14:19]] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, None)]
    assert sum(p.size for p in planned[2:6]) == (mixed / "c.jsonl").stat().st_size
    assert sum(p.size for p in planned[6:8]) == sum(f.stat().st_size for p in planned[6:8] for f in p.files)
    for split in (*planned[:2], *planned[6:8], *planned[12:14], *planned[19:]):
        assert (split.start, split.stop) == (0, None)


def test_row_groups_are_put_together_up_to_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    noise = (np.random.Philox(0).random_raw(700) >> np.uint64(1)).tolist()
    rows = pyarrow.table({"text": [str(n) for n in noise], "more": noise})
    pyarrow.parquet.write_table(rows, path, row_group_size=70)
    metadata = pyarrow.parquet.read_metadata(path)
    size = max(
        sum(metadata.row_group(g).column(c).total_compressed_size for c in range(2)) for g in range(10)
    )
    monkeypatch.setattr(module, "SPLIT_BYTES", 3 * size)
    planned = plan_input_splits([SourceSpec(path=str(path))])
    assert [(p.start, p.stop) for p in planned] == [(0, 3), (3, 6), (6, 9), (9, None)]
    assert [text for p in planned for text in texts(p)] == [str(n) for n in noise]
    origins = [
        d.origin for p in planned for r in read_input_split(p) for d in r.documents if isinstance(d, Document)
    ]
    assert origins == [f"{path}:row {n}" for n in range(700)]


@pytest.mark.slow
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["", " ", "\r", '{"text": ""}', '{"text": "a"}\r', '{"n":1,"text":"b"} ']),
            st.text(st.characters(codec="utf-8"), max_size=30).map(
                lambda text: json.dumps({"text": text}, ensure_ascii=False)
            ),
        ),
        max_size=12,
    ),
    st.booleans(),
    st.booleans(),
    st.integers(1, 120),
)
def test_a_line_belongs_to_the_range_of_its_first_byte(
    folder: Path, drawn: list[str], mark: bool, ended: bool, size: int
) -> None:
    encoded = [line.encode() for line in drawn]
    content = b"\xef\xbb\xbf" * mark + b"\n".join(encoded) + b"\n" * ended
    path = folder / "ranges.jsonl"
    path.write_bytes(content)
    # The oracle walks over the bytes one by one.
    expected: dict[int, list[tuple[object, ...]]] = {}
    begin = 0
    for position in range(len(content) + 1):
        if position == len(content) or content[position] == 0x0A:
            line = content[begin : position + 1].decode().removeprefix("\ufeff" if begin == 0 else "")
            if begin < len(content):
                documents = [] if not line or line.isspace() else [("ranges", json.loads(line)["text"])]
                expected.setdefault(begin // size, []).append((False, *documents))
            begin = position + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SPLIT_BYTES", size)
        planned = plan_input_splits([SourceSpec(path=str(path))])
    assert len(planned) == max(1, -(-len(content) // size))
    for number, split in enumerate(planned):
        wanted = expected.get(number, [])
        assert [plain(record) for record in read_input_split(split)] == wanted


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.integers(0, 5),
    st.integers(0, 6),
)
def test_row_groups_are_read_like_a_table(folder: Path, groups: list[int], start: int, length: int) -> None:
    path = folder / "groups.parquet"
    rows = [f"text {n}" for n in range(sum(groups))]
    schema = pyarrow.schema({"text": pyarrow.string()})
    done = 0
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for count in groups:
            writer.write_table(pyarrow.table({"text": rows[done : done + count]}, schema), row_group_size=5)
            done += count
    with pyarrow.parquet.ParquetFile(path) as file:
        counts = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
    start = min(start, len(counts))
    stop = min(start + length, len(counts))
    split = InputSplit(SourceSpec(path=str(path)), (path,), start, stop, {}, 0)
    wanted = rows[sum(counts[:start]) : sum(counts[:stop])]
    found = [d for r in read_input_split(split) for d in r.documents if isinstance(d, Document)]
    assert [d.text for d in found] == wanted
    first = sum(counts[:start])
    assert [d.origin for d in found] == [f"{path}:row {first + n}" for n in range(len(found))]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (b'{"text": "y"\n', r"a\.jsonl:31: broken JSON line"),
        (b'{"text": 3}\n', r"a\.jsonl:31: the field 'text' must be a string, got a number"),
        (b'{"text": "\xe9"}\n', r"a\.jsonl is not UTF-8: byte 0xe9 at offset {offset}; convert it to UTF-8$"),
    ],
)
def test_an_error_in_a_range_names_the_line_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bytes, message: str
) -> None:
    path, before = tmp_path / "a.jsonl", lines(["x"] * 29) + b"\n"
    path.write_bytes(before + broken + lines(["y"] * 9))
    for size in (1, 13, 64, 500):
        monkeypatch.setattr(module, "SPLIT_BYTES", size)
        with pytest.raises(RopewalkError, match=message.format(offset=len(before) + 10)):
            read(path)


def test_a_stretch_of_a_file_that_became_shorter_is_refused(tmp_path: Path, small: None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["x" * 90] * 3))
    first, second, last = plan_input_splits([SourceSpec(path=str(path))])[:3]
    path.write_bytes(lines(["x" * 20]) * 2)
    with pytest.raises(
        RopewalkError,
        match=r"changed while it was read: it ends at byte 66, but was longer before; run again",
    ):
        list(read_input_split(first))
    for split in (second, last):
        with pytest.raises(RopewalkError, match=r"ends at byte 66, but was longer"):
            list(read_input_split(split))
    path = tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"] * 9}), path, row_group_size=3)
    last = plan_input_splits([SourceSpec(path=str(path))])[-1]
    assert (last.start, last.stop) == (2, None)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"] * 3}), path, row_group_size=3)
    with pytest.raises(RopewalkError, match="has 1 row groups, but had more before"):
        list(read_input_split(last))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    corpus = tmp_path / "dataset"
    corpus.mkdir()
    for shard in range(3):
        (corpus / f"part-{shard}.jsonl").write_bytes(lines([f"{shard}.{n}" for n in range(shard + 2)]))
    return corpus


def test_a_dataset_is_cut_into_its_shards(dataset: Path) -> None:
    spec = SourceSpec(path=f"hf:{dataset}")
    planned = plan_input_splits([spec])
    assert [(p.files, p.start, p.stop, p.size) for p in planned] == [((), n, n + 1, 0) for n in range(3)]
    assert [texts(p) for p in planned] == [
        ["0.0", "0.1"],
        ["1.0", "1.1", "1.2"],
        ["2.0", "2.1", "2.2", "2.3"],
    ]
    assert [document.text for document in read_documents([spec])] == [
        text for p in planned for text in texts(p)
    ]
    (dataset / "part-3.jsonl").write_bytes(lines(["new"]))
    with pytest.raises(RopewalkError, match="had 3 shards when reading began, but has 4 now"):
        list(read_input_split(planned[1]))


def test_a_limit_counts_records_that_have_a_document(mixed: Path, dataset: Path, small: None) -> None:
    path = mixed.parent / "limit.jsonl"
    path.write_bytes(
        b'\n{"text": " "}\n' + lines(["1", "", "2"]) + b'{"input_ids": []}\n{"input_ids": [3]}\nbroken'
    )
    (split,) = plan_input_splits([SourceSpec(path=str(path), max_documents=2)])
    assert [plain(r) for r in read_input_split(split)][-2:] == [
        (False, ("limit", "")),
        (False, ("limit", "2")),
    ]
    for limit, records in ((1, 3), (2, 5), (3, 7)):
        (split,) = plan_input_splits([SourceSpec(path=str(path), max_documents=limit)])
        assert len(list(read_input_split(split))) == records
    assert [d.text for d in read_documents([SourceSpec(path=str(path), max_documents=2)])] == ["1", "2"]
    whole = read(mixed)
    for limit in (1, 5, 30, 1000):
        (split,) = plan_input_splits([SourceSpec(path=str(mixed), max_documents=limit)])
        records = list(read_input_split(split))
        assert [plain(record) for record in records] == whole[: len(records)]
        full = sum(not all(map(is_blank, record.documents)) for record in records)
        assert full == limit or len(records) == len(whole)
    (split,) = plan_input_splits([SourceSpec(path=f"hf:{dataset}", max_documents=3)])
    assert texts(split) == ["0.0", "0.1", "1.0"]
    (split,) = plan_input_splits([SourceSpec(path="embedded", max_documents=2)])
    assert len(texts(split)) == 2
    for limit in (0, -1):
        refused = refusal(SourceSpec, path=str(path), max_documents=limit)
        assert refused == f"max_documents must be 1 or more, got {limit}"


def test_the_embedded_corpus_is_one_split() -> None:
    (split,) = plan_input_splits([SourceSpec(path="embedded:validation", name="mine")])
    wanted = [(document.text, "mine") for document in embedded_documents("validation")]
    records = list(read_input_split(split))
    assert [(d.text, d.source) for (d,) in (r.documents for r in records)] == wanted


def test_sources_without_anything_to_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match="give at least one file, folder or dataset"):
        plan_input_splits([])
    (tmp_path / ".hidden").write_bytes(b"x")
    for limit in (None, 3):
        with pytest.raises(RopewalkError, match=r"no documents in .* \(1 hidden files or folders skipped\)"):
            plan_input_splits([SourceSpec(path=str(tmp_path), max_documents=limit)])
    with pytest.raises(RopewalkError, match=r"there is no file or folder .*none"):
        plan_input_splits([SourceSpec(path=str(tmp_path / "none"))])
    (tmp_path / "a.pdf").write_bytes(b"x")
    with pytest.raises(RopewalkError, match=r"unsupported suffix '\.pdf'"):
        plan_input_splits([SourceSpec(path=str(tmp_path / "a.pdf"))])


def test_documents_are_counted_alike(mixed: Path) -> None:
    (mixed / "l.jsonl").unlink()
    counts = ReadingCounts()
    documents = list(read_documents([SourceSpec(path=str(mixed))], counts))
    records = [
        record for p in plan_input_splits([SourceSpec(path=str(mixed))]) for record in read_input_split(p)
    ]
    kept = [d for r in records for d in r.documents if not is_blank(d)]
    assert documents == kept
    blank = sum(is_blank(d) for r in records for d in r.documents)
    assert counts == ReadingCounts(len(kept), blank, sum(r.binary for r in records), 0)
    assert (blank, counts.binary_files) == (1, 2)


def test_blank_is_no_text_and_no_token() -> None:
    for text, blank in (("", True), (" \n\u2003", True), ("\ufeff", False), ("x", False)):
        assert is_blank(Document(text, "s", "o")) is blank
    assert is_blank(TokenisedDocument(np.zeros(0, np.int32), "s"))
    assert not is_blank(TokenisedDocument(np.zeros(1, np.int32), "s"))


@pytest.fixture
def shelves(tmp_path: Path) -> Path:
    """A folder with files of records and texts, and two folders of these."""
    folder = tmp_path / "shelves"
    for name, content in (
        ("books.jsonl", b'{"text": "b", "source": "novels"}\n' + lines(["c"])),
        ("shelves.txt", b"n"),
        ("web/part-0.jsonl", lines(["w"])),
        ("web/deep/part-1.jsonl.gz", gzip.compress(lines(["v"]))),
        ("code/a.py", b"1"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("max_documents", [None, 100])
def test_each_file_or_folder_of_a_folder_may_be_a_source(shelves: Path, max_documents: int | None) -> None:
    def sources(**fields: object) -> list[object]:
        return [
            each for (_, *found) in read(shelves, max_documents=max_documents, **fields) for each in found
        ]

    # As by hand: each file by itself, under its own name.
    by_hand = {
        "books": ["b", "c"],
        "shelves": ["n"],
        "code/a": ["1"],
        "web/part-0": ["w"],
        "web/deep/part-1": ["v"],
    }
    wanted = [(name, text) for name, found in by_hand.items() for text in found]
    assert sources(source_per="file") == wanted
    assert sources(source_per="folder") == [
        *((shelves.name, text) for text in ("b", "c", "n")),
        ("code", "1"),
        ("web", "w"),
        ("web", "v"),
    ]
    drawn = draw_documents([SourceSpec(path=str(shelves), source_per="file")], 0)
    assert sorted((each.source, each.text) for each in drawn) == sorted(wanted)


def test_names_that_two_files_share_are_refused_unless_one_is_an_index(shelves: Path) -> None:
    for name in ("dolma2.npy", "dolma2.csv.gz"):
        shutil.copy(Path(__file__).parent / "token_files" / name, shelves)
    check_specs([SourceSpec(path=str(shelves), source_per="file")])
    (shelves / "web" / "part-0.parquet").write_bytes(b"")
    with pytest.raises(RopewalkError, match=r"part-0\.parquet and .*part-0\.jsonl would both be the source "):
        check_specs([SourceSpec(path=str(shelves), source_per="file")])
    check_specs([SourceSpec(path=str(shelves), source_per="folder")])
    for path in ("embedded", str(shelves / "shelves.txt")):
        with pytest.raises(
            RopewalkError, match=r"^source_per file needs a folder, but .* is none; omit source_per"
        ):
            check_specs([SourceSpec(path=path, source_per="file")])
    assert "omit the name 'x', or omit source_per" in refusal(
        SourceSpec, path="a", name="x", source_per="file"
    )


def test_a_source_without_source_per_is_known_as_before(shelves: Path) -> None:
    spec = SourceSpec(path=str(shelves))
    assert "source_per" not in spec.model_dump()
    assert all("source_per" not in split.identity["spec"] for split in plan_input_splits([spec]))
    own = [spec.model_copy(update={"source_per": each}) for each in ("file", "folder")]
    assert [each.model_dump()["source_per"] for each in own] == ["file", "folder"]
    assert len({json.dumps(plan_input_splits([each])[0].identity["spec"]) for each in (spec, *own)}) == 3
