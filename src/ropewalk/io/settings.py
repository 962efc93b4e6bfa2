"""Base class of all settings models, shared types, and one sentence for each mistake in a setting.

A setting is declared once, as a field of a frozen pydantic model beside the code that uses it. Recipes are composed of
these models, and command-line options and the reference in the documentation are generated from them.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from ropewalk.io.lengths import LENGTH_PATTERN, format_length, parse_length

_GOT = re.compile(r"[,;] got ")

MOST_PROBLEMS = 3
"""Most mistakes that one message lists."""

MODEL_NAME = (
    "Checkpoint folder (runs/64k/model), Hub id (meta-llama/Llama-3.1-8B), or a tiny model that ropewalk ships "
    "(embedded, embedded:retrieval)"
)
"""Description of a setting that names a model, without the full stop."""

RECIPE_NAME = (
    "Recipe: a YAML file with the settings of a training run, or the name of a recipe that ropewalk ships"
)
"""Description of a setting that names a recipe, without the full stop."""

DOCUMENTS = (
    "a file or folder of text, JSON Lines or Parquet; a Hub data set (hf:owner/name); or text that ropewalk ships "
    "(embedded, embedded:validation)"
)
"""Documents that a setting names; the description puts their purpose before it."""

FACTOR_TABLE = "Factor table: a .json file of LongRoPE factors, written by `ropewalk search`"
"""Description of a setting that names a factor table, without the full stop."""

TARGET_LENGTH = "Target context length in tokens, such as 131072 or 128k."
"""Description of a setting that is the target length."""

TRAINED_LENGTH = "Context length in tokens that the checkpoint was trained at, such as 8192 or 8k."
"""Description of a setting that is the trained length."""

ROPE_SETTINGS = (
    "linear, yarn, llama3, cope, ntk, ntk or yarn with a critical pair (ntk-rcd=30, yarn-rcd=30), a base (theta=5e6), "
    "or a rule that `ropewalk rope theta --help` lists"
)
"""RoPE settings that a setting names, for its description."""

STATED_LENGTH = f"{TRAINED_LENGTH} Default: the length that its config states."
"""Description of a trained length that the config states, too."""


@dataclass(frozen=True)
class Option:
    """Appearance of a field on the command line where its name and type do not determine it; part of its annotation.

    Attributes:
        name: name of the option (``--from``), if it differs from the field's.
        group: heading in the help; None for the ``group`` of the model.
        metavar: placeholder for the value in the help; None to derive it from the type.
        text: writes a default as people would; None for ``str``.
        repeated: whether the option is repeated for several values.
        formerly: earlier names of the option, which are still accepted.
        hidden: whether the setting exists only in recipes and the Python API.
        argument: whether it is a positional argument.
    """

    name: str | None = None
    group: str | None = None
    metavar: str | None = None
    text: Callable[[Any], str] | None = None
    repeated: bool = False
    formerly: tuple[str, ...] = ()
    hidden: bool = False
    argument: bool = False


COMMON = Option(group="Common options")
"""Marks an option that most people need: the help of a long command lists these first, on at most a screen."""


def option_of(field: FieldInfo) -> Option:
    """A field's appearance on the command line, merged from all annotations; the outermost wins."""
    # pydantic keeps the outermost annotations apart from the type.
    declared = list(_options_of(Annotated[field.annotation, *field.metadata, None]))
    merged: dict[str, Any] = {
        each.name: next((found for option in declared if (found := getattr(option, each.name))), each.default)
        for each in fields(Option)
    }
    return Option(**merged)


def _options_of(annotation: Any) -> Iterator[Option]:
    # Annotated metadata lists the innermost annotation first, and the outermost has precedence.
    metadata = getattr(annotation, "__metadata__", ())
    yield from (each for each in reversed(metadata) if isinstance(each, Option))
    for part in get_args(annotation):
        yield from _options_of(part)


@dataclass(frozen=True)
class Free:
    """Marks a key that may have another value when a run is resumed; all other keys decide results.

    Part of a key's annotation, or ``free`` of the class for all of its keys.

    Attributes:
        told: whether the new value decides the steps to come, so that the change is reported and becomes a line of the
            run's history.
    """

    told: bool = False


FREE, ONWARD = Free(), Free(told=True)


@dataclass(frozen=True)
class NamesFiles:
    """Annotates a text that may name a file or folder; a field of type ``Path`` does not need it."""


class Settings(BaseModel):
    """Base of what a person writes: frozen; rejects unknown keys, NaN, infinity and ``true`` for a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)
    group: ClassVar[str | None] = None
    """Heading of the model's options in the help."""
    free: ClassVar[Free | None] = None
    """Mark of all keys of the model that have none of their own."""

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject ``steps: true``, which pydantic would read as 1, and ``eos: 1``, which it would read as true."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        takes_bool = _takes_bool(annotation)
        if not takes_bool:
            items = value if isinstance(value, list | tuple) else (value,)
            if any(isinstance(item, bool) for item in items):
                kinds = set(leaves(annotation))
                number = "a whole number" if float not in kinds else "a number"
                raise ValueError(f"must be {number if kinds & {int, float} else 'a string'}")
        elif _only_bool(annotation) and value is not None and not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value


def _takes_bool(annotation: Any) -> bool:
    """Whether a field accepts a boolean; a model may define its own meaning of ``true``."""
    if annotation is bool or annotation is Any or model_in(annotation) is not None:
        return True
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return any(isinstance(part, bool) for part in parts)
    return any(_takes_bool(part) for part in parts)


def free_mark(model: type[BaseModel], name: str) -> Free | None:
    """The mark of a key, its own or that of its class; None for a key that decides results."""
    own = (each for each in model.model_fields[name].metadata if isinstance(each, Free))
    return next(own, getattr(model, "free", None))


def deciding(settings: Settings, without: Collection[str] = ()) -> dict[str, Any]:
    """The values that decide results, as JSON values: those of all keys that are not free.

    Args:
        settings: the settings.
        without: further keys to leave out.
    """
    found = _deciding(type(settings), settings.model_dump(mode="json"))
    return {name: value for name, value in found.items() if name not in without}


def _deciding(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        # A serializer may write keys that are no fields.
        field = model.model_fields.get(name)
        inner = None if field is None else model_in(field.annotation)
        if field is not None and free_mark(model, name) is not None:
            continue
        if inner is not None and isinstance(value, dict):
            value = _deciding(inner, value)
            # All keys of the group are free.
            if not value:
                continue
        elif inner is not None and isinstance(value, list):
            value = [_deciding(inner, each) if isinstance(each, dict) else each for each in value]
        found[name] = value
    return found


def leaves(annotation: Any) -> Iterator[Any]:
    """The types that make up an annotation."""
    parts = get_args(annotation)
    yield from (leaf for part in parts for leaf in leaves(part)) if parts else (annotation,)


def _only_bool(annotation: Any) -> bool:
    return annotation is bool or set(get_args(annotation)) == {bool, types.NoneType}


Validator = TypeVar("Validator", bound=Callable[..., Any])


def written(*schemas: Mapping[str, Any]) -> Callable[[Validator], Validator]:
    """Mark a validator that runs before pydantic's with JSON Schemas of what else than the field's type it accepts."""

    def mark(validator: Validator) -> Validator:
        validator.written = schemas  # type: ignore[attr-defined]
        return validator

    return mark


TEXT = MappingProxyType({"type": "string"})


@written({"type": "string", "pattern": LENGTH_PATTERN})
def _length(value: Any) -> Any:
    return parse_length(value) if isinstance(value, str) else value


@written(TEXT)
def _parts(value: Any) -> Any:
    """The distinct parts of a comma-separated text, in order."""
    if not isinstance(value, str):
        return value
    parts = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not parts:
        raise ValueError(f"{value!r} is empty; give one or more values, separated by commas")
    return parts


def _joined(values: Sequence[Any]) -> str:
    return ",".join(str(value) for value in values)


def _not_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def _path(value: Any) -> Any:
    return _not_empty(value) if isinstance(value, str) else value


LENGTH = Option(metavar="LENGTH", text=format_length)

Length = Annotated[int, BeforeValidator(_length), Field(le=2**31), LENGTH]
"""Tokens of a document or a row: 131072, or in the short form: 128k, 1M."""

Tokens = Annotated[int, BeforeValidator(_length), Field(le=10**15), LENGTH]
"""Tokens of a whole mixture, in the same forms."""

Lengths = Annotated[
    tuple[Length, ...],
    BeforeValidator(_parts),
    Option(metavar="LENGTH,...", text=lambda found: ",".join(map(format_length, found))),
]
"""Several lengths, comma-separated on the command line: 8k,128k."""

T = TypeVar("T")

Several = Annotated[tuple[T, ...], BeforeValidator(_parts), Option(metavar="NAME,...", text=_joined)]
"""Several distinct values of a type, comma-separated on the command line."""

CommaList = Several[str]
"""Several names."""

Numbers = Annotated[Several[Annotated[int, Field(ge=1)]], Option(metavar="NUMBER,...")]
"""Several whole numbers of at least 1."""

Count = Annotated[int, Field(le=10**9)]
"""A count that a person sets; larger values are typing errors."""

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""Random seed."""

Text = Annotated[str, AfterValidator(_not_empty)]
"""Name or path of a source; not empty."""

Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Field(description="Dtype of the parameters; auto keeps the dtype of the checkpoint."),
]
"""Dtype of a model in memory."""

Device = Annotated[
    str, Field(description="Device to run on, such as cuda:1; auto selects cuda if available, otherwise cpu.")
]
"""Device of a model in memory: auto, cpu, cuda, cuda:1."""


def _exists(path: Path) -> Path:
    path = path.expanduser()
    if not path.exists():
        raise ValueError(f"the file or folder {str(path)!r} does not exist")
    return path


def _no_file(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file, but must be a folder")
    return path


def _no_folder(path: Path) -> Path:
    if path.is_dir():
        raise ValueError(f"{path} is a folder, but must be a file")
    return path


def pairs(value: Any, metavar: str = "KEY=VALUE", example: str = "") -> Any:
    """Parse ``KEY=VALUE`` texts into a mapping without repeated keys; other values are returned unchanged.

    Args:
        value: the texts as typed, or a mapping.
        metavar: name of a pair in messages.
        example: example of a pair, for messages.
    """
    hint = f"; write {example}" if example else ""
    if not isinstance(value, list | tuple):
        return value
    found: dict[str, str] = {}
    for pair in value:
        # Only at the first sign: a value may contain others.
        name, sign, text = str(pair).partition("=")
        if not sign or not name.strip() or not text.strip():
            raise ValueError(f"{pair!r} is not of the form {metavar}{hint}")
        if name.strip() in found:
            raise ValueError(f"{name.strip()} is given twice")
        found[name.strip()] = text
    return found


FileOrName = Annotated[str, NamesFiles()]
"""A file or folder, or the name of something that needs no file, such as ``hub``."""

FilePath = Annotated[Path, BeforeValidator(_path), Option(metavar="PATH")]
"""A path in the file system; an empty text is an error."""

ExistingPath = Annotated[FilePath, AfterValidator(_exists)]
"""An existing file or folder."""

Folder = Annotated[FilePath, AfterValidator(_no_file), Option(metavar="DIR")]
"""A folder that exists or can be created."""

OutputFile = Annotated[FilePath, AfterValidator(_no_folder), Option(metavar="FILE")]
"""A file that exists or can be created."""


def _assignments(value: Any) -> Any:
    """A mapping of keys to values, or one text, as ``KEY=VALUE`` texts."""
    if isinstance(value, Mapping):
        # YAML, which the values are read as, contains JSON.
        return tuple(f"{key}={json.dumps(each, default=str)}" for key, each in value.items())
    return (value,) if isinstance(value, str) else value


Overrides = Annotated[
    tuple[str, ...],
    BeforeValidator(_assignments),
    Option(name="--set", metavar="KEY=VALUE", repeated=True),
    Field(description="Override a key of the recipe: stages.0.context=32k (stages count from 0)."),
]
"""Overrides of a recipe's keys, each in the form ``stages.0.steps=20``."""


def names_files(field: FieldInfo) -> bool:
    """Whether a field's values name files or folders, whose contents then belong to the setting."""
    return any(
        part is Path or isinstance(part, NamesFiles) for part in (*leaves(field.annotation), *field.metadata)
    )


def near_or_all(name: str, known: Sequence[str]) -> str:
    """Advice for an unknown name: the closest known name, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation, such as Mixture in ``Mixture | None``; None if there is none."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for part in get_args(annotation) if (found := model_in(part))), None)


def recipe_key(location: Sequence[str | int]) -> str:
    """A location as it is written in a recipe: ``stages.0.steps``."""
    return ".".join(str(part) for part in location)


Spelling = Callable[[Sequence[str | int]], str]


def explain(
    error: ValidationError,
    model: type[BaseModel],
    spelled: Spelling = recipe_key,
    other_names: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The first few mistakes of a validation error in one line.

    Args:
        error: error raised by pydantic.
        model: the model that was validated.
        spelled: formats a location as the user wrote it: as a recipe key or an option.
        other_names: names that people write for a setting, with the keys that they are here. All of these are listed.

    Returns:
        What is wrong, the value, and what would be accepted, for each mistake; without a full stop.
    """
    found: dict[tuple[str | int, ...], list[Any]] = {}
    for problem in error.errors(include_url=False):
        found.setdefault(_without_tags(model, problem), []).append(problem)
    # All of them: whoever brings a file of another program has many.
    known = {
        where: other_names[str(where[-1])]
        for where, each in found.items()
        if each[0]["type"] == "extra_forbidden" and where[-1] in other_names
    }
    others = [
        _problem(model, where, each, spelled)
        for where, each in found.items()
        if where not in known
        # What is there under another name is not missing.
        and not (
            each[0]["type"] == "missing"
            and any(f"{key}.".startswith(f"{recipe_key(where)}.") for key in known.values())
        )
    ]
    sentences = [f"unknown key {spelled(where)}: use {key}" for where, key in known.items()]
    return "; ".join([*sentences, *others[:MOST_PROBLEMS]])


def _without_tags(model: type[BaseModel], problem: Any) -> tuple[str | int, ...]:
    """Location of a problem without the names of union members and validators that pydantic inserts."""
    found: list[str | int] = []
    # pydantic's locations also name members of unions and validators, which nobody wrote into a recipe.
    inner: type[BaseModel] | None = model
    for place, part in enumerate(problem["loc"]):
        if isinstance(part, int):
            found.append(part)
        elif inner is not None and part in inner.model_fields:
            found.append(part)
            inner = model_in(inner.model_fields[part].annotation)
        # An unknown key is the last part of a location; other undeclared parts are names that pydantic inserts.
        elif inner is not None:
            if problem["type"] == "extra_forbidden" and place == len(problem["loc"]) - 1:
                found.append(part)
        # Below the last model only the keys of a mapping count, again among pydantic's own names.
        elif not (part.startswith("_") or "[" in part or part in ("int", "float", "str", "bool")):
            found.append(part)
    return tuple(found)


def _problem(
    model: type[BaseModel], where: tuple[str | int, ...], problems: Sequence[Any], spelled: Spelling
) -> str:
    key, first = spelled(where), problems[0]
    if first["type"] == "extra_forbidden":
        known = sorted(_fields_at(model, where[:-1]))
        near = difflib.get_close_matches(str(where[-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
        return f"unknown key {key}; {hint}"
    if first["type"] == "missing":
        return f"{key} is missing"
    value = first["input"]
    if first["type"] == "literal_error" and len(problems) == 1 and isinstance(value, str):
        known = [str(each) for each in _literals_at(model, where)]
        if known:
            return f"unknown {key} {value!r}; {near_or_all(value, known)}"
    needs = list(dict.fromkeys(_needed(problem, _fields_at(model, where)) for problem in problems))
    field = _field_at(model, where)
    if first["type"] == "literal_error" and field is not None and (inner := model_in(field.annotation)):
        needs.append(f"must be a mapping of {', '.join(inner.model_fields)}")
    shown = f", got {value if _is_bound(first['type']) else _brief(value)}"
    # A validator's own message may already give the value, in the form that it takes after conversion.
    if first["type"] in (*_LISTS, *_MAPPINGS) and isinstance(value, dict | list):
        shown = f", got a {'list' if isinstance(value, list) else 'mapping'}"
    elif isinstance(value, BaseModel):
        shown = f", got {type(value).__name__}"
    elif isinstance(value, dict | list) or any(_GOT.search(need) for need in needs):
        shown = ""
    if needs == ["must be a list"] and isinstance(value, str) and re.fullmatch(r"[\w./-]{1,60}", value):
        shown += f"; write [{value}]"
    if all(need.startswith("must be ") for need in needs):
        wanted = " or ".join(need.removeprefix("must be ") for need in needs)
        return f"{key} must be {wanted}{shown}"
    message = needs[0]
    if f"{value}" and f"{value}" in message:
        shown = ""
    between = " " if message.startswith("must ") else ": "
    return f"{key}{between}{message}{shown}" if key else message


def _brief(value: Any) -> str:
    """A value as Python writes it, or the type of a value that fills lines, such as a model."""
    text = repr(value)
    return (
        text
        if isinstance(value, str) or (len(text) < 100 and "\n" not in text)
        else f"{type(value).__name__}"
    )


_LISTS = ("list_type", "tuple_type")
_MAPPINGS = ("model_type", "model_attributes_type", "dict_type")


def _is_bound(kind: str) -> bool:
    return kind.startswith(("greater_", "less_"))


def _needed(problem: Any, keys: Sequence[str]) -> str:
    """The problem that pydantic found, phrased as ``must be ...`` for a bound or a type.

    Args:
        problem: one of pydantic's errors.
        keys: the keys of a mapping at its place, if one may stand there.
    """
    kind, limits = problem["type"], problem.get("ctx", {})
    number = {
        "greater_than_equal": "must be {ge:g} or more",
        "greater_than": "must be more than {gt:g}",
        # Plain g would write 2147483648 as 2.14748e+09.
        "less_than_equal": "must be {le:.15g} or less",
        "less_than": "must be less than {lt:.15g}",
        "int_parsing": "must be a whole number",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_parsing": "must be a number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "string_type": "must be a string",
        "path_type": "must be a path",
        "bool_type": "must be true or false",
        "bool_parsing": "must be true or false",
        "literal_error": "must be {expected}",
    }
    if kind in ("string_too_short", "too_short") and limits["min_length"] == 1:
        return "must not be empty"
    if kind in _LISTS:
        return "must be a list"
    if kind in _MAPPINGS:
        few = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
        return f"must be a mapping of {few}" if keys else "must be a mapping"
    if kind in number:
        return number[kind].format(**limits)
    return str(problem["msg"]).removeprefix("Value error, ")


def _fields_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Names of the fields of the model at a location."""
    found = _model_at(model, location)
    return [] if found is None else list(found.model_fields)


def _model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel] | None:
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = None if field is None else model_in(field.annotation)
        if inner is None:
            return None
        model = inner
    return model


def _literals_at(model: type[BaseModel], location: Sequence[str | int]) -> list[Any]:
    """The allowed values of a field that is a pure choice."""
    field = _field_at(model, location)
    if field is None or model_in(field.annotation) is not None:
        return []
    return choices_in(field.annotation)


def _field_at(model: type[BaseModel], location: Sequence[str | int]) -> FieldInfo | None:
    names = [part for part in location if isinstance(part, str)]
    found = _model_at(model, names[:-1]) if names else None
    return None if found is None else found.model_fields.get(names[-1])


def choices_in(annotation: Any) -> list[Any]:
    """The values of the Literals in an annotation, in order."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in choices_in(part)]
