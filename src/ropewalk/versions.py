"""Which software a result came from."""

from __future__ import annotations

import platform
from functools import cache

VERSION = "0.1.0"
"""Of ropewalk."""
LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "numpy")


def software_versions() -> dict[str, str]:
    """Versions of ropewalk, of Python and of the libraries that results depend on, by name."""
    return {"ropewalk": VERSION, "python": platform.python_version(), **_of_libraries()}


@cache
def _of_libraries() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in LIBRARIES}
