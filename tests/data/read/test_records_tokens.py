"""Records that are tokenised already give exactly their tokens, by the boundaries that they name."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.data.read.documents import Document, TokenisedDocument
from ropewalk.data.read.input_splits import plan_input_splits, read_input_split
from ropewalk.data.read.readers import read_documents
from ropewalk.data.read.records import GREATEST_ID, record_documents, token_documents, token_ids
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError

IDS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, GREATEST_ID)), max_size=30)


def plain(documents: tuple[Document | TokenisedDocument, ...]) -> list[tuple[str, list[int]]]:
    kept = []
    for document in documents:
        assert isinstance(document, TokenisedDocument)
        assert document.input_ids.dtype == np.int32
        kept.append((document.source, document.input_ids.tolist()))
    return kept


def read(path: object, **fields: Any) -> list[tuple[str, list[int]]]:
    planned = plan_input_splits([SourceSpec(path=str(path), **fields)])
    return [entry for p in planned for record in read_input_split(p) for entry in plain(record.documents)]


def documents(record: dict[str, Any], **fields: Any) -> list[tuple[str, list[int]]]:
    return plain(record_documents(record, SourceSpec(path="x.jsonl", **fields), "stem", "x.jsonl:7"))


@given(IDS, st.lists(st.integers(0, 30), max_size=5), st.booleans())
def test_spans_give_back_the_record(ids: list[int], cuts: list[int], array: bool) -> None:
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    spans = [
        {"start": start, "end": end, "source": f"s{n}"}
        for n, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    values = np.array(ids, np.int64) if array else ids
    found = plain(token_documents(values, spans, None, "stem", "x:1"))
    expected = []
    for span in spans:
        expected.append((span["source"], [ids[at] for at in range(span["start"], span["end"])]))
    assert found == expected
    assert [token for _, tokens in found for token in tokens] == ids
    for none in (None, []):
        assert plain(token_documents(values, none, None, "stem", "x:1")) == [("stem", ids)]


@given(
    IDS,
    st.lists(st.tuples(st.integers(-2, 32), st.integers(-2, 32)), min_size=1, max_size=4),
)
def test_spans_are_refused_or_cover_every_token_once(ids: list[int], drawn: list[tuple[int, int]]) -> None:
    owners: list[list[int]] = [[] for _ in ids]
    fits = all(0 <= start <= end <= len(ids) for start, end in drawn)
    for number, (start, end) in enumerate(drawn):
        for at in range(max(start, 0), min(end, len(ids))):
            owners[at].append(number)
    ordered = all(left[1] <= right[0] for left, right in itertools.pairwise(drawn))
    lossless = fits and ordered and all(len(owner) == 1 for owner in owners)
    spans = [{"start": start, "end": end} for start, end in drawn]
    if lossless:
        assert [tokens for _, tokens in plain(token_documents(ids, spans, None, "s", "x"))] == [
            ids[start:end] for start, end in drawn
        ]
    else:
        with pytest.raises(RopewalkError, match=r"^x: ") as caught:
            token_documents(ids, spans, None, "s", "x")
        assert "\n" not in str(caught.value)


def span(start: Any, end: Any) -> dict[str, Any]:
    return {"start": start, "end": end}


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (
            [span(0, 2), span(1, 5)],
            r"x:1: source\[1\] begins at token 1, but the previous document ends at token 2",
        ),
        ([span(2, 5), span(0, 2)], r"x:1: tokens 0 to 2 belong to no document"),
        (
            [span(0, 2), span(3, 5)],
            r"x:1: tokens 2 to 3 belong to no document; the field 'source' must cover all tokens, or be empty",
        ),
        ([span(0, 4)], r"x:1: tokens 4 to 5 belong to no document"),
        ([span(0, 6)], r"x:1: source\[0\] spans tokens 0 to 6, but the record has 5 tokens"),
        ([span(-1, 5)], r"source\[0\] spans tokens -1 to 5"),
        ([span(0, 5), span(5, 4)], r"source\[1\] spans tokens 5 to 4"),
        ([span(0, None)], r"source\[0\] must have a whole number as 'end', got null"),
        ([{"end": 5}], r"source\[0\] must have a whole number as 'start', got null"),
        ([span(False, 5)], r"'start', got False"),
        ([span(0, 5.0)], r"'end', got 5\.0"),
        ([span("0", 5)], r"'start', got a string"),
        ([3], r"source\[0\] must be an object with start and end, got a number"),
        ([{**span(0, 5), "source": ["a"]}], r"the field 'source' of source\[0\] must be a name, got a list"),
        ([{**span(0, 5), "source": "\ud800"}], r"of source\[0\] contains a lone surrogate"),
    ],
)
def test_wrong_boundaries_are_refused(spans: list[Any], message: str) -> None:
    with pytest.raises(RopewalkError, match=message):
        token_documents([1, 2, 3, 4, 5], spans, None, "stem", "x:1")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-1, "-1"),
        (2**31, "2147483648"),
        (2**63, "9223372036854775808"),
        (-(2**63) - 1, "-9223372036854775809"),
        (10**100, "1000000000000000000000000000000000000000..."),
        (True, "True"),
        (1.0, r"1\.0"),
        (float("nan"), "nan"),
        (None, "null"),
        ("7", "a string"),
        ([7], "a list"),
    ],
)
def test_what_is_no_id_is_refused_with_its_place(value: Any, shown: str) -> None:
    for before in ([], [0, GREATEST_ID, 5]):
        with pytest.raises(
            RopewalkError,
            match=rf"x:1: input_ids\[{len(before)}\] must be an integer from 0 to 2147483647, got {shown}",
        ):
            token_ids([*before, value, -3], "x:1")
    assert token_ids([0, GREATEST_ID], "x:1").tolist() == [0, GREATEST_ID]


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 5), max_size=8),
    st.sampled_from(["int64", "int32", "uint64", "int8", "uint8"]),
)
def test_an_array_is_taken_like_a_list(values: list[int], dtype: str) -> None:
    info = np.iinfo(dtype)
    values = [value for value in values if info.min <= value <= info.max]
    array = np.array(values, dtype)
    if all(0 <= value <= GREATEST_ID for value in values):
        assert token_ids(array, "x").tolist() == token_ids(values, "x").tolist() == values
        return
    messages = []
    for given_values in (array, values):
        with pytest.raises(RopewalkError, match=r"x: input_ids\[") as caught:
            token_ids(given_values, "x")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    "value",
    ["1 2", None, 7, {"a": 1}, np.zeros(2, np.float32), np.zeros((2, 2), np.int64), np.zeros(2, bool)],
)
def test_what_is_no_list_of_ids_is_refused(value: Any) -> None:
    with pytest.raises(RopewalkError, match=r"x:1: the field 'input_ids' must be a list of token ids, got "):
        token_ids(value, "x:1")


def test_text_wins_and_its_absence_makes_a_record_tokenised() -> None:
    both = {"text": "words", "input_ids": [1, 2], "source": "a"}
    assert record_documents(both, SourceSpec(path="x"), "stem", "x:1") == (Document("words", "a", "x:1"),)
    assert documents(both, text_field="body") == [("a", [1, 2])]
    with pytest.raises(RopewalkError, match="'text' must be a string, got null"):
        documents({"text": None, "input_ids": [1]})
    assert documents({"input_ids": []}) == [("stem", [])]
    assert documents({"input_ids": [4], "labels": 5, "attention_mask": [1]}) == [("stem", [4])]


def test_who_names_the_source_of_a_tokenised_record() -> None:
    spans = [{**span(0, 1), "source": "a"}, span(1, 3), {**span(3, 3), "source": 7}]
    record = {"input_ids": [5, 6, 7], "source": spans, "meta": {"set": "m"}}
    assert documents(record) == [("a", [5]), ("stem", [6, 7]), ("7", [])]
    assert documents(record, name="mine") == [("mine", [5]), ("mine", [6, 7]), ("mine", [])]
    # Boundaries hold even where the names are not wanted, or come from another field.
    assert documents(record, source_field=None) == [("stem", [5]), ("stem", [6, 7]), ("stem", [])]
    assert documents(record, source_field="meta.set") == [("m", [5]), ("m", [6, 7]), ("m", [])]
    moved = {"input_ids": [5, 6], "meta": {"spans": [{**span(0, 2), "source": "b"}]}}
    assert documents(moved, source_field="meta.spans") == [("b", [5, 6])]
    assert documents({"input_ids": [5], "source": "named"}) == [("named", [5])]
    assert documents({"input_ids": [5], "source": "named"}, source_field=None) == [("stem", [5])]
    with pytest.raises(
        RopewalkError, match=r"x\.jsonl:7: the source field 'source' must be a name, got an object"
    ):
        documents({"input_ids": [5], "source": {}})


ROWS = [
    {
        "input_ids": [1, 306, 4658, 1, 278],
        "labels": 6593,
        "source": [
            {"end": 3, "source": "RedPajamaC4", "start": 0},
            {"end": 5, "source": "RedPajamaBook", "start": 3},
        ],
    },
    {"input_ids": [6593, 310], "labels": 9, "source": [{"end": 2, "source": "RedPajamaBook", "start": 0}]},
]
STRETCHES = [
    ("RedPajamaC4", [1, 306, 4658]),
    ("RedPajamaBook", [1, 278]),
    ("RedPajamaBook", [6593, 310]),
]


def test_every_format_gives_the_same_tokens(tmp_path: Path) -> None:
    jsonl, parquet = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), parquet, row_group_size=1)
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "data.parquet").write_bytes(parquet.read_bytes())
    for path in (jsonl, parquet, f"hf:{folder}"):
        assert read(path) == STRETCHES
        assert read(path, name="x") == [("x", tokens) for _, tokens in STRETCHES]
        assert {name for name, _ in read(path, source_field=None)} == {
            "dataset" if "hf:" in str(path) else "a"
        }
    with pytest.raises(RopewalkError, match="contains token ids, but this command needs text"):
        list(read_documents([SourceSpec(path=str(jsonl))]))


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.list_(pyarrow.int64()),
        pyarrow.large_list(pyarrow.int32()),
        pyarrow.list_(pyarrow.uint16()),
        pyarrow.list_(pyarrow.int64(), 3),
    ],
)
def test_every_kind_of_integer_column_is_read(tmp_path: Path, kind: pyarrow.DataType) -> None:
    path = tmp_path / "t.parquet"
    rows = [[n, n + 1, n + 2] for n in range(600)]
    pyarrow.parquet.write_table(
        pyarrow.table({"input_ids": pyarrow.array(rows, kind)}), path, row_group_size=500
    )
    assert read(path) == [("t", row) for row in rows]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (pyarrow.array([[1], [2, None]]), r"row 1: input_ids\[1\] must be an integer .*, got null"),
        (pyarrow.array([[1], None]), r"row 1: the field 'input_ids' must be a list of token ids, got null"),
        (pyarrow.array([[1], [-7]]), r"row 1: input_ids\[0\] must be .*, got -7"),
        (pyarrow.array([[1.0]]), r"row 0: input_ids\[0\] must be an integer .*, got 1\.0"),
        (pyarrow.array([1]), r"row 0: the field 'input_ids' must be a list of token ids, got a number"),
        (pyarrow.array([[[1]]]), r"row 0: input_ids\[0\] must be .*, got a list"),
    ],
)
def test_a_column_that_is_no_ids_is_refused(tmp_path: Path, values: pyarrow.Array, message: str) -> None:
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": values}), path)
    with pytest.raises(RopewalkError, match=message):
        read(path)


def test_a_json_file_of_a_folder_may_hold_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"input_ids": [1, 2]}\n{"input_ids": [3]}\n')
    assert read(tmp_path, name="x") == [("x", [1, 2]), ("x", [3])]
