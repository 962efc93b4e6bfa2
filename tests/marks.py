"""Which parameters of a test belong to `make test`, and which to `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of which the first ``count`` always run, and the others, which take the same way, are slow.

    A tuple stands for several arguments, as in ``pytest.mark.parametrize``.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[pytest.mark.slow] * (n >= count)
        )
        for n, value in enumerate(values)
    ]


def compiles(test: Any) -> Any:
    """Mark a test that runs torch's compiler, whose own warnings it hides in ways that errors of them forestall."""
    for message in (
        "The .grad attribute of a Tensor that is not a leaf",
        ".torch.jit.script_method. is deprecated:DeprecationWarning",
    ):
        test = pytest.mark.filterwarnings(f"ignore:{message}")(test)
    return test
