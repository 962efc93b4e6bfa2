"""From a plain function to a command: its parameters, and the fields of its settings models, become options.

A command is a function whose parameters are positional arguments, settings models, and keyword-only options::

    def evaluate(
        model: Annotated[str, Field(description="A checkpoint's folder.")],
        settings: Settings,
        *,
        output: OutputSettings,
        json: JsonFlag = False,
    ) -> None:
        '''Measure a checkpoint.'''

A model's field is a positional argument where its annotation says so: ``Option(argument=True)``.

cyclopts takes the command line apart and prints the help. All text goes to pydantic as it was typed, so each value is
checked once, where its setting is declared.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from cyclopts import App, Group, Parameter
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import Option, Settings, choices_in, explain, model_in, near_or_all

UsageErrors = cyclopts.CycloptsError
"""What cyclopts raises for a command line that does not fit the commands."""

HELP_FLAGS = ("--help", "-h")
ARGUMENTS, OPTIONS = "Arguments", "Options"
A_SLIP = 10**9
"""Bounds from here on keep slips of the pen out; the help does not name them."""
METAVARS = {int: "INTEGER", float: "NUMBER", Path: "PATH", str: "TEXT"}


class UsageError(RopewalkError):
    """A value that a setting does not take; every process of a run finds it by itself."""


@dataclass(frozen=True)
class Setting:
    """One argument or option of a command.

    Attributes:
        path: fields that lead to it from the command's own parameters.
        name: option as typed (``--short-context``), or name of a positional argument (``MODEL``).
        field: its declaration.
        group: its heading in the help.
        positional: whether it is an argument without a name.
        several: whether the argument takes all that is left.
        required: whether the command cannot do without it.
    """

    path: tuple[str, ...]
    name: str
    field: FieldInfo
    group: str
    positional: bool = False
    several: bool = False
    required: bool = False

    @property
    def key(self) -> str:
        """Its parameter in the function that cyclopts calls; the help and the messages show an argument's."""
        return self.path[-1] if self.positional else "_".join(self.path)

    @property
    def option(self) -> Option:
        """How it stands on the command line: what its annotations say, the outermost first."""
        said = list(_options_in(self.field))
        return Option(
            metavar=next((each.metavar for each in said if each.metavar), None),
            text=next((each.text for each in said if each.text), None),
            repeated=any(each.repeated for each in said),
            formerly=tuple(name for each in said for name in each.formerly),
        )

    @property
    def is_flag(self) -> bool:
        """Whether it is given without a value."""
        return _is_bool(self.field.annotation)


def _options_in(field: FieldInfo) -> Iterator[Option]:
    # Of what one annotation says the last word holds: it was put around the others.
    yield from (each for each in reversed(field.metadata) if isinstance(each, Option))
    yield from _options_of(field.annotation)


def _options_of(annotation: Any) -> Iterator[Option]:
    if typing.get_origin(annotation) is Annotated:
        yield from (each for each in reversed(annotation.__metadata__) if isinstance(each, Option))
    for part in typing.get_args(annotation):
        yield from _options_of(part)


def _is_bool(annotation: Any) -> bool:
    return annotation is bool or bool in typing.get_args(annotation)


def make_command(function: Callable[..., None], name: str, example: str) -> App:
    """A command of the program.

    Args:
        function: what it does; see the module. The first paragraph of its docstring is the command's help, the others
            stand at the end.
        name: of the command.
        example: last line of its help.

    Returns:
        The command; :func:`make_group` takes several.
    """
    summary, _ = _paragraphs(function)
    app = App(name=name, help=summary, **_looks(example, function))
    app.default(bound(function))
    return app


def make_group(name: str, help: str, commands: Sequence[App]) -> App:
    """A group of commands, which its help lists in the given order."""
    group = App(name=name, help=help, **_looks())
    for place, command in enumerate(commands):
        command.sort_key = place
        group.command(command)
    return group


def make_group_with_default(
    name: str, help: str, function: Callable[..., None], own_name: str, example: str
) -> App:
    """A group with a command that runs where none is named: ``ropewalk eval MODEL`` beside ``ropewalk eval compare``.

    Args:
        name, help, example: of the group.
        function: the command; its options stand in the group's help.
        own_name: the command's hidden name, for an argument that is called as another command.
    """
    words = [setting.name for setting in settings_of(function) if setting.positional]
    usage = " ".join(["Usage: ropewalk", name, "[OPTIONS]", *words])
    app = App(name=name, help=help, usage=usage, **_looks(example, function))
    app.default(bound(function))
    app.command(App(name=own_name, default_command=bound(function), show=False, **_looks(example, function)))
    return app


def _paragraphs(function: Callable[..., None]) -> tuple[str, str]:
    """The first paragraph of a function's docstring, and the others."""
    summary, _, more = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
    return summary, more


def _looks(example: str = "", function: Callable[..., None] | None = None) -> dict[str, Any]:
    more = "" if function is None else _paragraphs(function)[1]
    last = f"Example: {example}" if example else ""
    return {
        "help_flags": HELP_FLAGS,
        "version_flags": (),
        "help_format": "plaintext",
        "help_epilogue": "\n\n".join(part for part in (more, last) if part) or None,
    }


def bound(function: Callable[..., None]) -> Callable[..., None]:
    """The function as cyclopts calls it: one text parameter for each setting."""
    own = _own_parameters(function)
    ordered = tuple(settings_of(function))
    headings = dict.fromkeys(setting.group for setting in ordered if not setting.positional)
    # What the command cannot do without comes first, the rest as it is declared.
    settings = tuple(sorted(ordered, key=lambda setting: (not setting.positional, not setting.required)))
    by_name = {setting.key: setting for setting in settings}

    positional = [setting.key for setting in settings if setting.positional and not setting.several]
    several = next((setting.key for setting in settings if setting.several), None)

    def call(*words: str, **given: Any) -> None:
        values: dict[str, Any] = {}
        given |= zip(positional, words, strict=False)
        if several is not None:
            given[several] = words[len(positional) :]
        for name, value in given.items():
            setting = by_name[name]
            if isinstance(value, list) and not setting.option.repeated:
                value = value[-1] if value else None
            if value is not None and not (setting.is_flag and value == setting.field.default):
                _put(values, setting.path, value)
        arguments = dict(_validated(own, values, settings))
        function(**arguments)

    last_of_all = len(headings)
    groups = {
        name: Group(name, sort_key=last_of_all if name == OPTIONS else place)
        for place, name in enumerate(headings)
    }
    parameters = [_parameter(setting, groups.get(setting.group)) for setting in settings]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__doc__ = function.__doc__
    call.__name__ = function.__name__
    return call


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values[path[-1]] = value


def _own_parameters(function: Callable[..., None]) -> type[BaseModel]:
    """The function's parameters as one settings model, whose fields may be models."""
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        model = model_in(hints[name])
        default = parameter.default
        if default is parameter.empty:
            needed = model is None or any(field.is_required() for field in model.model_fields.values())
            default = ... if needed else model()  # type: ignore[misc]
        fields[name] = (hints[name], default)
    return create_model(function.__name__, __base__=Settings, **fields)


def settings_of(function: Callable[..., None]) -> Iterator[Setting]:
    """All arguments and options of a command; those under headings of models stand with the models' own."""
    own = _own_parameters(function)
    for name, parameter in inspect.signature(function).parameters.items():
        field = own.model_fields[name]
        model = model_in(field.annotation)
        if model is not None:
            yield from _fields(model, (name,), OPTIONS, field.default is None)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            yield _setting(field, (name,), OPTIONS, field.is_required())
        else:
            several = typing.get_origin(field.annotation) is tuple
            needed = field.is_required()
            yield Setting((name,), name.upper(), field, ARGUMENTS, True, several, needed)


def _fields(model: type[BaseModel], path: tuple[str, ...], group: str, optional: bool) -> Iterator[Setting]:
    group = getattr(model, "group", None) or group
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        said = list(_options_in(field))
        if any(each.hidden for each in said):
            continue
        if any(each.argument for each in said):
            yield Setting(
                (*path, name), name.upper(), field, ARGUMENTS, True, required=field.get_default() is not None
            )
        elif inner is not None:
            yield from _fields(inner, (*path, name), group, optional or field.default is None)
        else:
            yield _setting(field, (*path, name), group, field.is_required() and not optional)


def _setting(field: FieldInfo, path: tuple[str, ...], group: str, required: bool) -> Setting:
    said = list(_options_in(field))
    name = next((each.name for each in said if each.name), None) or f"--{path[-1].replace('_', '-')}"
    group = next((each.group for each in said if each.group), None) or group
    return Setting(path, name, field, group, required=required)


def _parameter(setting: Setting, group: Group | None) -> inspect.Parameter:
    """One parameter of the function that cyclopts calls; a value that was not given is None."""
    name, field = setting.key, setting.field
    # Arguments stand under cyclopts' own heading, which Parameter takes for no group but not for None.
    grouped: dict[str, Any] = {} if group is None else {"group": group}
    shown = Parameter(
        **grouped,
        name=None if setting.positional else (setting.name, *setting.option.formerly),
        help=(field.description or "") + _bounds(field),
        negative=_negative(setting),
        metavar=_metavar(setting),
        choices=_choices(field.annotation),
        show_default=False if setting.required else _default(setting) or False,
        required=setting.required,
    )
    default: Any = inspect.Parameter.empty if setting.required or setting.several else None
    kind = (
        inspect._ParameterKind.POSITIONAL_ONLY if setting.positional else inspect._ParameterKind.KEYWORD_ONLY
    )
    if setting.several:
        kind = inspect._ParameterKind.VAR_POSITIONAL
    # Of an option that is given again the last value holds, as everywhere: scripts append to a command.
    accepts: Any = bool if setting.is_flag else str if setting.positional else list[str]
    if setting.is_flag and not setting.required:
        default = setting.field.default
    if default is None:
        accepts = accepts | None
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[accepts, shown])


def _choices(annotation: Any) -> list[str] | None:
    """The values to choose one from; a list with commas is several of them, which pydantic takes apart."""
    several = any(typing.get_origin(part) is tuple for part in (annotation, *typing.get_args(annotation)))
    return None if several else [str(each) for each in choices_in(annotation)] or None


def _negative(setting: Setting) -> tuple[str, ...]:
    """``--no-racing``, for flags that are on, or neither on nor off, if not given."""
    if setting.is_flag and setting.field.default is not False:
        names = (setting.name, *setting.option.formerly)
        return tuple(f"--no-{name.removeprefix('--')}" for name in names)
    return ()


def _metavar(setting: Setting) -> str | None:
    if setting.positional:
        return setting.name
    if setting.is_flag:
        return None
    if setting.option.metavar:
        return setting.option.metavar
    if choices_in(setting.field.annotation):
        return "NAME"
    types = [kind for kind in METAVARS if kind in _leaves(setting.field.annotation)]
    return METAVARS[types[0]] if types else "TEXT"


def _leaves(annotation: Any) -> Iterator[Any]:
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is Annotated:
        parts = parts[:1]
    if not parts:
        yield annotation
    for part in parts:
        yield from _leaves(part)


def _default(setting: Setting) -> str | None:
    """The default as a person would type it; None where there is nothing to say."""
    default = setting.field.default
    if setting.field.is_required() or default is None or default is False or default == () or default == {}:
        return None
    if default is True:
        return setting.name.removeprefix("--")
    if setting.option.text:
        return setting.option.text(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _bounds(field: FieldInfo) -> str:
    """The bounds of a number, for the help."""
    least = next((each.ge for each in field.metadata if hasattr(each, "ge")), None)
    most = next((each.le for each in field.metadata if hasattr(each, "le")), None)
    if least is not None and most is not None:
        return f" [{least:g} to {most:g}]" if most < A_SLIP else f" [{least:g} or more]"
    return "" if least is None else f" [{least:g} or more]"


def _validated(
    own: type[BaseModel], values: Mapping[str, Any], settings: Sequence[Setting]
) -> Iterator[tuple[str, Any]]:
    """The function's arguments.

    Raises:
        UsageError: naming the option, its value, and what it takes.
    """
    names = {setting.path: setting.name for setting in settings}

    def spelled(location: Sequence[str | int]) -> str:
        words = tuple(part for part in location if isinstance(part, str))
        # The longest beginning that is an option: what follows is a key within its value.
        return next((names[words[:n]] for n in range(len(words), 0, -1) if words[:n] in names), "")

    _check_groups(own, values, settings)
    try:
        filled = own.model_validate(values)
    except ValidationError as error:
        raise UsageError(explain(error, own, spelled)) from error
    for name in own.model_fields:
        yield name, getattr(filled, name)


def _check_groups(own: type[BaseModel], values: Mapping[str, Any], settings: Sequence[Setting]) -> None:
    """Raise for an option of a model that another of its options is needed for: ``--server-model`` without
    ``--server``.
    """
    for name, field in own.model_fields.items():
        given = values.get(name)
        if field.default is not None or model_in(field.annotation) is None or not given:
            continue
        own_settings = [setting for setting in settings if setting.path[0] == name]
        missing = [each for each in own_settings if each.field.is_required() and each.path[-1] not in given]
        if missing:
            first = next(each for each in own_settings if each.path[-1] in given)
            value = given[first.path[-1]]
            shown = "" if first.is_flag else f" {value[0] if isinstance(value, list) else value}"
            raise UsageError(f"{first.name}{shown} needs {missing[0].name} {_metavar(missing[0])}")


def usage_sentence(error: cyclopts.CycloptsError) -> str:
    """One sentence on a command line that fits no command: what is wrong, and the nearest that there is."""
    unused = (error.unused_tokens or [""])[0]
    # An option that is missing may stand there misspelled.
    unknown = next((each for each in error.unused_tokens or () if each.startswith("--")), None)
    match error:
        case UnknownOptionError():
            known = [name for argument in error.argument_collection for name in argument.names]
            return _unknown_option(error.token.keyword or error.token.value, known)
        case CoercionError() if error.argument is not None and error.argument.parameter.choices:
            value = error.token.value if error.token is not None else ""
            return f"unknown {error.argument.name} {value!r}; {near_or_all(value, error.argument.get_choices() or ())}"
        case UnknownCommandError() if unused.startswith("-"):
            return _unknown_option(unused, [name for name in error.app or () if name.startswith("-")])
        case UnknownCommandError():
            commands = [name for name in error.app or () if not name.startswith("-")]
            return f"unknown command {unused!r}; {near_or_all(unused, commands)}"
        case RepeatArgumentError():
            return f"{error.token.keyword} is given twice"
        case MissingArgumentError() if (
            unknown is not None and error.keyword is None and error.app is not None
        ):
            arguments = error.app.assemble_argument_collection()
            return _unknown_option(unknown, [name for argument in arguments for name in argument.names])
        case MissingArgumentError() if error.argument is not None:
            keyword = error.keyword or next(
                (each.keyword for each in error.argument.tokens if each.keyword), None
            )
            if keyword is not None:
                return f"{keyword} needs a value"
            option = error.argument.name.startswith("-")
            name = error.argument.name if option else error.argument.parameter.metavar or error.argument.name
            return f"missing {'option' if option else 'argument'} {name}"
        case UnusedCliTokensError():
            return f"unexpected argument {unused!r}"
    return " ".join(str(error).split())


def _unknown_option(typed: str, known: Sequence[str]) -> str:
    option = typed.partition("=")[0]
    near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
    return f"unknown option {option}; " + (
        f"did you mean {near[0]}?" if near else "--help lists those there are"
    )
