"""Arrow files as datasets and pyarrow write them give their records, and damaged ones one sentence."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pytest
from datasets import Dataset, DatasetDict

from ropewalk.data.read.documents import TokenisedDocument
from ropewalk.data.read.input_splits import plan_input_splits, read_input_split
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError
from tests.data.read.read_cases import read, texts

IDS = [list(range(n, n + 3 + n % 5)) for n in range(40)]


def ids(path: Path, **fields: Any) -> list[list[int]]:
    splits = plan_input_splits([SourceSpec(path=str(path), **fields)])
    found = [d for split in splits for record in read_input_split(split) for d in record.documents]
    tokenised = [document for document in found if isinstance(document, TokenisedDocument)]
    assert len(tokenised) == len(found)
    return [document.input_ids.tolist() for document in tokenised]


def saved(folder: Path, documents: list[list[int]] = IDS, shards: int = 2) -> Path:
    """A folder of datasets."""
    columns = {"input_ids": documents, "attention_mask": [[1] * len(each) for each in documents]}
    Dataset.from_dict(columns).save_to_disk(str(folder), num_shards=shards)
    return folder


def table(path: Path, new: Any, columns: dict[str, list[Any]], rows: int = 7) -> Path:
    whole = pyarrow.table(columns)
    with new(str(path), whole.schema) as writer:
        writer.write_table(whole, rows)
    return path


def test_a_folder_of_datasets_is_read_in_place(tmp_path: Path) -> None:
    folder = saved(tmp_path / "corpus")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert ids(folder) == IDS
    assert ids(folder / "data-00001-of-00002.arrow") == IDS[20:]
    assert ids(folder, max_documents=25) == IDS[:25]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_files_that_the_state_does_not_name_are_no_data(tmp_path: Path) -> None:
    folder = saved(tmp_path / "corpus", [[9, 9, 9]], shards=1)
    # Saving again in two files leaves the first one, and `map` keeps its results beside them.
    saved(folder)
    (folder / "cache-1.arrow").write_bytes((folder / "data-00000-of-00001.arrow").read_bytes())
    assert ids(folder) == IDS


def test_a_missing_file_of_a_dataset_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "corpus")
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        RopewalkError, match=r"state\.json names data-00001-of-00002\.arrow, which is missing"
    ):
        ids(folder)


def test_one_of_several_splits_must_be_named(tmp_path: Path) -> None:
    whole = Dataset.from_dict({"input_ids": IDS})
    DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(
        RopewalkError,
        match=r"holds several splits of a dataset \(test, train\); give one split, such as .*both/test",
    ):
        ids(tmp_path / "both")
    assert ids(tmp_path / "both" / "train") == IDS
    DatasetDict({"train": whole}).save_to_disk(str(tmp_path / "one"))
    assert ids(tmp_path / "one") == IDS


def test_files_of_others_with_these_names_stay_texts(tmp_path: Path) -> None:
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text(json.dumps(["a"]))
    assert len(read(tmp_path)) == 2


@pytest.mark.parametrize("new", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def test_both_formats_of_arrow_are_read_from_any_row(tmp_path: Path, new: Any) -> None:
    path = table(tmp_path / "a.arrow", new, {"input_ids": IDS, "other": ["x"] * len(IDS)})
    assert ids(path) == IDS
    words = [f"text {n}" for n in range(20)]
    assert texts(read(table(tmp_path / "b.arrow", new, {"text": words}))) == words


@pytest.mark.parametrize("new", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def test_a_file_that_was_cut_off_anywhere_is_refused(tmp_path: Path, new: Any) -> None:
    path = table(tmp_path / "a.arrow", new, {"input_ids": IDS[:9]}, 3)
    whole = path.read_bytes()
    # Every eighth byte, because messages of Arrow begin at multiples of 8: among these are the ends of all batches.
    for size in (*range(8, len(whole), 8), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(
            RopewalkError, match=r"a\.arrow (cannot be read as Arrow|is cut off: its \d+ bytes)"
        ) as refused:
            ids(path)
        assert "\n" not in str(refused.value)


def test_other_contents_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.arrow").write_bytes(b"")
    (tmp_path / "noise.arrow").write_bytes(b"noise" * 20 + b"\xff\xff\xff\xff\0\0\0\0")
    columns = table(tmp_path / "columns.arrow", pyarrow.ipc.new_stream, {"a": [1], "b": [2]})
    for path in (tmp_path / "empty.arrow", tmp_path / "noise.arrow"):
        with pytest.raises(RopewalkError, match=path.name):
            ids(path)
    with pytest.raises(RopewalkError, match=r"no text field 'text'; the fields are 'a', 'b'"):
        ids(columns)


SPANS = [{"start": 0, "end": 1, "source": "a"}, {"start": 1, "end": 3, "source": "b"}]
COLUMNS = {
    "strings": {"text": pyarrow.array([f"text {n} ü" for n in range(20)])},
    "large strings": {"text": pyarrow.array(["text", "texts"] * 10, pyarrow.large_string())},
    "views": {"text": pyarrow.array(["a text of more than twelve bytes"] * 20, pyarrow.string_view())},
    "dictionary": {"text": pyarrow.array(["one text", "another"] * 10).dictionary_encode()},
    "ids": {"input_ids": pyarrow.array([[1, 2, 3]] * 20), "source": pyarrow.array([SPANS] * 20)},
    "large lists": {"input_ids": pyarrow.array([[1, 2, 3]] * 20, pyarrow.large_list(pyarrow.int64()))},
    "chats": {
        "messages": pyarrow.array(
            [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]] * 20
        )
    },
    "extension": {
        "text": pyarrow.array(["text"] * 20),
        "source": pyarrow.ExtensionArray.from_storage(
            pyarrow.fixed_shape_tensor(pyarrow.int32(), [1]),
            pyarrow.array([[1]] * 20, pyarrow.list_(pyarrow.int32(), 1)),
        ),
    },
}
READ_ALL = """
import sys
from tests.data.read.read_cases import texts_and_tokens
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError
for path in sys.stdin.read().split():
    print(path, end=" ", flush=True)
    try:
        print(sum(1 for _ in texts_and_tokens(SourceSpec(path=path, messages_field="messages"))))
    except RopewalkError as error:
        print("refused:", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("new", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
def test_wrong_numbers_anywhere_in_a_file_are_read_or_refused_but_end_no_process(tmp_path, new):
    """In a process of its own, which a wrong offset would end with a signal."""
    paths = []
    for name, columns in COLUMNS.items():
        whole = table(tmp_path / "whole.arrow", new, columns, 20).read_bytes()
        # Every buffer begins at a multiple of 8: these are the first two offsets of each, among much else.
        for at in range(0, len(whole) - 8, 8 if name in ("strings", "ids") else 24):
            for wrong in (1 << 30, -1 & 0xFFFFFFFF):
                path = tmp_path / f"{name.replace(' ', '-')}-{at}-{wrong}.arrow"
                path.write_bytes(whole[: at + 4] + wrong.to_bytes(4, "little") + whole[at + 8 :])
                paths.append(str(path))
    found = subprocess.run(
        [sys.executable, "-c", READ_ALL], input="\n".join(paths), capture_output=True, text=True, check=False
    )
    lines = found.stdout.splitlines()
    assert found.returncode == 0, lines[-1:]
    assert [line.split()[0] for line in lines] == paths
    assert sum("refused" in line for line in lines) > len(paths) // 10
