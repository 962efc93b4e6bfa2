"""Chat templates in a process of their own: the texts of transformers, and one sentence for all that goes wrong."""

import os
import re
import threading
import time

import pytest
from jinja2 import TemplateError

from ropewalk.data.tokens import render as module
from ropewalk.data.tokens.render import render
from ropewalk.errors import RopewalkError
from tests.data.tiny_tokenizer import make_tokenizer
from tests.versions import needs_transformers

TALK = [{"role": "user", "content": "Grüße 🙂 \ufdd0"}, {"role": "assistant", "content": "</s>"}]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def rendered(template: str, **variables) -> str:
    (text,) = render(template, variables, TALK, [(2, True)])
    return text


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    # So many that no other limit is reached after it, however slow the machine.
    monkeypatch.setattr(module, "SECONDS", 60)
    monkeypatch.setattr(module, "CHARACTERS", 1 << 16)
    monkeypatch.setattr(module, "MEMORY", 1 << 29)


def test_texts_are_those_of_transformers():
    tools = [{"type": "function", "function": {"name": "knot", "parameters": {"default": None}}}]
    theirs = [
        make_tokenizer().apply_chat_template(
            TALK[:stop], tools=tools, chat_template=TEMPLATE, add_generation_prompt=prompt, tokenize=False
        )
        for stop, prompt in ((2, False), (1, True), (2, True))
    ]
    assert render(TEMPLATE, {"bos_token": "<s>"}, TALK, [(2, False), (1, True), (2, True)], tools) == theirs


FEATURES = {
    "blocks are trimmed": "  {% if true %}\n  a\n  {% endif %}\n\tb{# c #}\n",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ loop.index }}{% endfor %}",
    "generation": "{% set x = 1 %}{%- generation -%}\n{% set x = 2 %}{{ x }}\n{%- endgeneration %}{{ x }}",
    "tojson": "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}"
    "{{ '<é>' | tojson(ensure_ascii=true) }}{{ {'a': 1} | tojson(separators=(',', ':')) }}",
    "strftime_now": "{{ strftime_now('%Y') | int > 2000 }}",
    "namespace": "{% set n = namespace(a=1, self=2) %}{% set n.b = 3 %}{{ n.a }}{{ n.self }}{{ n.b }}",
    "documents": "{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}{{ missing }}",
    "changes": "{{ messages.append(1) }}",
    "raise_exception": "{{ raise_exception('no') }}",
}
NEWER = {
    "dict": "{{ dict(c=3) }}{{ dict.fromkeys('ab', 1) }}{{ dict.keys is defined }}",
    "null keys": "{% for m in messages %}{{ m.content is defined }}{{ m.tool_calls is defined }}{{ m | length }}"
    "{% endfor %}",
    "thoughts": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "underscores": "{% set n = namespace(_a=1) %}",
    "underscores set later": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
}
"""Features that older transformers lack."""
MORE = [
    {"role": "assistant", "content": None, "reasoning": "a"},
    {"role": "assistant", "content": "b", "thinking": "c", "tool_calls": None},
    {
        "role": "assistant",
        "content": "<d>",
        "reasoning_content": "e",
        "thinking": "f",
        "tool_calls": [{"n": None}],
    },
]


@pytest.mark.parametrize("feature", [*FEATURES, *NEWER])
@pytest.mark.parametrize("prompt", [False, True])
def test_what_transformers_adds_to_jinja_is_there(feature: str, prompt: bool):
    talk, template = [*TALK, *(MORE if feature in NEWER else ())], {**FEATURES, **NEWER}[feature]
    if feature in NEWER:
        needs_transformers("5.24", "the newest of what templates may rely on")
    tokenizer = make_tokenizer(bos=None, eos=None)
    options = {"chat_template": template, "add_generation_prompt": prompt, "tokenize": False}
    if feature in ("changes", "raise_exception", "underscores", "underscores set later"):
        with pytest.raises(TemplateError) as error:
            tokenizer.apply_chat_template(talk, **options)
        # Their reason for names with an underscore is in other words.
        said = "underscore" if "underscore" in str(error.value) else re.escape(str(error.value))
        with pytest.raises(RopewalkError, match=said):
            render(template, {}, talk, [(len(talk), prompt)])
    else:
        theirs = tokenizer.apply_chat_template(talk, **options)
        assert render(template, {}, talk, [(len(talk), prompt)]) == [theirs]


FAULTS = {
    "division by zero": ("a\nb {{ 1 / 0 }}", "line 2: division by zero"),
    "in a macro": ("{% macro m() %}\n{{ 1 // 0 }}{% endmacro %}\n\n{{ m() }}", "line 2: .*by zero"),
    "syntax": ("a\n\n{% if %}", "line 3: "),
    "exception": ("\n{{ raise_exception('no\\nsystem') }}", "line 2: no$"),
    "undefined": ("{{ messages[7].content }}", "line 1: .*no element 7"),
    "missing filter": ("{{ 1 | knot }}", "line 1: No filter named 'knot'"),
    "type": ("{{ messages + 1 }}", "line 1: "),
    "overflow": ("{{ 10.0 ** 400 }}", "line 1: "),
    "too long a number": ("\n{{ 10 ** 5000 }}", "line 2: Exceeds the limit .* conversion$"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "line 1: "),
    "sandbox": ("{{ messages.__class__.__mro__ }}", "line 1: access to attribute '__class__'"),
    "other file": ("{% include 'x' %}", "line 1: "),
    "long output": ("{% for a in range(9999) %}0123456789{% endfor %}", "writes more than 65536 characters"),
    "gigabytes": ("{{ 'x' * 10 ** 10 }}", "takes more than 512 MiB of memory"),
    "width": ("{{ '%99999999999d' | format(1) }}", "takes more than 512 MiB|line 1: "),
    "doubling": (
        "{% set n = namespace(s='x') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "takes more than 512 MiB of memory",
    ),
    "a list": ("{{ ([1] * 10 ** 10) | length }}", "takes more than 512 MiB of memory"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_goes_wrong_is_one_sentence_and_the_next_template_works(small: None, fault: str):
    template, said = FAULTS[fault]
    with pytest.raises(RopewalkError, match=said) as refused:
        rendered(template)
    assert "\n" not in str(refused.value)
    assert rendered("{{ messages[0].role }}") == "user"


def test_what_does_not_end_is_stopped_and_the_next_template_works(
    small: None, monkeypatch: pytest.MonkeyPatch
):
    # One operation, within which no code of Python's runs that could look at a clock.
    template = "{{ (10 ** (10 ** 10)) > 1 }}"
    with monkeypatch.context() as patched:
        patched.setattr(module, "SECONDS", 1)
        started = time.monotonic()
        with pytest.raises(RopewalkError, match=r"does not end within 1 seconds of processor time$"):
            rendered(template)
        # Seconds of processor time, on a machine that may do other things.
        assert time.monotonic() - started < 60
    assert rendered("{{ messages[0].role }}") == "user"


def test_a_long_conversation_has_limits_of_its_own(small: None):
    talk = [{"role": "user", "content": "x" * (1 << 20)}]
    assert len(render("{{ messages[0].content * 3 }}", {}, talk, [(1, False)])[0]) == 3 << 20


def test_threads_and_a_forked_process_get_their_own_texts():
    def one(number: int) -> None:
        found[number] = rendered("{{ n }}", n=number)

    found: dict[int, str] = {}
    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: str(number) for number in range(8)}
    before = module._started()
    # As a fork leaves it: the process that was started is another one's child.
    before.owner = os.getppid()
    try:
        assert rendered("{{ 1 }}") == "1"
        assert module._started() is not before
    finally:
        before.owner = os.getpid()
        before.close()


def test_a_template_finds_nothing_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text("raise SystemExit(3)")
    module._started().close()
    module._started.cache_clear()
    monkeypatch.chdir(tmp_path)
    assert rendered("{{ 1 }}") == "1"
