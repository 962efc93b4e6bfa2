"""The two distributions: ropewalk-core, which has all files, and ropewalk, which adds what loads and trains models."""

import tomllib
from typing import Any

from packaging.requirements import Requirement

from tests.places import ROOT


def settings_of(folder: str) -> Any:
    """The ``pyproject.toml`` of a folder."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


CORE: Any = settings_of(".")["project"]
FULL: Any = settings_of("full")["project"]
ADDED: list[str] = [line for line in FULL["dependencies"] if Requirement(line).name != CORE["name"]]
"""What ropewalk needs beside ropewalk-core."""
DEPENDENCIES: list[str] = [*CORE["dependencies"], *ADDED]
"""What a full installation needs."""
