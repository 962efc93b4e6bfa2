"""Which parameters of a test belong to `make test`, and which to `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of which the first ``count`` always run, and the others, which take the same way, are slow."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (n >= count)) for n, value in enumerate(values)]
