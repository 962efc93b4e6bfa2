"""Read the user's local copies of benchmark data: find the file of each task and split, and return its rows."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.data.read.files import read_text, split_suffix
from ropewalk.errors import RopewalkError
from ropewalk.io.files import json_fault

if TYPE_CHECKING:
    from ropewalk.evaluation.tasks.lm_eval.catalogue import StockTask

Row = Mapping[str, Any]

SUBJECT = "subject"
"""Column that distinguishes MMLU's subjects in a file with all of them."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "train": ("training",),
    "validation": ("valid", "val", "dev"),
    "dev": ("validation", "valid", "val"),
    "test": ("eval",),
}
"""Other names of a split in file names."""

LONGEST_FILE = 1 << 32
"""Most bytes of a file of JSON or CSV, which is read as a whole; those of published benchmarks have up to 1.5 GB."""
FORMATS = (".jsonl", ".json", ".parquet", ".csv")


class BenchmarkFiles:
    """A file or folder of benchmark data.

    A file contains the questions of one task, or of several tasks with a column ``subject``. A folder contains one
    file per split (``test.jsonl``, ``hellaswag_val.jsonl``, ``test-00000-of-00001.parquet``), or such a file or folder
    per task, named after the task or the configuration of its dataset.

    Args:
        path: path of the file or folder.

    Raises:
        RopewalkError: if the path does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()
        if not self.path.exists():
            raise RopewalkError(f"the file or folder {str(path)!r} of benchmark data does not exist")
        self._read: dict[Path, tuple[Row, ...]] = {}

    def rows(
        self, names: Sequence[str], config: str | None, splits: Sequence[str], evaluated: str, shared: bool
    ) -> dict[str, list[Row]] | None:
        """Read the rows of one task by split.

        Args:
            names: possible names of the task's file or folder.
            config: configuration of the task's dataset, such as MMLU's subject.
            splits: the splits that the task uses.
            evaluated: the split with the questions.
            shared: whether the path should contain several tasks.

        Returns:
            The rows by split, including the evaluated one; None if there are no data for the task.

        Raises:
            RopewalkError: if a file cannot be read, the questions are missing, or the tasks in a file cannot be
                distinguished.
        """
        own = self._own_place(names, splits)
        place = own or self.path
        if place.is_file():
            found = {evaluated: [place]}
        else:
            found = _split_files(place, splits)
            if not found:
                return None
        if evaluated not in found:
            raise RopewalkError(
                f"{place} has no file of the split {evaluated!r}, only of {', '.join(map(repr, sorted(found)))}; "
                "add the file"
            )
        by_split = {
            split: [row for file in files for row in self._rows_of(file)] for split, files in found.items()
        }
        if SUBJECT in by_split[evaluated][0] and config is not None:
            by_split = {
                s: [row for row in rows if row.get(SUBJECT) == config] for s, rows in by_split.items()
            }
        elif shared and own is None:
            raise RopewalkError(
                f"{place} is given for several tasks but has no column {SUBJECT!r} to distinguish them; give one path "
                "per task"
            )
        # A file with all subjects may have none of this one in some splits.
        by_split = {split: rows for split, rows in by_split.items() if rows}
        return by_split if evaluated in by_split else None

    def _rows_of(self, file: Path) -> tuple[Row, ...]:
        """Read a file once: a single file may contain all of MMLU's subjects."""
        if file not in self._read:
            self._read[file] = read_rows(file)
        return self._read[file]

    def _own_place(self, names: Sequence[str], splits: Sequence[str]) -> Path | None:
        """Return the file or folder within the folder that is named after the task, if any."""
        if self.path.is_file() or _split_files(self.path, splits):
            return None
        for name in names:
            for place in (self.path / name, *(self.path / f"{name}{suffix}" for suffix in FORMATS)):
                if place.exists():
                    return place
        return None


def local_rows(
    name: str, tasks: Sequence[StockTask], files: Mapping[str, BenchmarkFiles]
) -> tuple[dict[str, dict[str, list[Row]]], set[str]]:
    """Read the user's rows for the members of a task or group.

    Args:
        name: name of the requested task or group.
        tasks: the tasks that it consists of.
        files: the user's files, keyed by a task, a group, or a prefix of such names; for each task, the longest
            matching key counts.

    Returns:
        Rows by task and split, and the paths that they come from; both empty if there are none.
    """
    rows: dict[str, dict[str, list[Row]]] = {}
    paths: set[str] = set()
    for task in tasks:
        keys = [key for key in files if covers(key, name) or covers(key, task.name)]
        if not keys or task.evaluated is None:
            continue
        key = max(keys, key=len)
        # Files are often named after the part alone: abstract_algebra instead of mmlu_abstract_algebra.
        short = {task.name.removeprefix(f"{prefix}_") for prefix in (key, name)}
        names = [*dict.fromkeys([task.config or task.name, task.name, *sorted(short)])]
        # A path for a group or for several tasks must distinguish its tasks.
        shared = len(tasks) > 1 and key != task.name
        found = files[key].rows(names, task.config, task.splits, task.evaluated, shared)
        if found is not None:
            rows[task.name] = {split: _renamed(task.name, each) for split, each in found.items()}
            paths.add(str(files[key].path))
    return rows, paths


def covers(key: str, name: str) -> bool:
    """Whether a key of the user's data is a task's name, or its first words."""
    return name == key or name.startswith(f"{key}_")


def _renamed(task: str, rows: Sequence[Row]) -> list[Row]:
    """Copy ``input`` to ``question`` for LongBench: THUDM's files and lm_eval's dataset name this field differently."""
    if not task.startswith("longbench_"):
        return list(rows)
    # A question of the row's own wins over the copy.
    return [{"question": row["input"], **row} if "input" in row else row for row in rows]


def _split_files(folder: Path, splits: Sequence[str]) -> dict[str, list[Path]]:
    """Return the files of a folder by the split in their names: one file, or all parts of one, per split."""
    by_word: dict[str, list[Path]] = {}
    # Sorted, so that the parts of a split are read in order.
    for file in sorted(folder.iterdir()):
        if file.is_file() and split_suffix(file)[0] in FORMATS:
            stem = file.name.removesuffix("".join(split_suffix(file))).lower()
            # By words, so that train-00000-of-00002 and mmlu_test are found, and "contest" is not a test split.
            for word in {stem, *re.split(r"[^a-z]+", stem)}:
                by_word.setdefault(word, []).append(file)
    found = {}
    for split in splits:
        for word in (split, *ALIASES.get(split, ())):
            if files := by_word.get(word):
                # Parts such as -00000-of-00002 belong together; other files would be two versions of the split.
                if len(files) > 1 and not all(re.search(r"-\d+-of-\d+", file.name) for file in files):
                    names = ", ".join(file.name for file in files)
                    raise RopewalkError(
                        f"{folder} has more than one file of the split {split!r}: {names}; keep only one of them"
                    )
                found[split] = files
                break
    return found


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read all rows of a JSON lines, JSON, Parquet or CSV file.

    Args:
        path: path of the file; all but ``.parquet`` may be compressed as ``.gz`` or ``.zst``.

    Raises:
        RopewalkError: if the file cannot be read, is empty, or has another suffix.
    """
    kind = split_suffix(path)[0]
    if kind not in FORMATS:
        raise RopewalkError(
            f"{path} is not a supported file of benchmark data; its name must end in one of {', '.join(FORMATS)}"
        )
    rows = {".parquet": _parquet_rows, ".csv": _csv_rows}.get(kind, _json_rows)(path)
    if not rows:
        raise RopewalkError(f"{path} has no rows; give a file that is not empty")
    return rows


def _parquet_rows(path: Path) -> tuple[Row, ...]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise RopewalkError(
            f"reading {path} needs the package pyarrow; install it, or give the rows as JSON lines"
        ) from error

    try:
        table = pyarrow.parquet.read_table(path)
        # Arrow follows offsets without a check: a wrong one would read other memory, or end the process.
        table.validate(full=True)
        return tuple(table.to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise RopewalkError(f"{path} cannot be read as Parquet: {error}") from error


def _csv_rows(path: Path) -> tuple[Row, ...]:
    # Not splitlines(), which also breaks at U+2028 and others that texts may contain.
    lines = io.StringIO(read_text(path, LONGEST_FILE), newline="")
    # Prompts are longer than the limit, which belongs to the module and not to a reader.
    before = csv.field_size_limit(sys.maxsize)
    try:
        rows = tuple(csv.DictReader(lines, strict=True))
    except csv.Error as error:
        raise RopewalkError(f"{path} cannot be read as CSV: {error}") from error
    finally:
        csv.field_size_limit(before)
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise RopewalkError(f"row {number} of {path} has more or fewer values than the first line names")
    return rows


def _json_rows(path: Path) -> tuple[Row, ...]:
    text = read_text(path, LONGEST_FILE)
    # By content, not by suffix: some .json files have one object per line.
    if text.lstrip().startswith("["):
        values = _parsed(text, str(path))
    else:
        # Not splitlines(), which also breaks at U+2028 and others that JSON strings may contain.
        lines = enumerate(text.split("\n"), 1)
        values = [_parsed(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not all(isinstance(value, dict) for value in values):
        raise RopewalkError(f"each row of {path} must be a JSON object")
    return tuple(values)


def _parsed(text: str, origin: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RopewalkError(f"{origin} is not valid JSON: {json_fault(error)}") from error
