"""What tests of ``ropewalk eval --server`` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ropewalk.cli import app as program
from tests.cli.byte_checkpoint import save_byte_checkpoint
from tests.completion_server import few_certificates


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a token a byte, of 512 tokens."""
    return save_byte_checkpoint(tmp_path_factory.mktemp("models") / "tiny", 512)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs ``ropewalk eval`` with a cache folder of the test's own, and returns its status."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    few_certificates(monkeypatch, tmp_path)
    return lambda *arguments: program.main(["eval", *map(str, arguments)])
