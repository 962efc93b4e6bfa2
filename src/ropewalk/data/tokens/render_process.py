"""The process that renders chat templates for :mod:`ropewalk.data.tokens.render`; run as a file of its own.

It imports nothing of ropewalk, so that it starts wherever the parent found the package. Requests and answers are lines
of JSON. Templates are rendered as transformers does, which ``apply_chat_template`` there defines: its extensions of
Jinja, its filters and functions, and what it does to messages.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, BinaryIO

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_GROWTH = 64
_LONG = 10**7
_FILE = "<template>"
"""Name that Jinja gives to a template without a file in a traceback."""


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Render what is asked for, line by line, until there is no more."""
    for line in requests:
        template, variables, messages, stops, tools, seconds, characters, memory = json.loads(line)
        _limit_memory(memory + _GROWTH * len(line))
        texts: list[str] = []
        left = characters + _GROWTH * len(line)
        answer: dict[str, Any] = {"texts": texts}
        for stop, prompt in stops:
            # When it expires, the signal ends this process, whatever it is doing.
            signal.setitimer(signal.ITIMER_PROF, seconds * (1 + len(line) / _LONG))
            try:
                texts.append(_rendered(template, variables, messages[:stop], tools, prompt))
                left -= len(texts[-1])
                fault = f"it writes more than {characters} characters" if left < 0 else None
            except MemoryError:
                fault = f"it takes more than {memory >> 20} MiB of memory"
            except (
                TemplateError,
                ArithmeticError,
                AssertionError,
                AttributeError,
                LookupError,
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:
                fault = _fault(error)
            if fault is not None:
                answer = {"fault": fault}
                break
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _limit_memory(most: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _rendered(template: str, variables: dict[str, Any], messages: list[Any], tools: Any, prompt: bool) -> str:
    if not messages:
        raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    return _compiled(template).render(
        messages=[_message(each) for each in messages],
        tools=tools,
        documents=None,
        add_generation_prompt=prompt,
        **variables,
    )


_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which messages have thoughts; templates read the first, and that of gpt-oss the second."""


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message without keys that are null, and with its thoughts under each key that a template reads."""
    found = {key: value for key, value in message.items() if value is not None}
    thoughts = next((found[key] for key in _THOUGHTS if key in found), None)
    return found if thoughts is None else {"thinking": thoughts, **found, "reasoning_content": thoughts}


class _Generation(Extension):
    """``{% generation %}``, which marks the assistant's text, and here only writes it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return caller()


class _Namespace(Namespace):
    """Jinja's namespace without names that lead to Python's internals."""

    def __init__(*arguments: Any, **named: Any) -> None:
        # Jinja's own signature: a template may have a variable `self`.
        self, given = arguments[0], dict(*arguments[1:], **named)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace may not have the attribute {name!r}, whose name begins with an underscore"
        )


class _Dict:
    """``dict`` without the attributes of a class."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    found.filters["tojson"] = _to_json
    found.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return found


@lru_cache
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _fault(error: Exception) -> str:
    """The first line of an error's message, after the line of the template that caused it."""
    line = error.lineno if isinstance(error, TemplateSyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _FILE:
            line = trace.tb_lineno
        elif isinstance(node := trace.tb_frame.f_locals.get("node"), Node):
            # Jinja computes constants while it compiles a template.
            line = node.lineno
        trace = trace.tb_next
    # For a number of thousands of digits, Python adds advice on its own settings.
    said = (str(error).partition("; use sys.")[0].strip().splitlines() or [type(error).__name__])[0]
    return said if line is None else f"line {line}: {said}"


if __name__ == "__main__":
    # Ctrl-C signals every process of a command; only the parent handles it, and this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as answers:
        # What a library prints must not come between the answers.
        os.dup2(2, 1)
        serve(sys.stdin.buffer, answers)
