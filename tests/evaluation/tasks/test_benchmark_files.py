import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.benchmark_files import BenchmarkFiles, covers, read_rows

ROWS = [{"q": 1, "s": "é"}, {"q": 2, "s": None}]


def save(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def found(
    path, names=("task",), config=None, splits=("train", "validation", "test"), evaluated="test", shared=False
):
    rows = BenchmarkFiles(path).rows(names, config, splits, evaluated, shared)
    return rows and {split: [row["q"] for row in each] for split, each in rows.items()}


def test_every_format_holds_the_same_rows(tmp_path):
    lines = save(tmp_path / "a.jsonl")
    (tmp_path / "b.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.parquet"):
        assert list(read_rows(tmp_path / name)) == ROWS


def test_one_file_holds_the_questions(tmp_path):
    assert found(save(tmp_path / "x.jsonl")) == {"test": [1, 2]}
    assert found(tmp_path / "x.jsonl", evaluated="validation") == {"validation": [1, 2]}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("test.jsonl", "test"),
        ("hellaswag_val.jsonl", "validation"),
        ("ARC-Challenge-Test.jsonl", "test"),
        ("dev.json", "validation"),
        ("validation-00000-of-00001.jsonl", "validation"),
        ("v1.1-train.jsonl.gz", "train"),
    ],
)
def test_a_split_is_known_by_its_files_name(tmp_path, name, split):
    path = save(tmp_path / name)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert found(tmp_path, evaluated=split) == {split: [1, 2]}


def test_dev_is_its_own_split_where_a_task_has_one(tmp_path):
    save(tmp_path / "dev.jsonl", [{"q": 7}])
    save(tmp_path / "test.jsonl")
    assert found(tmp_path, splits=("test", "dev")) == {"test": [1, 2], "dev": [7]}


def test_parts_are_joined_in_order_and_other_doubles_refused(tmp_path):
    for part in (1, 0):
        save(tmp_path / f"test-0000{part}-of-00002.jsonl", [{"q": part}])
    assert found(tmp_path) == {"test": [0, 1]}
    save(tmp_path / "my_test.jsonl")
    with pytest.raises(RopewalkError, match="more than one file of the split 'test'"):
        found(tmp_path)


def test_questions_that_are_missing_are_refused(tmp_path):
    save(tmp_path / "train.jsonl")
    with pytest.raises(RopewalkError, match="has no file of the split 'test', only of 'train'"):
        found(tmp_path)


def test_subjects_are_told_apart_by_their_column_or_by_place(tmp_path):
    rows = [{"q": n, "subject": "ab"[n % 2]} for n in range(5)]
    file = save(tmp_path / "all.jsonl", rows)
    assert found(file, config="b", shared=True) == {"test": [1, 3]}
    assert found(file, config="c", shared=True) is None
    with pytest.raises(RopewalkError, match="is given for several tasks but has no column 'subject'"):
        found(save(tmp_path / "plain.jsonl"), config="a", shared=True)
    save(tmp_path / "places" / "a" / "test.jsonl", [{"q": 8}])
    save(tmp_path / "places" / "b.jsonl", [{"q": 9}])
    assert found(tmp_path / "places", ("a",), "a", shared=True) == {"test": [8]}
    assert found(tmp_path / "places", ("b",), "b", shared=True) == {"test": [9]}
    assert found(tmp_path / "places", ("c",), "c", shared=True) is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"q": 1}\n{"q"\n', "a.jsonl:2 is not valid JSON"),
        ("a.jsonl", b"\n", "has no rows"),
        ("a.jsonl", b"[1, 2]", "must be a JSON object"),
        ("a.jsonl", b'"text"\n', "must be a JSON object"),
        ("a.jsonl", b'{"q": "\xff"}', "a.jsonl"),
        ("a.parquet", b"nothing", "cannot be read as Parquet"),
        ("a.csv", b"q\n1,2\n", "row 1 of .* has more or fewer values than the first line names"),
        ("a.csv", b'q\n"1\n', "cannot be read as CSV"),
        ("a.tsv", b"q\n1\n", "must end in one of .jsonl, .json, .parquet, .csv"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RopewalkError, match=message):
        read_rows(tmp_path / name)


def test_a_key_covers_names_that_begin_with_its_words():
    assert covers("arc", "arc")
    assert covers("arc", "arc_challenge")
    assert not covers("arc", "arcane")
    assert not covers("arc_challenge", "arc")


def test_each_file_is_read_once(tmp_path, monkeypatch):
    file = save(tmp_path / "all.jsonl", [{"q": 1, "subject": "a"}, {"q": 2, "subject": "b"}])
    read = []
    monkeypatch.setattr(
        "ropewalk.evaluation.tasks.benchmark_files.read_rows",
        lambda path: read.append(path) or read_rows(path),
    )
    files = BenchmarkFiles(file)
    for config in "ab":
        assert files.rows(("x",), config, ("test",), "test", True)
    assert read == [file]
