"""Which software a result came from."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

import ropewalk

LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "numpy")


def software_versions() -> dict[str, str]:
    """Versions of ropewalk, of Python and of the libraries that results depend on, by name."""
    return {
        "ropewalk": ropewalk.__version__,
        "python": platform.python_version(),
        **_of_libraries(),
    }


@cache
def _of_libraries() -> dict[str, str]:
    return {name: version(name) for name in LIBRARIES}
