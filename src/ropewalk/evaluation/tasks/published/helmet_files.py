"""HELMET's files of questions with passages, which have gigabytes and are read one row at a time.

Source: princeton-nlp/HELMET at 4526dfb, ``data.py`` (MIT).
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.benchmark_files import Row
from ropewalk.io.digests import FileDigest

ORIGIN = "data.tar.gz of https://huggingface.co/datasets/princeton-nlp/HELMET"
SHOTS = 2
"""Examples of a prompt."""
POPULAR = 1000
"""Popularity from which on PopQA's subjects are not asked about."""


def key_of(row: Row) -> str:
    """What tells that rows are about the same question."""
    return str(next(row[name] for name in ("qid", "id", "question", "query") if row.get(name) is not None))


Stamp = tuple[int, int]


def stamp(file: Path) -> Stamp:
    """What tells that a file has changed: its size and time."""
    return (stat := file.stat()).st_size, stat.st_mtime_ns


@lru_cache
def digest_of(file: Path, size: int, time: int) -> str:
    """Digest of a file, computed once while it does not change: some have gigabytes."""
    return FileDigest.of(file).sha256


def rows_of(file: Path, chosen: Container[int] | None = None) -> Iterator[tuple[int, Row]]:
    """The rows of a file with their numbers from 0, one at a time, or only the chosen ones."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if chosen is not None and number not in chosen:
                continue
            try:
                row = json.loads(line)
                if not row["ctxs"] or not (row.get("answers") or row.get("qid")):
                    raise ValueError("it has no passages, or neither answers nor qid")
                yield number, row
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RopewalkError(
                    f"row {number + 1} of {file} is not one of HELMET ({error}); give {ORIGIN}"
                ) from error


@lru_cache(maxsize=8)
def keys_of(file: Path, size: int, time: int) -> tuple[str | None, ...]:
    """The question of each row; None if it is not asked."""
    return tuple(key_of(row) if int(row.get("s_pop", 0)) < POPULAR else None for _, row in rows_of(file))


@lru_cache(maxsize=8)
def examples_of(file: Path, size: int, time: int) -> Mapping[str, Row]:
    """A row of each question, for examples."""
    keys = keys_of(file, size, time)
    found = {
        key: row for key, (_, row) in zip(reversed(keys), reversed([*rows_of(file)]), strict=True) if key
    }
    if len(found) <= SHOTS:
        raise RopewalkError(f"{file} has fewer than {SHOTS + 1} questions; give {ORIGIN}")
    return found
