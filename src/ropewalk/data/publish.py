"""A folder of rows in the making: what it is for, what is still missing, and when it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.data.arrow import writing
from ropewalk.data.rows import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    VALIDATION,
    WORK,
    PackedRows,
    file_digests,
    is_packed,
    open_rows,
    rows_file,
)
from ropewalk.errors import RopewalkError
from ropewalk.files import write_json

JOB, PLAN = "job.json", "plan.json"

# What the same job may have otherwise on another machine; files are compared by their content's digests.
_MAY_DIFFER = ("digest", "inputs", "versions")


def row_files(rows: int, per_file: int) -> list[tuple[str, int]]:
    """The names of all files of rows, and how many rows each holds."""
    firsts = range(0, rows, per_file)
    return [(rows_file(n), min(per_file, rows - first)) for n, first in enumerate(firsts)]


def begin(folder: Path, job: dict[str, Any]) -> bool:
    """Make or take up a folder for a job.

    Args:
        folder: the folder.
        job: all that its rows depend on.

    Returns:
        Whether its rows are complete already.

    Raises:
        RopewalkError: if it holds rows of another job, complete or in part, or anything else.
    """
    if is_packed(folder):
        there = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if there.get("format_version") == FORMAT_VERSION:
            _refuse_other(folder, there, job, "holds rows")
            return True
        raise RopewalkError(
            f"{folder} holds rows of format version {there.get('format_version')}; choose another folder"
        )
    known = folder / WORK / JOB
    if known.is_file():
        there = _read(known)
        if any(folder.glob("rows-*.arrow")):
            _refuse_other(folder, there, job, "holds unfinished rows")
        elif there != job:
            with writing(folder):
                (folder / VALIDATION).unlink(missing_ok=True)
    elif folder.exists() and (not folder.is_dir() or any(path.name != WORK for path in folder.iterdir())):
        raise RopewalkError(f"{folder} holds something else; give a new or empty folder for the rows")
    with writing(folder):
        (folder / WORK).mkdir(parents=True, exist_ok=True)
    write_json(known, job)
    return False


def publish_if_complete(
    folder: Path, manifest: dict[str, Any], files: Sequence[tuple[str, int]]
) -> list[str]:
    """Write the manifest once every file is there, and put away what only the making needed.

    Args:
        folder: the rows' folder.
        manifest: all of it but the files' sizes and digests.
        files: name and number of rows of every file of rows.

    Returns:
        The files that are not there yet; none where the rows are complete now.
    """
    missing = [name for name, _ in files if not (folder / name).is_file()]
    if missing:
        plan = {**manifest, "row_files": [list(each) for each in files]}
        write_json(folder / WORK / PLAN, plan)
        return missing
    names = [*(name for name, _ in files), VALIDATION]
    paths = [folder / name for name in names]
    digests = dict(zip(names, file_digests(paths), strict=True))
    described = [
        {"name": name, "rows": rows, "bytes": (folder / name).stat().st_size, "sha256": digests[name]}
        for name, rows in files
    ]
    write_json(
        folder / MANIFEST, {**manifest, "row_files": described, "validation_sha256": digests[VALIDATION]}
    )
    shutil.rmtree(folder / WORK, ignore_errors=True)
    for kind in (".rows-*.arrow", ".validation.*.arrow", ".manifest.*.json"):
        for leftover in folder.glob(kind):
            leftover.unlink(missing_ok=True)
    return []


def merge_parts(parts: Sequence[Path], folder: Path) -> PackedRows:
    """One folder of rows from the parts that several machines wrote into folders of their own.

    Args:
        parts: the folders, each with the files of its shard.
        folder: a new folder; files are copied into it.

    Raises:
        RopewalkError: if a folder is no part, the parts are not of one job, a file of rows is in none of
            them, or ``folder`` cannot be written.
    """
    plans = [_plan(part) for part in parts]
    for part, plan in zip(parts[1:], plans[1:], strict=True):
        compared = {key: value for key, value in plans[0].items() if key not in _MAY_DIFFER}
        _refuse_other(part, plan, compared, f"is no part of the same rows as {parts[0]}: it is")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RopewalkError(f"{folder} holds something already; give a new folder for the merged rows")
    files = [(str(name), int(rows)) for name, rows in plans[0].pop("row_files")]
    found = {name: _holder(parts, name) for name in (*(name for name, _ in files), VALIDATION)}
    missing = [name for name, part in found.items() if part is None]
    if missing:
        raise RopewalkError(
            f"{missing[0]} and {len(missing) - 1} more files are in none of the parts"
            if len(missing) > 1
            else f"{missing[0]} is in none of the parts"
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, holder in found.items():
            assert holder is not None
            shutil.copyfile(holder / name, folder / f".{name}")
            (folder / f".{name}").rename(folder / name)
    publish_if_complete(folder, plans[0], files)
    return open_rows(folder)


def _holder(parts: Sequence[Path], name: str) -> Path | None:
    return next((part for part in parts if (part / name).is_file()), None)


def _plan(part: Path) -> dict[str, Any]:
    if not part.is_dir():
        raise RopewalkError(f"there is no folder {str(part)!r}")
    complete = is_packed(part)
    path = part / MANIFEST if complete else part / WORK / PLAN
    if not path.is_file():
        raise RopewalkError(f"{part} holds no finished part of rows; run its shard to the end first")
    plan = _read(path)
    if complete:
        # A part that happens to be everything: of rows so few that they are one file, say.
        plan = {key: value for key, value in plan.items() if key != "validation_sha256"}
        plan["row_files"] = [[each["name"], each["rows"]] for each in plan["row_files"]]
    if plan.get("format") != FORMAT or plan.get("format_version") != FORMAT_VERSION:
        raise RopewalkError(f"{path} is of another version; pack again")
    return plan


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RopewalkError(f"cannot read {path}: {error}; delete its folder and pack again") from error
    return value


def _refuse_other(folder: Path, there: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    """Say the first thing in which two jobs differ.

    Raises:
        RopewalkError: if they do.
    """
    for key, value in wanted.items():
        if key == "digest" or _same(there.get(key), value):
            continue
        ours, theirs = _first_difference(there.get(key), value)
        raise RopewalkError(
            f"{folder} {what} of another {key}: {theirs}, not {ours}; give another folder, or delete it"
        )


def _same(there: Any, wanted: Any) -> bool:
    if isinstance(there, dict) and isinstance(wanted, dict):
        # A manifest's tokenizer also tells where it came from, which is no part of a job.
        return all(there.get(key) == value for key, value in wanted.items())
    return bool(there == wanted)


def _first_difference(there: Any, wanted: Any) -> tuple[str, str]:
    if isinstance(there, dict) and isinstance(wanted, dict):
        for key in wanted:
            if there.get(key) != wanted[key]:
                return f"{key} {wanted[key]}", f"{key} {there.get(key)}"
    return str(wanted), str(there)
