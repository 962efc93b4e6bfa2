"""Whether two identities are the same: which of their keys differ first, and how a user is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError

SHOWN = 5
"""Most differences that a message lists."""
LONGEST = 120
"""Characters of a value that a message shows."""


@dataclass(frozen=True)
class Difference:
    """A key of an identity whose value was another.

    Attributes:
        key: path of the key, such as ``settings.seed``.
        was, now: JSON values then and now; None also stands for a missing key.
    """

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} ({shown(self.was)} in the folder, {shown(self.now)} given)"


def plain(value: Any) -> Any:
    """A value as JSON gives it back, so that tuples and lists compare as equal.

    Raises:
        ValueError, TypeError: for NaN, infinity and whatever JSON does not have.
    """
    return json.loads(json.dumps(value, allow_nan=False))


def differences(then: Any, now: Any) -> list[Difference]:
    """The keys in which two values differ, in the order of ``now``; empty if they are equal as JSON.

    A key that only one of the two has is a difference too. Numbers are equal to numbers of their own type only, as they
    are written: 1, 1.0 and true are three values.

    Args:
        then: the recorded value, such as the identity of a step.
        now: the value of today.
    """
    return list(_differing("", then, plain(now)))


def refuse_other(then: Any, now: Any, said: Callable[[Difference], str]) -> None:
    """Raise if two values differ.

    Args:
        then, now: as in :func:`differences`.
        said: the message, from the first difference.

    Raises:
        RopewalkError: with that message.
    """
    if found := differences(then, now):
        raise RopewalkError(said(found[0]))


def _differing(key: str, then: Any, now: Any) -> Iterator[Difference]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for name in {**now, **then}:
            yield from _differing(f"{key}.{name}" if key else str(name), then.get(name), now.get(name))
            # None and a missing key are shown alike, but they are two values.
            if (name in then) != (name in now) and then.get(name) is now.get(name) is None:
                yield Difference(f"{key}.{name}" if key else str(name), None, None)
    # Lists of plain values are shown as wholes.
    elif _is_of_mappings(then) and _is_of_mappings(now) and len(then) == len(now):
        for number, pair in enumerate(zip(then, now, strict=True)):
            yield from _differing(f"{key}.{number}" if key else str(number), *pair)
    elif json.dumps(then, sort_keys=True) != json.dumps(now, sort_keys=True):
        yield Difference(key, then, now)


def _is_of_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def shown(value: Any) -> str:
    """A value as a message shows it: shortened, and strings without quotes."""
    text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def listed(found: list[Difference]) -> str:
    """The first few differences for a message, such as ``settings.seed (0 in the folder, 1 given)``."""
    return ", ".join(str(each) for each in found[:SHOWN])
