"""Turn a plain function into a command: its parameters and the fields of its settings models become options.

A command is a function whose parameters are positional arguments, settings models, and keyword-only options::

    def evaluate(
        model: Annotated[str, Field(description="A checkpoint's folder.")],
        settings: Settings,
        *,
        output: OutputSettings,
        json: JsonFlag = False,
    ) -> None:
        '''Measure a checkpoint.'''

A model's field becomes a positional argument if its annotation contains ``Option(argument=True)``.

cyclopts parses the command line and prints the help. It passes all text to pydantic unchanged, so each value is
validated once, where its setting is declared.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
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
from cyclopts.help import DefaultFormatter, HelpPanel
from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo
from rich.console import Console, ConsoleOptions
from rich.padding import Padding

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import (
    COMMON,
    Option,
    Settings,
    choices_in,
    explain,
    leaves,
    model_in,
    near_or_all,
    option_of,
)

UsageErrors = cyclopts.CycloptsError
"""Exceptions that cyclopts raises for a command line that fits no command."""

HELP_ALL = "--help-all"
HELP_FLAGS = ("--help", "-h", HELP_ALL)
ARGUMENTS, OPTIONS = "Arguments", "Options"
REPEATED = " May be repeated."
"""What the help says of an option of which each value counts."""
A_SLIP = 10**9
"""Bounds from this value on only catch typing errors, so the help does not show them."""
MANY = 30
"""Options from which a help has two forms: ``--help`` only names the options that are not common ones."""
METAVARS = {int: "INTEGER", float: "NUMBER", Path: "PATH", str: "TEXT"}


_WHOLE: ContextVar[bool] = ContextVar("whole", default=False)


@contextmanager
def whole_help(asked: bool) -> Iterator[None]:
    """Describe all options in the help of a command with many, if ``asked``."""
    token = _WHOLE.set(asked)
    try:
        yield
    finally:
        _WHOLE.reset(token)


class _Named:
    """Prints a heading of the help with only the names of its options, unless the whole help is asked for."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if _WHOLE.get():
            DefaultFormatter()(console, options, panel)
            return
        names = ", ".join(each.positive_names[0] for each in panel.entries)
        console.print(Padding(f"{panel.title}: {names}", (0, 0, 0, 1), expand=False))


class UsageError(RopewalkError):
    """A value that a setting does not accept; every process of a run detects it independently."""


@dataclass(frozen=True)
class Setting:
    """One argument or option of a command.

    Attributes:
        path: names of the fields that lead to it from the command's own parameters.
        name: option as typed (``--short-context``), or name of a positional argument (``MODEL``).
        field: its declaration.
        group: its heading in the help.
        positional: whether it is a positional argument.
        several: whether the positional argument takes all remaining words.
        required: whether the command needs a value for it.
        former: whether the name is an earlier one, which is accepted but not shown.
    """

    path: tuple[str, ...]
    name: str
    field: FieldInfo
    group: str
    positional: bool = False
    several: bool = False
    required: bool = False
    former: bool = False

    @property
    def key(self) -> str:
        """Name of its parameter in the function that cyclopts calls; help and messages show it for an argument."""
        if self.former:
            return self.name.removeprefix("--").replace("-", "_")
        return self.path[-1] if self.positional else "_".join(self.path)

    @property
    def option(self) -> Option:
        """Its appearance on the command line."""
        return option_of(self.field)

    @property
    def is_flag(self) -> bool:
        """Whether it is a flag, which takes no value."""
        return _is_bool(self.field.annotation)


def _is_bool(annotation: Any) -> bool:
    return annotation is bool or bool in typing.get_args(annotation)


def make_command(function: Callable[..., None], name: str, example: str) -> App:
    """Create a command of the program.

    Args:
        function: what the command runs; see the module. The first paragraph of its docstring is the command's help, the
            others come at the end of the help.
        name: name of the command.
        example: last line of the help; begins with the whole command.

    Returns:
        The command, which can be passed to :func:`make_group`.
    """
    summary, _ = _paragraphs(function)
    # cyclopts would call an argument that may be left out ARGS.
    arguments = [each for each in settings_of(function) if each.positional]
    words = [each.name if each.required else f"[{each.name}]" for each in arguments]
    # The example has the name of the command's group, which the command itself does not know.
    group = example.partition(f" {name}")[0].removeprefix("ropewalk").split()
    usage = None if all(each.required for each in arguments) else _usage(" ".join([*group, name]), words)
    app = App(name=name, help=summary, usage=usage, **_looks(example, function))
    app.default(bound(function))
    return app


def make_group(name: str, help: str, commands: Sequence[App]) -> App:
    """Create a group of commands; its help lists them in the given order."""
    group = App(name=name, help=help, **_looks())
    for place, command in enumerate(commands):
        command.sort_key = place
        group.command(command)
    return group


def make_group_with_default(
    name: str, help: str, function: Callable[..., None], own_name: str, example: str
) -> App:
    """Create a group with a default command: ``ropewalk eval MODEL`` beside ``ropewalk eval compare``.

    Args:
        name, help, example: those of the group.
        function: the default command; the group's help shows its options.
        own_name: hidden name of the default command, for an argument that is spelled like another command.
    """
    words = [setting.name for setting in settings_of(function) if setting.positional]
    app = App(name=name, help=help, usage=_usage(name, words), **_looks(example, function))
    app.default(bound(function))
    app.command(App(name=own_name, default_command=bound(function), show=False, **_looks(example, function)))
    return app


def _usage(name: str, arguments: Sequence[str]) -> str:
    return " ".join(["Usage: ropewalk", name, "[OPTIONS]", *arguments])


def _paragraphs(function: Callable[..., None]) -> tuple[str, str]:
    """The first paragraph of a function's docstring, and the remaining ones, each as one line."""
    # The terminal's width breaks the lines; the source's line ends would break them a second time.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    summary, *more = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return summary, "\n\n".join(more)


def _looks(example: str = "", function: Callable[..., None] | None = None) -> dict[str, Any]:
    more = "" if function is None else _paragraphs(function)[1]
    last = f"Example: {example}" if example else ""
    if function is not None and _has_many(tuple(settings_of(function))):
        more = "\n\n".join(filter(None, [f"{HELP_ALL} describes all options.", more]))
    return {
        "help_flags": HELP_FLAGS,
        "version_flags": (),
        "help_format": "plaintext",
        "help_epilogue": "\n\n".join(part for part in (more, last) if part) or None,
    }


def bound(function: Callable[..., None]) -> Callable[..., None]:
    """The function as cyclopts calls it: with one text parameter for each setting."""
    own = _own_parameters(function)
    ordered = tuple(settings_of(function))
    named = dict.fromkeys(setting.group for setting in ordered if not setting.positional)
    # The options that most people need come first; what belongs to no heading comes last.
    headings = sorted(named, key=lambda name: (name == OPTIONS, name != COMMON.group))
    # Required settings come first in the help, the others in order of declaration.
    settings = tuple(sorted(ordered, key=lambda setting: (not setting.positional, not setting.required)))
    # Former names are options of their own that no help shows, and set the same value.
    former = tuple(
        replace(each, name=name, required=False, former=True)
        for each in settings
        for name in each.option.formerly
    )
    by_name = {setting.key: setting for setting in (*settings, *former)}

    positional = [setting.key for setting in settings if setting.positional and not setting.several]
    several = next((setting.key for setting in settings if setting.several), None)

    def call(*words: str, **given: Any) -> None:
        values: dict[str, Any] = {}
        # A call that lacks optional arguments has fewer words than names, one with `several` may have more.
        given |= zip(positional, words, strict=False)
        if several is not None:
            given[several] = words[len(positional) :]
        for name, value in given.items():
            setting = by_name[name]
            # cyclopts collects every option as a list, so that a repeated one is no error; the last value wins.
            if isinstance(value, list) and not setting.option.repeated:
                value = value[-1] if value else None
            # A flag at its default counts as not given: checks between options look at what was typed.
            if value is not None and not (setting.is_flag and value == setting.field.default):
                _put(values, setting.path, value)
        arguments = dict(_validated(own, values, settings))
        function(**arguments)

    shortened = _Named() if _has_many(ordered) else None
    groups = {
        name: Group(name, sort_key=place, help_formatter=None if name == COMMON.group else shortened)
        for place, name in enumerate(headings)
    }
    parameters = [_parameter(setting, groups.get(setting.group)) for setting in (*settings, *former)]
    # cyclopts reads options from the signature.
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__doc__ = function.__doc__
    call.__name__ = function.__name__
    return call


def _has_many(settings: Sequence[Setting]) -> bool:
    return sum(not setting.positional for setting in settings) >= MANY


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
    values[path[-1]] = value


def _own_parameters(function: Callable[..., None]) -> type[BaseModel]:
    """The function's parameters as one settings model, whose fields may be models themselves."""
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        model = model_in(hints[name])
        default = parameter.default
        if default is parameter.empty:
            needed = model is None or any(field.is_required() for field in model.model_fields.values())
            # A model of which every field has a default may be left out as a whole.
            default = ... if needed else model()  # type: ignore[misc]
        fields[name] = (hints[name], default)
    # Derived from Settings, so that options are checked as strictly as the keys of a recipe.
    return create_model(function.__name__, __base__=Settings, **fields)


def settings_of(function: Callable[..., None]) -> Iterator[Setting]:
    """All arguments and options of a command; options with the heading of a model are listed with that model's."""
    own = _own_parameters(function)
    for name, parameter in inspect.signature(function).parameters.items():
        field = own.model_fields[name]
        model = model_in(field.annotation)
        if model is not None:
            # A model that may be None makes its required fields optional; _check_groups asks for them once one is
            # given.
            yield from _fields(model, (name,), OPTIONS, field.default is None)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            yield _setting(field, (name,), OPTIONS, field.is_required())
        else:
            yield _argument(field, (name,), field.is_required())


def _fields(model: type[BaseModel], path: tuple[str, ...], group: str, optional: bool) -> Iterator[Setting]:
    group = getattr(model, "group", None) or group
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        option = option_of(field)
        if option.hidden:
            continue
        if option.argument:
            # pydantic gives PydanticUndefined, not None, for a field without a default.
            yield _argument(field, (*path, name), field.get_default() is not None)
        elif inner is not None:
            yield from _fields(inner, (*path, name), group, optional or field.default is None)
        else:
            yield _setting(field, (*path, name), group, field.is_required() and not optional)


def _argument(field: FieldInfo, path: tuple[str, ...], required: bool) -> Setting:
    several = typing.get_origin(field.annotation) is tuple
    return Setting(path, path[-1].upper(), field, ARGUMENTS, True, several, required)


def _setting(field: FieldInfo, path: tuple[str, ...], group: str, required: bool) -> Setting:
    option = option_of(field)
    name = option.name or f"--{path[-1].replace('_', '-')}"
    return Setting(path, name, field, option.group or group, required=required)


def _parameter(setting: Setting, group: Group | None) -> inspect.Parameter:
    """One parameter of the function that cyclopts calls; it is None if no value was given."""
    name, field = setting.key, setting.field
    # Arguments belong to cyclopts' own heading, which Parameter selects if no group is passed, but not if it is None.
    grouped: dict[str, Any] = {} if group is None else {"group": group}
    shown = Parameter(
        **grouped,
        name=None if setting.positional else setting.name,
        help=(field.description or "") + (REPEATED if setting.option.repeated else "") + _bounds(field),
        negative=_negative(setting),
        metavar=_metavar(setting),
        # A setting with a placeholder of its own accepts other spellings than its choices.
        choices=None if setting.option.metavar else _choices(field.annotation),
        show=not setting.former,
        show_default=False if setting.required else _default(setting) or False,
        required=setting.required,
    )
    # Python does not allow a default for a parameter such as *words.
    default: Any = inspect.Parameter.empty if setting.required or setting.several else None
    kind = (
        inspect._ParameterKind.POSITIONAL_ONLY if setting.positional else inspect._ParameterKind.KEYWORD_ONLY
    )
    if setting.several:
        kind = inspect._ParameterKind.VAR_POSITIONAL
    # If an option is repeated, the last value wins, as in other tools: scripts append options to a command.
    accepts: Any = bool if setting.is_flag else str if setting.positional else list[str]
    if setting.is_flag and not setting.required:
        default = setting.field.default
    if default is None:
        accepts = accepts | None
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[accepts, shown])


def _choices(annotation: Any) -> list[str] | None:
    """The values of a choice; None for a comma-separated list of choices, which pydantic splits itself."""
    several = any(typing.get_origin(part) is tuple for part in (annotation, *typing.get_args(annotation)))
    return None if several else [str(each) for each in choices_in(annotation)] or None


def _negative(setting: Setting) -> tuple[str, ...]:
    """Names such as ``--no-racing``, for flags whose default is on or undecided."""
    if setting.is_flag and setting.field.default is not False:
        return (f"--no-{setting.name.removeprefix('--')}",)
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
    types = [kind for kind in METAVARS if kind in leaves(setting.field.annotation)]
    return METAVARS[types[0]] if types else "TEXT"


def _default(setting: Setting) -> str | None:
    """The default as a person would type it; None if there is none to show."""
    default = setting.field.default
    if setting.field.is_required() or default is None or default is False or default == () or default == {}:
        return None
    if default is True:
        return setting.name.removeprefix("--")
    if setting.option.text:
        return setting.option.text(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _bounds(field: FieldInfo) -> str:
    """The bounds of a number, as shown in the help."""
    # pydantic keeps the bounds of a Field as annotated_types.Ge and Le among its metadata.
    least = next((each.ge for each in field.metadata if hasattr(each, "ge")), None)
    most = next((each.le for each in field.metadata if hasattr(each, "le")), None)
    if least is not None and most is not None:
        return f" [{least:g} to {most:g}]" if most < A_SLIP else f" [{least:g} or more]"
    return "" if least is None else f" [{least:g} or more]"


def _validated(
    own: type[BaseModel], values: Mapping[str, Any], settings: Sequence[Setting]
) -> Iterator[tuple[str, Any]]:
    """Validate the values and return the function's arguments.

    Raises:
        UsageError: names the option, its value, and what it accepts.
    """
    names = {setting.path: setting.name for setting in settings}

    def spelled(location: Sequence[str | int]) -> str:
        words = tuple(part for part in location if isinstance(part, str))
        # The longest prefix that is an option: the rest is a key within its value.
        return next((names[words[:n]] for n in range(len(words), 0, -1) if words[:n] in names), "")

    _check_groups(own, values, settings)
    try:
        filled = own.model_validate(values)
    except ValidationError as error:
        raise UsageError(explain(error, own, spelled)) from error
    for name in own.model_fields:
        yield name, getattr(filled, name)


def _check_groups(
    own: type[BaseModel], values: Mapping[str, Any], settings: Sequence[Setting], path: tuple[str, ...] = ()
) -> None:
    """Raise for an option that needs another option of its model: ``--server-model`` without ``--server``."""
    for name, field in own.model_fields.items():
        given, model, here = values.get(name), model_in(field.annotation), (*path, name)
        if model is None or not given:
            continue
        # In any other model pydantic itself reports the missing field.
        if field.default is not None:
            _check_groups(model, given, settings, here)
            continue
        own_settings = [setting for setting in settings if setting.path[: len(here)] == here]
        missing = [each for each in own_settings if each.field.is_required() and each.path[-1] not in given]
        if missing:
            first = next(each for each in own_settings if each.path[-1] in given)
            value = given[first.path[-1]]
            shown = "" if first.is_flag else f" {value[0] if isinstance(value, list) else value}"
            raise UsageError(f"{first.name}{shown} needs {missing[0].name} {_metavar(missing[0])}")


def _shown(arguments: Iterable[Any]) -> list[str]:
    """Names that help and suggestions show: all except former ones."""
    return [name for argument in arguments if argument.show for name in argument.names]


def usage_sentence(error: cyclopts.CycloptsError) -> str:
    """One sentence on a command line that fits no command: what is wrong, and the closest match."""
    unused = (error.unused_tokens or [""])[0]
    # A missing option may be present but misspelled.
    unknown = next((each for each in error.unused_tokens or () if each.startswith("--")), None)
    match error:
        case UnknownOptionError() if _resumes_by_itself(error):
            return "there is no option --resume; run the same command again without it, which resumes"
        case UnknownOptionError():
            return _unknown_option(
                error.token.keyword or error.token.value, _shown(error.argument_collection)
            )
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
            return _unknown_option(unknown, _shown(error.app.assemble_argument_collection()))
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
            return f"unexpected argument {unused!r}{_repeat(error, unused)}"
    return " ".join(str(error).split())


def _resumes_by_itself(error: UnknownOptionError) -> bool:
    """Whether --resume was given to a command whose help says that the same command resumes."""
    typed = error.token.keyword or error.token.value
    helps = (str(each.parameter.help) for each in error.argument_collection)
    return typed == "--resume" and any("same command again" in each for each in helps)


def _repeat(error: cyclopts.CycloptsError, unused: str) -> str:
    """What is said of a second value after an option that takes several: ``--documents books code``."""
    before = (error.root_input_tokens or [])[: (error.root_input_tokens or [unused]).index(unused)]
    option = next((token for token in reversed(before) if token.startswith("--")), None)
    if error.app is None or option is None:
        return ""
    known = [each for each in error.app.assemble_argument_collection() if option in each.names]
    several = any(REPEATED in str(each.parameter.help) for each in known)
    return f"; write {option} before each of its values" if several else ""


def _unknown_option(typed: str, known: Sequence[str]) -> str:
    option = typed.partition("=")[0]
    near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
    return f"unknown option {option}" + (f"; did you mean {near[0]}?" if near else "")
