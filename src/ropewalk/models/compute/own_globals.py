"""A function of transformers with other functions in place of some that it calls; the module that it is from stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


def with_globals(function: Any, own: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of a function whose globals are those of its module, but for some names.

    Args:
        function: a Python function without wrappers.
        own: what these names are for the copy.
    """
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **own},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
