"""A corpus in one file and one in a folder of several, and files of rows that are small."""

import json
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many files of rows from few tokens."""
    monkeypatch.setattr("ropewalk.data.rows.writer.LEAST_FILE_TOKENS", 1024)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path / "corpus.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, length in enumerate(random.integers(1, 300, 60)):
            record = {"text": f"[{number}] ".ljust(length, "ab"[number % 2]), "source": "ab"[number % 2]}
            file.write(json.dumps(record) + "\n")
    return path
