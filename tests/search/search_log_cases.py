"""The losses in the log of a search, for its tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ropewalk.runs import Log
from ropewalk.search import Job
from ropewalk.search.loop import lines_of


def read_log(path: Path, header: Mapping[str, Any], n_documents: int | None = None) -> dict[Job, float]:
    """Losses by job."""
    return dict(Log(path, lines_of(n_documents), header, "search").known.values())
