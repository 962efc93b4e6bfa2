"""Tests of what older transformers, which ropewalk supports too, lack: skipped there, and there alone."""

from typing import NoReturn

import pytest

from ropewalk.models.support import ModelsSettings, supported
from ropewalk.versions import LIBRARIES, _of_libraries, older_transformers

NEWEST = supported(ModelsSettings()).transformers
"""The version that the table of supported families was made with: it has everything that a test asks for."""

WRITES_DBRX = ("5.20", "a class that reads the config of DBRX that it wrote")
"""A version and what needs it, as :func:`needs_transformers` takes them."""


def needs_transformers(version: str, what: str) -> None:
    """Skip the test if the installed transformers is older than ``version``, in which ``what`` works."""
    if (installed := older_transformers(version)) is not None:
        pytest.skip(f"{what} needs transformers {version} or later, and {installed} is installed")


def pretend_transformers(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Let ropewalk take ``version`` for the installed transformers, for the rest of the test."""
    monkeypatch.setitem(_of_libraries(LIBRARIES), "transformers", version)


def missing(what: str) -> NoReturn:
    """Skip the test because the installed transformers lacks ``what``, or fail if it should have it."""
    if (installed := older_transformers(NEWEST)) is not None:
        pytest.skip(f"transformers {installed} has no {what}; {NEWEST} has it")
    pytest.fail(f"the installed transformers has no {what}")
