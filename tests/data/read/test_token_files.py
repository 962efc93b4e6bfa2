"""Files of token ids: documents as their writers stored them, and sentences for what does not fit."""

import gzip
import json
import struct
from collections.abc import Callable
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data import PackingSettings
from ropewalk.data.read import input_splits
from ropewalk.data.read.documents import TokenisedDocument
from ropewalk.data.read.input_splits import plan_input_splits, read_input_split
from ropewalk.data.read.readers import read_documents
from ropewalk.data.read.token_files import document_ranges, open_token_file
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError
from tests.data.cases import Job
from tests.data.read.read_cases import texts_and_tokens
from tests.data.tiny_tokenizer import TEXTS, make_tokenizer

RECORDED = Path(__file__).parent / "token_files"
TOKENIZER = make_tokenizer()
BOS, EOS = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
DOCUMENTS = [TOKENIZER(text)["input_ids"] for text in TEXTS]


def read(path: Path, **fields: Any) -> list[list[int]]:
    """Ids of every document of a source, as its splits yield them."""
    splits = plan_input_splits([SourceSpec(path=str(path), **fields)])
    documents = [d for split in splits for record in read_input_split(split) for d in record.documents]
    assert all(isinstance(document, TokenisedDocument) for document in documents)
    return [document.input_ids.tolist() for document in documents]


def rows(path: Path, folder: Path, settings: PackingSettings, **fields: Any) -> list[list[Any]]:
    """Every column of every packed row."""
    spec = SourceSpec(path=str(path), name="corpus", **fields)
    packed = Job.of([spec], TOKENIZER, settings).pack(folder)
    assert len(packed) > 5
    found = [packed.packed(index) for index in range(len(packed))]
    return [[np.asarray(getattr(row, field.name)).tolist() for field in fields_of(row)] for row in found]


def megatron(path: Path, documents: list[list[int]], dtype: str = "uint16", **changes: Any) -> Path:
    """Write a corpus as its specification says; each document is one sequence."""
    codes = {
        "uint8": 1,
        "int8": 2,
        "int16": 3,
        "int32": 4,
        "int64": 5,
        "float64": 6,
        "float32": 7,
        "uint16": 8,
    }
    size = np.dtype(dtype).itemsize
    lengths = [len(ids) for ids in documents]
    fields = {
        "magic": b"MMIDIDX\0\0",
        "version": 1,
        "code": codes[dtype],
        "lengths": lengths,
        "pointers": [size * sum(lengths[:n]) for n in range(len(lengths))],
        "bounds": list(range(len(lengths) + 1)),
    } | changes
    index = struct.pack("<9sQB", fields["magic"], fields["version"], fields["code"])
    index += struct.pack("<QQ", len(fields["lengths"]), len(fields["bounds"]))
    index += struct.pack(f"<{len(fields['lengths'])}i", *fields["lengths"])
    index += struct.pack(f"<{len(fields['pointers'])}q", *fields["pointers"])
    index += struct.pack(f"<{len(fields['bounds'])}q", *fields["bounds"])
    path.with_suffix(".idx").write_bytes(index)
    path.write_bytes(np.array([i for ids in documents for i in ids], dtype).tobytes())
    return path


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("name", ["datatrove{}.ds", "dolma{}.npy", "megatron{}.bin"])
def test_documents_are_those_that_the_tools_wrote(name: str, width: int) -> None:
    begin = [BOS] if width == 4 else []
    assert read(RECORDED / name.format(width)) == [[*begin, *ids, EOS] for ids in DOCUMENTS]
    assert read(RECORDED / name.format(width), separator_id=EOS) == [[*begin, *ids] for ids in DOCUMENTS]


def test_a_folder_of_token_files_has_the_documents_of_all_files() -> None:
    assert len(read(RECORDED)) == 6 * len(TEXTS)
    assert len(read(RECORDED, max_documents=5)) == 5


@pytest.mark.parametrize("name", ["datatrove{}.ds", "dolma{}.npy", "megatron{}.bin"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    "settings",
    [
        PackingSettings(context=64, pattern="anchor", remainder="pad"),
        PackingSettings(context=64, pattern="intra_document", bos="document", remainder="pad"),
        PackingSettings(context=100, pattern="full", packing="best_fit", remainder="pad"),
    ],
    ids=["anchor", "intra_document", "full"],
)
def test_rows_of_a_token_file_equal_rows_of_its_texts(
    tmp_path: Path, name: str, width: int, settings: PackingSettings
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    expected = rows(texts, tmp_path / "of-texts", settings)
    path = RECORDED / name.format(width)
    assert rows(path, tmp_path / "of-tokens", settings) == expected
    assert rows(path, tmp_path / "separated", settings, separator_id=EOS) == expected


def test_without_eos_a_named_separator_leaves_the_texts_alone(tmp_path: Path) -> None:
    settings = PackingSettings(context=64, pattern="anchor", eos=False, remainder="pad")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    expected = rows(texts, tmp_path / "of-texts", settings)
    path = RECORDED / "megatron2.bin"
    assert rows(path, tmp_path / "of-tokens", settings, separator_id=EOS) == expected
    # Without the name, an EOS inside the bounds of the index is a token of the document, like any other.
    assert rows(path, tmp_path / "kept", settings) != expected


Documents = st.lists(st.lists(st.integers(2, 255), max_size=9), min_size=1, max_size=8)


@given(documents=Documents, before=st.booleans())
def test_raw_files_are_cut_at_the_named_separator(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], before: bool
) -> None:
    path = tmp_path_factory.mktemp("raw") / "tokens.bin"
    parts = [[1, *ids] if before else [*ids, 1] for ids in documents]
    path.write_bytes(np.array([i for ids in parts for i in ids], "<u2").tobytes())
    found = read(path, separator_id=1, token_dtype="uint16")
    assert [ids for ids in found if ids] == [ids for ids in documents if ids]


@given(documents=Documents, most=st.integers(1, 40))
def test_ranges_of_documents_cover_the_file(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], most: int
) -> None:
    path = megatron(tmp_path_factory.mktemp("ranges") / "tokens.bin", documents)
    spec = SourceSpec(path=str(path))
    found = document_ranges(path, spec, most)
    firsts = [first for first, _ in found]
    assert firsts[0] == 0
    assert firsts == sorted(set(firsts))
    ends = [*firsts[1:], len(documents)]
    assert [size for _, size in found] == [
        2 * sum(map(len, documents[a:b])) for a, b in zip(firsts, ends, strict=True)
    ]


def test_splits_of_a_large_file_continue_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [[n + 1] * (n % 5) for n in range(40)]
    path = megatron(tmp_path / "tokens.bin", documents)
    monkeypatch.setattr(input_splits, "SPLIT_BYTES", 20)
    splits = plan_input_splits([SourceSpec(path=str(path))])
    assert len(splits) > 5
    assert read(path) == documents


def test_the_index_belongs_to_the_identity_of_a_source(tmp_path: Path) -> None:
    path = megatron(tmp_path / "tokens.bin", [[1, 2], [3]])
    before = plan_input_splits([SourceSpec(path=str(path))])[0].identity
    megatron(path, [[1], [2, 3]])
    assert plan_input_splits([SourceSpec(path=str(path))])[0].identity != before


def test_an_array_with_the_header_of_numpy_states_its_type(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.array([5, 1, 6, 7, 1], np.int64))
    assert read(tmp_path / "array.npy", separator_id=1) == [[5], [6, 7]]


def test_other_files_of_a_folder_stay_what_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(4))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\0\1\2")
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress(b"a,b"))
    (tmp_path / "notes.idx").write_text("words of an index")
    (tmp_path / "text.txt").write_text("words")
    documents = list(texts_and_tokens(SourceSpec(path=str(tmp_path))))
    assert len(documents) == 2


def test_empty_files_have_no_documents(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match="no documents in"):
        list(read_documents([SourceSpec(path=str(megatron(tmp_path / "empty.bin", [])))]))


def write(folder: Path, **files: bytes) -> Path:
    """Write files; a double underscore in a name is a dot. The first one is returned."""
    paths = [folder / name.replace("__", ".") for name in files]
    for path, content in zip(paths, files.values(), strict=True):
        path.write_bytes(content)
    return paths[0]


IDS = np.array([5, 1, 6, 1], "<u2").tobytes()
LONG = np.arange(7, 107)
CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any], str]] = {
    "idx cut off": (
        lambda t: _cut(megatron(t / "a.bin", [[5], [6]]), ".idx", 3),
        {},
        r"a\.idx has 79 bytes, but its header counts 2 sequences and 3 document bounds, which take 82.*cut off",
    ),
    "idx without a header": (
        lambda t: _cut(megatron(t / "a.bin", [[5]]), ".idx", 30),
        {},
        r"a\.idx has 32 bytes, but a Megatron index has at least 34",
    ),
    "bin cut off": (
        lambda t: _cut(megatron(t / "a.bin", [[5], [6, 7]]), ".bin", 2),
        {},
        r"a\.idx: document 1 ends at token 3, but .*a\.bin has 2 tokens",
    ),
    "bin cut inside a token": (
        lambda t: _cut(megatron(t / "a.bin", [[5], [6, 7]]), ".bin", 1),
        {},
        r"a\.bin has 5 bytes of token ids, which is not a multiple of 2 \(uint16\)",
    ),
    "bin too long": (
        lambda t: _cut(megatron(t / "a.bin", [[5], [6, 7]]), ".bin", -2),
        {},
        r"the last document ends at token 3, but .*a\.bin has 4 tokens",
    ),
    "magic": (lambda t: megatron(t / "a.bin", [[5]], magic=b"MMIDIDX\0\1"), {}, "not a Megatron index"),
    "version": (lambda t: megatron(t / "a.bin", [[5]], version=2), {}, "version 2 of the Megatron index"),
    "float": (lambda t: megatron(t / "a.bin", [[5]], "float32"), {}, "states the type code 7 for token ids"),
    "unknown type": (lambda t: megatron(t / "a.bin", [[5]], code=99), {}, "states the type code 99"),
    "pointer": (
        lambda t: megatron(t / "a.bin", [[5], [6]], pointers=[0, 400]),
        {},
        "sequence 1 begins at byte 400 instead of byte 2; sequences must follow one another without gaps",
    ),
    "length": (lambda t: megatron(t / "a.bin", [[5]], lengths=[-1]), {}, "sequence 0 has -1 tokens"),
    "bounds": (
        lambda t: megatron(t / "a.bin", [[5], [6]], bounds=[0, 9, 2]),
        {},
        "document bounds must ascend from 0 to 2, the number of sequences, got 0, 9, 2",
    ),
    "modes": (lambda t: _cut(megatron(t / "a.bin", [[5]]), ".idx", -1), {}, "multimodal"),
    "negative id": (
        lambda t: megatron(t / "a.bin", [[5], [-1]], "int32"),
        {},
        r"a\.bin: document 1: .*got -1",
    ),
    "huge id": (lambda t: megatron(t / "a.bin", [[2**40]], "int64"), {}, f"document 0: .*got {2**40}"),
    "no index": (lambda t: write(t, a__bin=IDS), {}, r"a\.bin has no index.*separator_id"),
    "no type": (lambda t: write(t, a__bin=IDS), {"separator_id": 1}, r"a\.bin does not state.*token_dtype"),
    "no offsets": (lambda t: write(t, a__npy=IDS), {}, r"a\.npy has no index"),
    "separator is absent": (
        lambda t: write(t, a__bin=IDS),
        {"separator_id": 9, "token_dtype": "uint16"},
        r"begins with id 5 and ends with id 1, but documents must begin or end with the separator \(id 9\)",
    ),
    "another type": (
        lambda t: megatron(t / "a.bin", [[5]]),
        {"token_dtype": "uint32"},
        r"a\.bin stores token ids as uint16, but token_dtype is uint32",
    ),
    "another width": (
        lambda t: write(t, a__npy=IDS, a__csv__gz=gzip.compress(b"0,4,x,y,1\n")),
        {"token_dtype": "uint32"},
        r"a\.npy stores token ids as uint16, but token_dtype is uint32",
    ),
    "separator inside": (
        lambda t: megatron(t / "a.bin", [[5, 1], [6, 1, 7, 1]]),
        {"separator_id": 1},
        r"document 1: the separator \(id 1\) occurs inside the document, at token 1, which contradicts the index",
    ),
    "separator missing": (
        lambda t: megatron(t / "a.bin", [[5, 1], [6, 7]]),
        {"separator_id": 1},
        r"document 1: the document begins with id 6 and ends with id 7, but must .* with the separator \(id 1\)",
    ),
    "ds index cut off": (
        lambda t: write(t, a__ds=IDS, **{"a__ds__index": struct.pack("<Q", 4)[:-1]}),
        {},
        r"a\.ds\.index has 7 bytes, but the size of a datatrove index is a multiple of 8",
    ),
    "ds index lacks documents": (
        lambda t: write(t, a__ds=IDS, a__ds__index=struct.pack("<Q", 2), a__ds__metadata=b"x|2\n4\n4 T"),
        {},
        r"the last document ends at token 2, but .*a\.ds has 4 tokens",
    ),
    "ds offset beyond": (
        lambda t: write(t, a__ds=IDS, a__ds__index=struct.pack("<2Q", 2, 9), a__ds__metadata=b"x|2\n4\n4 T"),
        {},
        r"document 1 ends at token 9, but .*a\.ds has 4 tokens",
    ),
    "ds offset falls": (
        lambda t: write(t, a__ds=IDS, a__ds__index=struct.pack("<2Q", 5, 4), a__ds__metadata=b"x|2\n4\n4 T"),
        {},
        "document 1 begins at token 5 and ends at token 4",
    ),
    "ds cut off": (
        lambda t: write(t, a__ds=IDS[:-1], a__ds__index=struct.pack("<Q", 4)),
        {},
        r"a\.ds\.index counts 4 tokens and .*a\.ds has 7 bytes, but a token must take 2 or 4 bytes",
    ),
    "ds metadata count": (
        lambda t: write(t, a__ds=IDS, a__ds__index=struct.pack("<Q", 4), a__ds__metadata=b"x|2\n5\n5 T"),
        {},
        r"a\.ds has 8 bytes, but a\.ds\.metadata counts 5 tokens of 2 bytes",
    ),
    "ds metadata": (
        lambda t: write(t, a__ds=IDS, a__ds__index=struct.pack("<Q", 4), a__ds__metadata=b"x|3\n4\n4 T"),
        {},
        r"a\.ds\.metadata must have the tokenizer and the bytes per token",
    ),
    "ds loss mask": (
        lambda t: write(t, a__ds=IDS, a__ds__index=struct.pack("<Q", 4), a__ds__loss=b"\1\0\1\1"),
        {},
        r"a\.ds\.loss is a loss mask",
    ),
    "orphan index": (
        lambda t: write(t, a__ds__index=IDS).parent,
        {},
        r"is the index of a\.ds, which is missing",
    ),
    "named index": (
        lambda t: megatron(t / "a.bin", [[5]]).with_suffix(".idx"),
        {},
        r"a\.idx is the index of a\.bin; give .*a\.bin instead",
    ),
    "offsets are no numbers": (
        lambda t: write(t, a__npy=IDS, a__csv__gz=gzip.compress(b"start,end\n")),
        {},
        r"a\.csv\.gz:1: the line must begin with two whole numbers",
    ),
    "offsets of thousands of digits": (
        lambda t: write(t, a__npy=IDS, a__csv__gz=gzip.compress(b"0," + b"9" * 5000 + b"\n")),
        {},
        r"a\.csv\.gz:1: the line must begin with two whole numbers.*got '0,9{78}'",
    ),
    "offsets in one line without end": (
        lambda t: write(t, a__npy=IDS, a__csv__gz=gzip.compress(b"0,4,x" * (1 << 20))),
        {},
        r"a\.csv\.gz is damaged: a line is longer than 65536 bytes",
    ),
    "offsets leave a gap": (
        lambda t: write(t, a__npy=IDS, a__csv__gz=gzip.compress(b"0,1,x\n2,4,y\n")),
        {},
        r"a\.csv\.gz:2: the document spans tokens 2 to 4, but the previous document ends at 1",
    ),
    "offsets cut off": (
        lambda t: write(t, a__npy=IDS, a__csv__gz=gzip.compress(b"0,4,x\n")[:-5]),
        {},
        r"a\.csv\.gz is damaged or cut off",
    ),
    "npy cut in half": (
        lambda t: write(
            t, a__npy=LONG.astype("<u4").tobytes()[: 4 * 50], a__csv__gz=gzip.compress(b"0,100,x\n")
        ),
        {},
        r"a\.npy: every second id among the first 100, read as uint16, is below 4, .*cut in half; restore the file",
    ),
    "npy cut in half to bytes": (
        lambda t: write(t, a__npy=LONG.astype("<u2").tobytes()[:100], a__csv__gz=gzip.compress(b"0,100,x\n")),
        {},
        r"a\.csv\.gz counts as many tokens as .*a\.npy has bytes; .*uint8; otherwise a\.npy is cut off",
    ),
    "raw file of wider ids": (
        lambda t: write(t, a__bin=LONG.astype("<u4").tobytes()),
        {"separator_id": 7, "token_dtype": "uint16"},
        r"a\.bin: every second id among the first 200, .* the ids are probably uint32; set token_dtype .* to uint32",
    ),
    "raw file of narrower ids": (
        lambda t: write(t, a__bin=LONG.astype("<u2").tobytes()),
        {"separator_id": 7, "token_dtype": "uint32"},
        r"a\.bin begins with id 524295 and ends with id \d+, but documents must .* with the separator \(id 7\)",
    ),
    "raw file cut in half": (
        lambda t: write(t, a__bin=LONG.astype("<u2").tobytes()[:101]),
        {"separator_id": 7, "token_dtype": "uint16"},
        r"a\.bin has 101 bytes of token ids, which is not a multiple of 2",
    ),
    "npy cut off": (
        lambda t: write(t, a__npy=IDS[:-2], a__csv__gz=gzip.compress(b"0,2,x\n2,4,y\n")),
        {},
        r"a\.csv\.gz counts 4 tokens and .*a\.npy has 6 bytes",
    ),
}


def _cut(path: Path, suffix: str, count: int) -> Path:
    """Remove bytes from the end of a file, or append zeros if the count is negative."""
    file = path.with_suffix(suffix)
    content = file.read_bytes()
    file.write_bytes(content[:-count] if count > 0 else content + b"\0" * -count)
    return path


@pytest.mark.parametrize("case", CASES)
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    make, fields, message = CASES[case]
    with pytest.raises(RopewalkError, match=message) as refused:
        read(make(tmp_path), **fields)
    assert "\n" not in str(refused.value)


def test_ids_beyond_the_vocabulary_name_the_file(tmp_path: Path) -> None:
    path = megatron(tmp_path / "a.bin", [[5], [6, 5000]])
    with pytest.raises(
        RopewalkError, match=r"a\.bin: document 1: .* contains token id 5000, but the tokenizer's"
    ):
        rows(path, tmp_path / "rows", PackingSettings(context=4, pattern="full"))
    assert not list((tmp_path / "rows").glob("*.arrow"))


def test_tokens_are_mapped_and_not_loaded(tmp_path: Path) -> None:
    path = megatron(tmp_path / "a.bin", [[5], [6, 7]])
    file = open_token_file(path, SourceSpec(path=str(path)))
    assert isinstance(file.ids, np.memmap)
    assert not file.ids.flags.writeable


def test_ids_of_one_byte_are_read_where_they_are_stated(tmp_path: Path) -> None:
    path = write(tmp_path, a__npy=bytes([5, 1, 6, 1]), a__csv__gz=gzip.compress(b"0,2,x\n2,4,y\n"))
    assert read(path, token_dtype="uint8") == [[5, 1], [6, 1]]


def test_small_ids_are_no_halves_of_wider_ones(tmp_path: Path) -> None:
    for ids in ([2, 3] * 40, [3, 9] * 40):
        path = write(tmp_path, a__npy=np.array(ids, "<u2").tobytes(), a__csv__gz=gzip.compress(b"0,80,x\n"))
        assert read(path) == [ids]


@pytest.mark.parametrize(
    "shape",
    [
        "(True,)", "(False,)", "(4, True)", f"({10**30},)", f"({2**63},)", f"({2**62},)", "(-1,)", "(1.5,)", "None",
        "(" + "9" * 5000 + ",)", "(" * 300, "(3,)", "(5,)", "(0,)", "(2, 2)", "()",
    ],
)  # fmt: skip
def test_a_numpy_array_of_another_shape_than_its_content_is_refused(tmp_path, shape):
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-len(header) - 11 & 63) + b"\n"
    head = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "a.npy").write_bytes(head + np.array([1, 5, 6, 1], "<u2").tobytes())
    with pytest.raises(
        RopewalkError, match=r"a\.npy (cannot be read|states \d token ids|holds an array)"
    ) as refused:
        read(tmp_path / "a.npy", separator_id=1)
    assert "\n" not in str(refused.value)
