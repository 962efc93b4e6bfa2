"""Versions of the software that produced a result."""

from __future__ import annotations

import platform
from functools import cache
from importlib.util import find_spec

VERSION = "0.1.0"
"""Of ropewalk."""
LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "numpy")


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported for that."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def software_versions(libraries: tuple[str, ...] = LIBRARIES) -> dict[str, str]:
    """Versions of ropewalk, of Python and of the libraries that results depend on, by name."""
    return {"ropewalk": VERSION, "python": platform.python_version(), **_of_libraries(libraries)}


def older_transformers(version: str) -> str | None:
    """The installed version of transformers if it is older than ``version``, such as ``5.22``; None if it is not."""
    installed = _of_libraries(LIBRARIES)["transformers"]
    return installed if _release(installed) < _release(version) else None


def _release(version: str) -> tuple[int, ...]:
    """Its first two numbers, which are all that decides what transformers can do."""
    return tuple(int(number) for number in version.split(".")[:2])


@cache
def _of_libraries(libraries: tuple[str, ...]) -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in libraries}
