"""Arrow files hold what was put in, as plain arrow reads it, and say their own digest; views copy nothing."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.data.tokens.arrow import (
    INT32_LIST,
    INT64_LIST,
    STRING,
    STRING_LIST,
    as_numpy,
    checked_index,
    int32_list,
    numbers,
    open_table,
    write_table,
)
from ropewalk.io.digests import FileDigest

COLUMNS = {"ids": INT32_LIST, "offsets": INT64_LIST, "name": STRING, "names": STRING_LIST}
TEXTS = st.text(st.characters(codec="utf-8"), max_size=5)
RECORDS = st.lists(
    st.fixed_dictionaries(
        {
            "ids": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
            "offsets": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
            "name": TEXTS,
            "names": st.lists(TEXTS, max_size=3),
        }
    ),
    max_size=6,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arrow") / "rows.arrow"


@given(st.lists(RECORDS, max_size=3))
def test_a_table_holds_every_record_of_every_batch_as_plain_arrow_reads_it(
    file: Path, batches: list[list[dict[str, object]]]
) -> None:
    written = write_table(
        file, COLUMNS, ({name: [each[name] for each in batch] for name in COLUMNS} for batch in batches)
    )
    content = file.read_bytes()
    assert written == FileDigest(len(content), hashlib.sha256(content).hexdigest())
    records = [each for batch in batches for each in batch]
    assert pyarrow.ipc.open_file(pyarrow.py_buffer(content)).read_all().to_pylist() == records
    table = open_table(file, len(records))
    assert {name: table.schema.field(name).type for name in COLUMNS} == COLUMNS
    for index, each in enumerate(records):
        ids = int32_list(table["ids"][index])
        assert ids.dtype == np.int32
        assert ids.tolist() == each["ids"]


def test_a_file_that_is_damaged_or_of_other_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    write_table(path, {"ids": INT32_LIST}, [{"ids": [[1, 2], [3]]}])
    with pytest.raises(RopewalkError, match=r"rows\.arrow has 2 records, but its manifest says 3"):
        open_table(path, 3)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        RopewalkError, match=r"cannot read .*rows\.arrow.*delete the folder .* and pack again"
    ):
        open_table(path, 2)
    with pytest.raises(RopewalkError, match="cannot read"):
        open_table(tmp_path / "missing.arrow", 2)


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.arrow"
    write_table(path, {"ids": INT32_LIST}, [{"ids": [[1, 2]]}])
    before = path.read_bytes()

    def batches():
        yield {"ids": [[3]]}
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_table(path, {"ids": INT32_LIST}, batches())
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["rows.arrow"]


@given(
    st.sampled_from([np.int8, np.int32, np.int64, np.uint64]),
    st.lists(st.integers(0, 127), max_size=9),
    st.integers(0, 9),
)
def test_numbers_go_to_arrow_and_back_from_any_place_on(dtype: type, values: list[int], start: int) -> None:
    array = numbers(np.array(values, dtype))
    assert array.to_pylist() == values
    back = as_numpy(array[start:], dtype)
    assert back.dtype == dtype
    assert back.tolist() == values[start:]


def test_numbers_that_lie_apart_are_taken_in_their_order() -> None:
    assert numbers(np.arange(10, dtype=np.int32)[::-3]).to_pylist() == [9, 6, 3, 0]


@given(st.integers(-9, 9), st.integers(0, 5))
def test_an_index_is_that_of_a_list(index: int, length: int) -> None:
    items = list(range(length))
    try:
        expected = items[index]
    except IndexError:
        with pytest.raises(IndexError, match=f"index {index} of {length} items"):
            checked_index(index, length)
    else:
        assert checked_index(index, length) == expected
