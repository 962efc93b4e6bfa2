"""HELMET's files: rows one at a time, and a digest of what may have gigabytes."""

import hashlib
import os
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.published.helmet_files import (
    digest_of,
    examples_of,
    keys_of,
    rows_of,
    stamp,
)
from tests.evaluation.tasks.published.helmet_cases import rag_folder
from tests.evaluation.tasks.published.published_cases import write_rows


def test_rows_are_chosen_by_their_numbers(tmp_path: Path) -> None:
    rag_folder(tmp_path, name="popqa")
    file = tmp_path / "popqa_test_1000_k50_dep6.jsonl"
    assert [(number, row["question"]) for number, row in rows_of(file, {2, 5})] == [
        (2, "question 1?"),
        (5, "question 2?"),
    ]
    assert keys_of(file, *stamp(file)) == (*(f"question {each // 2}?" for each in range(8)), None, None)
    assert [*examples_of(file, *stamp(file)).values()] != []
    assert {row["depth"] for row in examples_of(file, *stamp(file)).values()} == {0.0}


def test_rows_of_something_else_and_too_few_examples_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"ctxs": [1], "answers": ["x"]}, {"question": "x"}])
    with pytest.raises(
        RopewalkError, match=r"row 2 of .*a\.jsonl is not one of HELMET \('ctxs'\); give data\.tar"
    ):
        list(rows_of(path))
    rag_folder(tmp_path, questions=2)
    few = tmp_path / "nq-train-multikilt_1000_k3_dep6.jsonl"
    with pytest.raises(RopewalkError, match="has fewer than 3 questions"):
        examples_of(few, *stamp(few))


def test_the_digest_sees_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "big"
    content = bytearray(os.urandom(3 << 20))
    path.write_bytes(content)
    found = {digest_of(path, len(content), 0)}
    assert found == {hashlib.sha256(content).hexdigest()}
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    found.add(digest_of(path, len(content), 1))
    assert len(found) == 2
