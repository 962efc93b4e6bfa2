"""Values made once from a batch's layouts, that die with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

Made = TypeVar("Made")


def kept(make: Callable[..., Made]) -> Callable[..., Made]:
    """Let a function compute once for the same arguments; what it made dies with its first argument.

    The first argument, or the first item of a tuple, owns the result; items of tuples are compared by identity and not
    kept alive. The indices of one batch of long rows are 100 MB on a device: a cache that outlives rows would hold
    gigabytes, and one of so many entries would lose the plans of a step's first rows while its last ones are prepared.
    """
    found: WeakKeyDictionary[Any, dict[Any, Made]] = WeakKeyDictionary()

    @wraps(make)
    def once(*args: Any) -> Made:
        owner = args[0][0] if isinstance(args[0], tuple) else args[0]
        key = tuple(tuple(map(ref, each)) if isinstance(each, tuple) else each for each in args[1:])
        if isinstance(args[0], tuple):
            key = (*map(ref, args[0][1:]), *key)
        made = found.setdefault(owner, {})
        if key not in made:
            made[key] = make(*args)
        return made[key]

    once.forget = found.clear  # type: ignore[attr-defined]
    return once
