"""The process that renders chat templates for :mod:`ropewalk.data.tokens.render`; run as a file of its own.

It imports nothing of ropewalk, so that it starts wherever the parent found the package. Requests and answers are lines
of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from functools import cache
from typing import Any, BinaryIO

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.nodes import Node

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
    text: str = _renderer().apply_chat_template(
        messages,
        tools=tools,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=prompt,
        **variables,
    )
    return text


@cache
def _renderer() -> Any:
    """A tokenizer without a vocabulary, for transformers' rendering of templates alone."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))


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
        _renderer()
        serve(sys.stdin.buffer, answers)
