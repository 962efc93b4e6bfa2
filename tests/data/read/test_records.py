"""Records of tables: faults name the column and the row, and a table that ends early is refused."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from ropewalk.errors import RopewalkError
from tests.data.read.read_cases import read, write_parquet


def test_parquet_faults_name_columns_and_rows(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"body": ["x", "y", None]})
    with pytest.raises(RopewalkError, match="no text field 'text'; the fields are 'body'"):
        read(path)
    with pytest.raises(RopewalkError, match=r"a\.parquet:row 2: the field 'body' must be a string, got null"):
        read(path, text_field="body")
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"\xff" * 20 + content[28:])
    with pytest.raises(RopewalkError, match="cannot be read as Parquet near row 0"):
        read(path, text_field="body")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (52, r"a\.parquet is damaged: its footer states 53 rows, but its row groups have 52"),
        (54, r"a\.parquet is damaged: its footer states 53 rows, but its row groups have 54"),
    ],
)
def test_a_footer_that_counts_other_rows_is_refused(tmp_path: Path, rows: int, message: str) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"] * 53}), path)
    content = path.read_bytes()
    # Thrift writes a count as twice itself, here in one byte; one of those with 53 is the row group's.
    for place in [place for place in range(len(content)) if content[place] == 2 * 53]:
        path.write_bytes(content[:place] + bytes([2 * rows]) + content[place + 1 :])
        if pyarrow.parquet.read_metadata(path).row_group(0).num_rows == rows:
            break
    with pytest.raises(RopewalkError, match=message):
        read(path)


def test_row_groups_that_end_early_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"] * 53}), path)
    content = path.read_bytes()
    counts = [place for place in range(len(content)) if content[place] == 2 * 53]
    for first, second in ((a, b) for a in counts for b in counts if a < b):
        changed = bytearray(content)
        changed[first] = changed[second] = 2 * 54
        path.write_bytes(changed)
        metadata = pyarrow.parquet.read_metadata(path)
        if metadata.num_rows == metadata.row_group(0).num_rows == 54:
            break
    with pytest.raises(RopewalkError, match=r"row group 0 ends at row 53, but the footer says 54|near row 0"):
        read(path)
