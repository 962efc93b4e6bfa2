"""Versions of the software that produced a result."""

from __future__ import annotations

import platform
from contextlib import suppress
from functools import cache
from importlib.util import find_spec

VERSION = "0.1.0"
"""Of ropewalk."""
FULL = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "pyarrow",
    "safetensors",
    "fsspec",
    "cma",
    "zstandard",
)
"""Packages that the distribution ropewalk needs beside those of ropewalk-core, by the names that are imported."""
LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "numpy")


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported for that."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def needs(what: str, error: BaseException | None) -> str | None:
    """Sentence on what cannot run because ropewalk-core is installed alone; None for an error that has another cause.

    Args:
        what: name of a command or function.
        error: error of an import, or one that it caused.
    """
    while error is not None:
        package = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in FULL:
            return f"{what} needs {package}, which is not installed; run pip install ropewalk"
        error = error.__cause__
    return None


def software_versions(libraries: tuple[str, ...] = LIBRARIES) -> dict[str, str]:
    """Versions of ropewalk, of Python and of those libraries that are installed and results depend on, by name."""
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
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in libraries:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
