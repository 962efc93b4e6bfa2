"""Small runs of the benchmarks: whether they run with the signatures of today; their figures mean nothing."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch


def small(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """The result file of a benchmark's small run, in this process."""
    out = folder / "result.json"
    threads = torch.get_num_threads()
    try:
        status = importlib.import_module(f"benchmarks.{name}").main(
            ["--small", "--out", str(out), *arguments]
        )
    finally:
        torch.set_num_threads(threads)
    result: dict[str, Any] = json.loads(out.read_text())
    assert not status, result.get("failed")
    assert result["small"]
    return result
