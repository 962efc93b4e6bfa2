"""Calls from Python: what a person gives a function, as the settings that the function declares.

A function of :mod:`ropewalk.jobs` takes the options of its command as keywords, whatever group of settings they are
declared in. Values may have the forms that the command line takes, such as ``"128k"`` and ``"ruler,passkey"``.
"""

from __future__ import annotations

import difflib
import keyword
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ValidationError, create_model
from pydantic.fields import FieldInfo

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import Settings, explain, model_in, option_of
from ropewalk.versions import needs

P = ParamSpec("P")
R = TypeVar("R")

Path = tuple[str, ...]
"""Names that lead to a field, from the name of its settings class."""

RESERVED = frozenset({"context"})
"""Names that are no keywords: ``context`` is the run context of every job."""


def settings_from(given: Mapping[str, Any], *kinds: type[Settings]) -> list[Any]:
    """Settings of each kind from the keywords of a call.

    Args:
        given: values by keyword; see :func:`keywords_of`. A keyword may also name a group of settings, with a mapping
            or a settings object as its value.
        kinds: the settings classes that the call fills.

    Raises:
        RopewalkError: for an unknown keyword or a value that a setting does not accept; the message names the keyword.
    """
    known = keywords_of(*kinds)
    values: dict[str, Any] = {kind.__name__: {} for kind in kinds}
    names: dict[Path, str] = {}
    for name in given:
        if name not in known:
            raise RopewalkError(f"unknown keyword {name}; {_near(name, known)}")
        path = known[name]
        if path in names:
            raise RopewalkError(f"{names[path]} and {name} are the same setting; give one of them")
        names[path] = name
    # Without them, a group would be missing instead of a setting.
    for path, field in _fields([((kind.__name__,), kind) for kind in kinds]):
        if field.is_required() and _group_in(field) is not None:
            _put(values, path, {})
    # A group before what it contains, which a keyword of its own then overrides.
    for path in sorted(names, key=len):
        field = owner_of(kinds, path).model_fields[path[-1]]
        _put(values, path, _as_declared(field, given[names[path]]))
    own: dict[Path, str] = {}
    for name, path in known.items():
        own.setdefault(path, name)

    def spelled(location: Sequence[str | int]) -> str:
        for n in range(len(location), 0, -1):
            path = tuple(map(str, location[:n]))
            if path in names or (n == len(location) and path in own):
                return ".".join([names.get(path) or own[path], *map(str, location[n:])])
        return ".".join(map(str, location[1:]))

    model = _together(*kinds)
    try:
        filled = model.model_validate(values)
    except ValidationError as error:
        raise RopewalkError(explain(error, model, spelled)) from error
    return [getattr(filled, kind.__name__) for kind in kinds]


def says_what_is_missing(job: Callable[P, R]) -> Callable[P, R]:
    """Let a function name the package that it needs and ropewalk-core does not bring, as an error of ropewalk."""

    @wraps(job)
    def called(*given: P.args, **keywords: P.kwargs) -> R:
        try:
            return job(*given, **keywords)
        except ModuleNotFoundError as error:
            if (sentence := needs(f"ropewalk.{job.__name__}", error)) is None:
                raise
            raise RopewalkError(sentence) from error

    return called


def as_keywords(kind: type[Settings], first: str, given: Any) -> dict[str, Any]:
    """Keywords of the first argument of a call.

    Args:
        kind: settings class of the call.
        first: keyword that the argument stands for if it is neither settings nor a mapping of keywords.
        given: the argument.
    """
    if isinstance(given, kind):
        return _set_fields(given)
    return dict(given) if isinstance(given, Mapping) else {first: given}


@cache
def keywords_of(*kinds: type[Settings]) -> Mapping[str, Path]:
    """The field of each keyword. A keyword is the name of a field, or of its option with ``_`` for ``-``.

    Where groups of settings have fields of the same name, the keyword is the one with the fewest groups around it.
    """
    found: dict[str, Path] = {}
    for path, field in _fields([((kind.__name__,), kind) for kind in kinds]):
        option = option_of(field)
        for name in (path[-1], (option.name or "").removeprefix("--").replace("-", "_")):
            if name.isidentifier() and not keyword.iskeyword(name) and name not in RESERVED:
                found.setdefault(name, path)
    return found


def _fields(level: Sequence[tuple[Path, type[BaseModel]]]) -> Iterator[tuple[Path, FieldInfo]]:
    """All fields of models and of the models in them, level by level."""
    below = []
    for path, model in level:
        for name, field in model.model_fields.items():
            yield (*path, name), field
            if (inner := _group_in(field)) is not None:
                below.append(((*path, name), inner))
    if below:
        yield from _fields(below)


def _group_in(field: FieldInfo) -> type[BaseModel] | None:
    """The settings class of a field that is a group of settings; a list of them is none."""
    return None if _list_in(field.annotation) is not None else model_in(field.annotation)


def owner_of(kinds: Sequence[type[Settings]], path: Path) -> type[BaseModel]:
    """The class that declares the last field of a path."""
    model: type[BaseModel] | None = next(kind for kind in kinds if kind.__name__ == path[0])
    for name in path[1:-1]:
        assert model is not None
        model = model_in(model.model_fields[name].annotation)
    assert model is not None
    return model


@cache
def _together(*kinds: type[Settings]) -> type[Settings]:
    """One model of all kinds, so that one validation finds the mistakes of all."""
    fields: dict[str, Any] = {kind.__name__: (kind, ...) for kind in kinds}
    return create_model("Call", __base__=Settings, **fields)


def _near(name: str, known: Mapping[str, Path]) -> str:
    # A name that goes on is nearer than another word of the same length.
    longer = [each for each in known if each.startswith(name) or name.startswith(f"{each}_")]
    near = longer or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "keywords are the options of the command, with _ for -"


def _put(values: dict[str, Any], path: Path, value: Any) -> None:
    for part in path[:-1]:
        inner = values.get(part)
        values[part] = _set_fields(inner) if isinstance(inner, BaseModel) else dict(inner or {})
        values = values[part]
    values[path[-1]] = value


def _set_fields(settings: BaseModel) -> dict[str, Any]:
    """The fields that were given, since checks distinguish them from defaults."""
    return {name: getattr(settings, name) for name in settings.model_fields_set}


def _as_declared(field: FieldInfo, value: Any) -> Any:
    """A value with texts for paths, and a list for a single value where the setting is a list."""
    value = _plain(value)
    several = _list_in(field.annotation)
    if several is None or value is None or isinstance(value, list):
        return value
    # A setting that is a comma-separated text on the command line reads the text itself.
    reads_text = any(isinstance(each, BeforeValidator) for each in (*field.metadata, *_metadata(field)))
    return value if isinstance(value, str | dict) and reads_text else [value]


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [_plain(each) for each in value]
    return value


def _list_in(annotation: Any) -> Any:
    """The part of an annotation that is a tuple of any length; None if there is none."""
    if get_origin(annotation) is tuple:
        return annotation if get_args(annotation)[-1] is Ellipsis else None
    return next((part for each in get_args(annotation) if (part := _list_in(each)) is not None), None)


def _metadata(field: FieldInfo) -> Iterator[Any]:
    """Annotations of the members of a union, such as those of Lengths in ``Lengths | None``."""
    for part in () if get_origin(field.annotation) is tuple else get_args(field.annotation):
        yield from getattr(part, "__metadata__", ())
