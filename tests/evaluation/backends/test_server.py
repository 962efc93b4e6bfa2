"""A server answers prompts, or fails in every way that servers fail; nothing is scored that it did not say."""

import base64
import gzip
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import Answer, GenerationRequest, Rejection
from ropewalk.evaluation.backends.responses import (
    FaultError,
)
from ropewalk.evaluation.backends.server import TRIAL, ServerBackend
from ropewalk.evaluation.backends.server_pool import server_pool
from ropewalk.evaluation.backends.serving import Serving
from tests.completion_server import (
    CompletionServer,
    Reply,
    completion,
    free_port,
    message,
    refusal,
)
from tests.evaluation.backends.server_cases import (
    HTML,
    KEY,
    always,
    backend,
    backend_at,
    echo,
    first_then_echo,
    rejection,
    requests_of,
)
from tests.evaluation.core_cases import byte_tokenizer
from tests.marks import slow_after


def test_a_request_is_greedy_and_carries_the_prompts_own_ids() -> None:
    with CompletionServer(echo, models=["org/tiny"]) as server:
        asked = backend(server)
        list(asked.answers([GenerationRequest((1, 5, 5, 9), 17, 100)]))
        list(backend(server, extra={"top_k": 1}).answers([GenerationRequest((1, 2), 3, 100)]))
    assert server.requests[0] == {
        "model": "org/tiny",
        "prompt": [1, 5, 5, 9],
        "max_tokens": 17,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
    }
    assert server.requests[1].items() >= {"top_k": 1, "repetition_penalty": 1.0}.items()
    assert all(trial.items() >= {"temperature": 0.0, "max_tokens": 1}.items() for trial in server.trials)
    assert asked.notes == []
    assert asked.description == {
        "kind": "server",
        "address": server.url,
        "model": "org/tiny",
        "prompts": "ids",
    }


def text_tokenizer(adds_bos: bool) -> PreTrainedTokenizerFast:
    """A token a byte, special tokens in a text read as such, and BOS in front of every text if asked for."""
    vocabulary = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
    plain = Tokenizer(BPE(vocabulary, []))
    plain.pre_tokenizer = ByteLevel(add_prefix_space=False)
    plain.decoder = ByteLevelDecoder()
    plain.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>", "<|user|>")])
    if adds_bos:
        special = [("<s>", plain.token_to_id("<s>"))]
        plain.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")


def count(tokenizer: Any, **how: bool) -> Callable[[str], int]:
    return lambda prompt: len(tokenizer(prompt, **how)["input_ids"])


TEXT = "<|user|>Hëllo , world .\n\x1b[31m<s> 漢"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_text_is_what_the_server_reads_as_the_prompts_own_tokens(adds_bos: bool) -> None:
    tokenizer = text_tokenizer(adds_bos)
    ids = tuple(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    whole = (tokenizer.bos_token_id, *ids)
    with CompletionServer(always(completion("x")), reads=count(tokenizer)) as server:
        asked = backend(server, tokenizer=tokenizer, send="text", concurrency=1)
        list(asked.answers([GenerationRequest(whole, 4, 100)]))
        # One BOS, whoever writes it.
        assert server.requests[0]["prompt"] == (TEXT if adds_bos else "<s>" + TEXT)
        assert tuple(tokenizer(server.requests[0]["prompt"])["input_ids"]) == whole
        assert asked.description["prompts"] == "text"
        if adds_bos:
            (found,) = asked.answers([GenerationRequest(ids, 4, 100)])
            assert isinstance(found, Rejection)
            assert re.search(
                rf"of {len(ids)} tokens cannot be sent as text.*\({len(ids) + 1} of", found.reason
            )
        else:
            list(asked.answers([GenerationRequest(ids, 4, 100)]))
            assert server.requests[1]["prompt"] == TEXT


@pytest.mark.parametrize("adds_bos", [True, False])
def test_what_the_server_says_it_read_decides_who_writes_bos(adds_bos: bool) -> None:
    ours, theirs = text_tokenizer(adds_bos), text_tokenizer(not adds_bos)
    prompt = (ours.bos_token_id, *ours("abc", add_special_tokens=False)["input_ids"])
    with CompletionServer(echo, reads=count(theirs)) as server:
        asked = backend(server, tokenizer=ours, send="text")
        list(asked.answers([GenerationRequest(prompt, 4, 100)]))
    assert [tuple(theirs(value["prompt"])["input_ids"]) for value in server.requests] == [prompt]
    assert len(server.trials) == 2


def test_a_server_with_another_tokenizer_is_told_by_its_count() -> None:
    tokenizer = text_tokenizer(True)
    with (
        CompletionServer(echo, reads=lambda prompt: 7) as server,
        pytest.raises(
            RopewalkError,
            match=r"counts 7 tokens for .*, but the local tokenizer counts 20; give the tokenizer of the served model",
        ),
    ):
        backend(server, tokenizer=tokenizer, send="text").check()
    assert len(server.trials) == 2


def test_tokens_that_no_text_is_read_as_are_not_sent_as_text() -> None:
    merged = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merged)
    with CompletionServer(echo) as server:
        (found,) = backend(server, tokenizer=tokenizer, send="text").answers(
            [GenerationRequest((0, 1, 0), 4, 100)]
        )
    assert isinstance(found, Rejection)
    assert re.search(r"a prompt of 3 tokens cannot be sent as text.*\(2 of them\)", found.reason)
    assert not server.requests


# How servers say that they do not take a field: transformers serve, FastAPI, OpenAI, vLLM now and once, Mistral.
DIALECTS: dict[str, Callable[[str, dict[str, Any]], Reply]] = {
    "transformers": lambda name, value: detail(422, f"Unexpected fields in the request: {{'{name}'}}"),
    "fastapi": lambda name, value: detail(422, [extra_field(["body", name], value)]),
    "openai": lambda name, value: refusal(400, f"Unrecognized request argument supplied: {name}"),
    "openai param": lambda name, value: error(
        {"message": "Unsupported parameter.", "param": name, "code": None}
    ),
    "vllm": lambda name, value: refusal(
        400,
        f"1 validation error for CompletionRequest\n{name}\n  Extra inputs are not permitted [type=extra_forbidden, "
        f"input_value={value[name]!r}, input_type=float]",
    ),
    "vllm of old": lambda name, value: error(
        {"message": str([{"type": "extra_forbidden", "loc": ("body", name), "input": value}]), "param": None}
    ),
    "mistral": lambda name, value: error(
        {"message": [extra_field(["body", name], value)], "type": "invalid"}
    ),
    "several": lambda name, value: detail(
        422, [extra_field(["body", name], value), extra_field(["body", "unheard_of"], value)]
    ),
}


def extra_field(place: list[str], request: dict[str, Any]) -> dict[str, Any]:
    """One of FastAPI's errors, which repeats the whole request where it likes."""
    return {
        "type": "extra_forbidden",
        "loc": place,
        "msg": "Extra inputs are not permitted",
        "input": request,
    }


def detail(status: int, said: Any) -> Reply:
    return Reply(status, json.dumps({"detail": said}).encode())


def error(said: dict[str, Any]) -> Reply:
    return Reply(400, json.dumps({"error": said}).encode())


def takes_no(dialect: str, *names: str) -> Callable[[dict[str, Any]], Reply | None]:
    """Refuses the first of these fields that a request has."""
    return lambda value: next((DIALECTS[dialect](name, value) for name in names if name in value), None)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_setting_that_the_server_refuses_is_left_out_and_said(dialect: str) -> None:
    with CompletionServer(echo, refuses=takes_no(dialect, "repetition_penalty")) as server:
        asked = backend(server)
        assert len(list(asked.answers(requests_of(2)))) == 2
    assert [set(value) for value in server.requests] == [
        {"model", "prompt", "max_tokens", "temperature", "frequency_penalty"}
    ] * 2
    assert len(server.trials) == 2
    (note,) = asked.notes
    assert note.startswith(
        "The server rejects repetition_penalty, so a penalty in the generation_config.json"
    )
    assert "frequency_penalty 0 is sent instead" in note
    assert asked.description["left_out"] == ["repetition_penalty"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_sent_in_place_of_a_setting_may_be_refused_too(dialect: str) -> None:
    both = takes_no(dialect, "repetition_penalty", "frequency_penalty")
    with CompletionServer(echo, refuses=both) as server:
        asked = backend(server)
        assert len(list(asked.answers(requests_of(1)))) == 1
    assert set(server.requests[0]) == {"model", "prompt", "max_tokens", "temperature"}
    assert len(server.trials) == 3
    (note,) = asked.notes
    assert note.startswith("The server rejects repetition_penalty and frequency_penalty, so a penalty")
    assert "in its place" not in note


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ["temperature", "max_tokens"])
def test_a_field_that_decides_the_answer_is_never_left_out(dialect: str, name: str) -> None:
    with (
        CompletionServer(echo, refuses=takes_no(dialect, name)) as server,
        pytest.raises(RopewalkError) as caught,
    ):
        backend(server).answers(requests_of(1))
    message = str(caught.value)
    assert message.startswith(f"the server at {server.url} rejects a request for one token (HTTP 4")
    assert message.endswith(
        f"only if every request sets {name}, so the model cannot be measured on this server"
    )
    assert (len(server.trials), len(server.requests)) == (1, 0)


def test_a_field_of_the_users_is_never_left_out() -> None:
    for extra in ({"min_p": 0.5}, {"repetition_penalty": 1.2}):
        (name,) = extra
        told = pytest.raises(RopewalkError, match=f"; remove {name} from --server-extra$")
        with CompletionServer(echo, refuses=takes_no("fastapi", name)) as server, told:
            backend(server, extra=extra).check()
        assert len(server.trials) == 1
    with CompletionServer(echo) as server:
        asked = backend(server, extra={"repetition_penalty": 1.2})
        list(asked.answers(requests_of(1)))
    assert server.requests[0]["repetition_penalty"] == 1.2
    assert asked.description["extra"] == {"repetition_penalty": 1.2}


@pytest.mark.parametrize(
    "said",
    [
        detail(400, "prompt must be a string."),
        detail(
            422, [{"type": "string_type", "loc": ["body", "prompt"], "msg": "Input should be a valid string"}]
        ),
    ],
)
def test_text_is_sent_to_a_server_that_takes_no_ids(said: Reply) -> None:
    tokenizer = text_tokenizer(True)
    prompt = tuple(tokenizer("abc")["input_ids"])

    def refuses(value: dict[str, Any]) -> Reply | None:
        first = takes_no("transformers", "repetition_penalty")(value)
        return first or (None if isinstance(value["prompt"], str) else said)

    with CompletionServer(echo, refuses=refuses, reads=count(tokenizer)) as server:
        asked = backend(server, tokenizer=tokenizer)
        assert [answer.text for answer in asked.answers([GenerationRequest(prompt, 4, 100)])] == [
            "answer to c"
        ]
        assert len(server.trials) == 3
        assert asked.description["prompts"] == "text"
        assert any("rejects token ids" in note for note in asked.notes)
        for settings in ({"send": "ids", "tokenizer": tokenizer}, {}):
            with pytest.raises(RopewalkError, match="if it rejects token ids, give --send text"):
                backend(server, **settings).check()
        assert [value["prompt"] for value in server.requests] == ["abc"]


def test_other_refusals_are_said_in_the_servers_words_and_end_the_trial() -> None:
    for said, trials in (
        # It may be that the prompt is to be text.
        (refusal(400, "This model's maximum context length is 4 tokens (9 in your prompt)"), 2),
        (refusal(403, "repetition_penalty is for friends"), 1),
        (
            detail(
                422, [{"loc": ["body", "messages"], "msg": "Field required", "input": {"temperature": 0}}]
            ),
            1,
        ),
    ):
        told = pytest.raises(RopewalkError, match=rf"rejects a request for one token \(HTTP {said.status}: ")
        with CompletionServer(echo, refuses=lambda value, said=said: said) as server, told:
            backend(server, tokenizer=text_tokenizer(True)).check()
        assert (len(server.trials), len(server.requests)) == (trials, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 12345.\n",
        "\x1b[31mred\x1b[0m\x07",
        "<b>&amp;</b><script>",
        "nul \x00 here",
        "漢字 😀 \u202e",
        "x" * 1_000_000 + "\n",
        "\r\n\u2028",
    ],
)
def test_any_text_comes_through_as_it_is(text: str) -> None:
    with CompletionServer(always(completion(text))) as server:
        assert list(backend(server).answers(requests_of(1))) == [Answer(0, text, 3, True)]


def test_what_a_server_says_of_the_ending_is_kept_and_what_it_does_not_say_is_not_made_up() -> None:
    replies = [
        completion("a", "length", 4),
        completion("b", "stop", 2),
        completion("c", None, None),
        completion("d", "eos_token", True),
        Reply(body=b'{"choices": [{"text": "e"}]}'),
    ]
    with CompletionServer(lambda value, number: replies[number]) as server:
        answers = list(backend(server, concurrency=1).answers(requests_of(5)))
    assert [(a.text, a.new_tokens, a.finished) for a in answers] == [
        ("a", 4, False),
        ("b", 2, True),
        ("c", None, None),
        ("d", None, None),
        ("e", None, None),
    ]


NONSENSE = [
    Reply(body=b""),
    Reply(body=b"null"),
    Reply(body=b"[]"),
    Reply(body=b"{}"),
    Reply(body=b'{"choices": []}'),
    Reply(body=b'{"choices": [{}]}'),
    Reply(body=b'{"choices": [{"text": null}]}'),
    Reply(body=b'{"choices": [{"text": 5}]}'),
    Reply(body=b'{"choices": [{"text": ["x"]}]}'),
    Reply(body=b'{"choices": {"text": "x"}}'),
    Reply(body=b'{"error": {"message": "the engine is dead"}}'),
    Reply(body=b'{"choices": [{"text": "half an ans'),
    Reply(body=b"\xff\xfe\x00"),
    Reply(body=b"[" * 100_000),
    Reply(body=HTML, headers={"Content-Type": "text/html"}),
    Reply(body=HTML),
    completion("half an ans", "abort"),
    completion("half an ans", "error"),
    completion("connection lost", hang_up=20),
    Reply(body=b"not gzip", headers={"Content-Type": "application/json", "Content-Encoding": "gzip"}),
    Reply(408, b""),
    Reply(500, HTML, {"Content-Type": "text/html"}),
    refusal(503, "model is loading"),
]


@pytest.mark.parametrize(
    "nonsense", slow_after(8, NONSENSE), ids=lambda reply: f"{reply.status}-{reply.body[:30]!r}"
)
def test_nonsense_is_asked_again_and_never_an_answer(nonsense: Reply) -> None:
    with CompletionServer(first_then_echo(nonsense, nonsense)) as server:
        answers = list(backend(server, retries=2, concurrency=1, backoff=0.0).answers(requests_of(2)))
    assert [answer.text for answer in answers] == ["answer to 0", "answer to 1"]
    assert len(server.requests) == 4
    with CompletionServer(always(nonsense)) as server:
        stream = backend(server, retries=1, concurrency=1, backoff=0.0).answers(requests_of(2))
        with pytest.raises(
            RunFailure,
            match=r"stopped answering prompts after 0 of 2 answers; run the same .* \(reason: .+\)$",
        ) as caught:
            next(stream)
    assert len(server.requests) == 2
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_a_rate_limit_takes_no_attempts_while_the_time_out_lasts() -> None:
    for status in (429, 503):
        slow_down = refusal(status, "slow down", {"Retry-After": "0.01"})
        with CompletionServer(first_then_echo(*[slow_down] * 6)) as server:
            (answer,) = backend(server, retries=0, concurrency=1).answers(requests_of(1))
        assert isinstance(answer, Answer)
        assert (answer.text, len(server.requests)) == ("answer to 0", 7)
    # A server that does not say when it will work again may never do.
    with CompletionServer(always(refusal(503, "loading"))) as server, pytest.raises(RunFailure, match="503"):
        list(backend(server, retries=2, concurrency=1).answers(requests_of(1)))
    assert len(server.requests) == 3
    slow_down = refusal(429, "slow down", {"Retry-After": "0.2"})
    with (
        CompletionServer(always(slow_down)) as server,
        pytest.raises(RunFailure, match="HTTP 429: slow down"),
    ):
        list(backend(server, retries=0, concurrency=1, timeout=0.5).answers(requests_of(1)))
    # Two waits of 0.2 s fit in half a second.
    assert len(server.requests) == 3


class Waits(threading.Event):
    """Notes how long it should have waited, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        assert len(self.seconds) < 100, "requests follow each other for ever"
        return False


def test_a_long_wait_is_told_in_one_line_and_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[FaultError] = []

    def failing(client: Any, request: GenerationRequest) -> bytes:
        if not faults:
            raise FaultError("connection lost")
        raise faults.pop(0)

    said: list[str] = []
    asked = ServerBackend(Serving(url="http://localhost:1/v1", retries=0, timeout=60.0), report=said.append)
    monkeypatch.setattr(asked, "_request", failing)
    limit = [FaultError("HTTP 429: slow down", 2.0, 429) for _ in range(6)]
    for waits in (1, 6):
        faults[:] = limit[:waits]
        with pytest.raises(FaultError, match="connection lost"):
            asked._completion_with_retries(None, requests_of(1)[0], Waits())
        # Two waits of 2 s are longer than 3 s; of the other requests' lines, none follows within seconds.
        assert len(said) == (waits > 1)
    assert said == [
        "the server at http://localhost:1/v1 does not answer a prompt yet (HTTP 429: slow down); waiting 2 s before "
        "attempt 3"
    ]


def test_a_count_of_tokens_waits_as_long_as_the_server_asks_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = [FaultError("HTTP 429: slow down", 20.0, 429), FaultError("connection lost")]
    slept: list[float] = []
    said: list[str] = []
    monkeypatch.setattr("ropewalk.evaluation.backends.server.time", SimpleNamespace(sleep=slept.append))
    asked = ServerBackend(Serving(url="http://localhost:1/v1"), report=said.append)

    def content(*given: Any) -> bytes:
        if faults:
            raise faults.pop(0)
        return b'{"tokens": [1]}'

    monkeypatch.setattr(asked, "_content", content)
    assert asked._post("/tokenize", {}) == {"tokens": [1]}
    assert slept == [20.0, 1.0]
    assert said == [
        "the server at http://localhost:1/v1 does not answer /tokenize yet (HTTP 429: slow down); waiting 20 s before "
        "attempt 2"
    ]


@pytest.mark.parametrize("asked_to_wait", [None, 0.0])
def test_waits_for_a_rate_limit_grow_and_end_if_the_server_names_none(
    monkeypatch: pytest.MonkeyPatch, asked_to_wait: float | None
) -> None:
    def limited(client: Any, request: GenerationRequest) -> bytes:
        raise FaultError("slow down", asked_to_wait, 429)

    waits: dict[float, list[float]] = {}
    for backoff in (0.5, 0.0):
        asked = backend_at("http://localhost:1/v1", backoff=backoff, retries=2, timeout=60.0)
        monkeypatch.setattr(asked, "_request", limited)
        stop = Waits()
        with pytest.raises(FaultError, match="slow down"):
            asked._completion_with_retries(None, requests_of(1)[0], stop)
        waits[backoff] = stop.seconds
    # Each wait is 1 to 1.5 times 0.5, 1, 2, 4, 8, 8, ... seconds; those within 60 s take none of the 2 retries.
    for number, wait in enumerate(waits[0.5]):
        assert min(0.5 * 2**number, 8) <= wait <= 1.5 * min(0.5 * 2**number, 8)
    assert 5 < len(waits[0.5]) <= 2 + 60 / 8 + 5
    # Without a wait, only the retries remain.
    assert waits[0.0] == [0.0, 0.0]


def test_a_compressed_answer_is_an_answer() -> None:
    good = completion("x")
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with CompletionServer(always(Reply(body=gzip.compress(good.body), headers=headers))) as server:
        assert [answer.text for answer in backend(server).answers(requests_of(1))] == ["x"]


def test_a_server_that_hangs_is_given_up_after_the_timeout_and_the_retries() -> None:
    with CompletionServer(always(completion("late", delay=30.0))) as server:
        asked = backend(server, retries=1, concurrency=1)
        asked.check()
        # A busy machine may need longer than this for the list of models.
        asked.timeout = 0.1
        stream = asked.answers(requests_of(3))
        with pytest.raises(
            RunFailure,
            match=r"after 0 of 3 answers; .* \(reason: no response within 0\.1 s, in the last of 2 attempts\)",
        ):
            next(stream)
    assert len(server.requests) == 2
    hangs_once = first_then_echo(completion("late", delay=30.0))
    with CompletionServer(hangs_once) as server:
        asked = backend(server, retries=1)
        asked.check()
        asked.timeout = 1.0
        assert len(list(asked.answers(requests_of(1)))) == 1


LONG = (
    "This model's maximum context length is 4096 tokens.\nHowever, you requested \x1b[1m5000\x1b[0m tokens."
)
SAID = "This model's maximum context length is 4096 tokens. However, you requested [1m5000 [0m tokens."


@pytest.mark.parametrize("status", [403, 404, 405])
def test_a_refusal_of_every_request_fails_at_once_with_the_servers_own_words(status: int) -> None:
    with CompletionServer(always(refusal(status, LONG))) as server, pytest.raises(RunFailure) as caught:
        list(backend(server, concurrency=1).answers(requests_of(5)))
    assert str(caught.value) == (
        f"the server at {server.url} rejected a prompt after 0 of 5 answers (HTTP {status}: {SAID})"
    )
    assert len(server.requests) == 1


def test_a_rejection_of_a_prompt_has_the_servers_own_words() -> None:
    with CompletionServer(always(refusal(400, LONG))) as server:
        assert rejection(server) == f"HTTP 400: {SAID}"


def test_the_servers_wish_to_wait_comes_before_our_own() -> None:
    busy = refusal(429, "slow down", {"Retry-After": "0.05"})
    with CompletionServer(first_then_echo(busy)) as server:
        start = time.monotonic()
        list(backend(server, backoff=100.0).answers(requests_of(1)))
    assert 0.05 <= time.monotonic() - start < 5.0


def test_waits_double_from_the_first() -> None:
    arrivals = []

    def reply(value: dict[str, Any], number: int) -> Reply:
        arrivals.append(time.monotonic())
        return refusal(500, "no") if number < 3 else echo(value, number)

    with CompletionServer(reply) as server:
        list(backend(server, backoff=0.02).answers(requests_of(1)))
    waits = [after - before for before, after in pairwise(arrivals)]
    assert all(wait >= least for wait, least in zip(waits, (0.02, 0.04, 0.08), strict=True))


def test_the_key_is_sent_and_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with CompletionServer(echo, key=KEY) as server:
        assert len(list(backend(server, api_key=KEY).answers(requests_of(1)))) == 1
        monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
        asked = backend(server)
        assert len(list(asked.answers(requests_of(1)))) == 1
    assert KEY not in repr(asked) + str(asked.description) + caplog.text


def test_a_wrong_key_is_said_by_check_and_not_repeated() -> None:
    with CompletionServer(echo, key="another") as server:
        for settings in ({}, {"api_key": KEY}):
            with pytest.raises(RopewalkError, match="HTTP 401: Incorrect API key provided") as caught:
                backend(server, **settings).answers(requests_of(1))
            assert KEY not in str(caught.value)
    assert not server.requests


def test_a_redirect_to_another_server_is_followed_without_the_key() -> None:
    for key in (None, KEY):
        with CompletionServer(echo, key=key) as there:
            moved = Reply(307, b"", {"Location": f"{there.url}/completions"})
            with CompletionServer(echo, key=KEY, refuses=lambda value, moved=moved: moved) as here:
                asked = backend(here, api_key=KEY)
                if key is None:
                    assert [each.text for each in asked.answers(requests_of(1))] == ["answer to 0"]
                else:
                    with pytest.raises(RopewalkError, match=r"HTTP 401: Incorrect API key provided: \."):
                        asked.check()


def test_a_key_that_no_header_can_hold_is_refused() -> None:
    for key in ("schlüssel", "two\nlines"):
        with pytest.raises(RopewalkError, match="API key in api_key has characters") as caught:
            backend_at("http://localhost:1/v1", api_key=key)
        assert key not in str(caught.value)


def test_user_and_password_of_an_address_are_used_and_shown_nowhere() -> None:
    with CompletionServer(echo) as server:
        url = server.url.replace("http://", f"http://me:{KEY}@")
        asked = backend_at(url, backoff=0.0)
        assert len(list(asked.answers(requests_of(1)))) == 1
        assert asked.description["address"] == server.url
    with pytest.raises(RopewalkError) as caught:
        asked.check()
    assert KEY not in str(caught.value)


def test_check_names_the_only_model_and_refuses_to_guess() -> None:
    with CompletionServer(echo, models=["only"]) as server:
        assert backend(server).check() == "only"
        assert backend(server, model="only").check() == "only"
        with pytest.raises(
            RopewalkError, match=r"does not serve other; it serves only \(HTTP 404: The model"
        ):
            backend(server, model="other").check()
    with CompletionServer(echo, models=[f"m{number}" for number in range(9)]) as server:
        assert backend(server, model="m7").check() == "m7"
        with pytest.raises(RopewalkError, match="serves m0, m1, m2, m3, m4 and 4 more; name one model"):
            backend(server).check()
    # As transformers serve with a model from a folder: its list is the hub's cache, and it has none.
    for listing in (None, Reply(500, b"Internal Server Error")):
        with CompletionServer(
            echo, models=["cached"], unlisted=["/a/folder"], models_reply=listing
        ) as server:
            assert backend(server, model="/a/folder").check() == "/a/folder"
            # One in text, to know whether it is served, and the trial.
            assert [each["prompt"] for each in server.trials] == [TRIAL, [0]]
    with (
        CompletionServer(echo, models=[]) as server,
        pytest.raises(RopewalkError, match="lists no models; load"),
    ):
        backend(server).check()
    assert not server.requests


def test_a_list_that_is_kept_from_the_key_does_not_matter_with_a_named_model() -> None:
    hidden = Reply(401, b'{"error": {"message": "x-api-key header is required"}}')
    with CompletionServer(echo, models=["tiny"], models_reply=hidden) as server:
        assert backend(server, model="tiny").check() == "tiny"
        with pytest.raises(RopewalkError, match="x-api-key header is required"):
            backend(server).check()


def test_text_cannot_be_sent_without_a_tokenizer() -> None:
    with CompletionServer(echo) as server:
        asked = backend(server, send="text")
        assert asked.find() == "tiny"
        with pytest.raises(RopewalkError, match="send=text needs the model's tokenizer"):
            asked.check()


def test_check_says_in_one_sentence_that_nobody_is_there() -> None:
    address = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(RopewalkError) as caught:
        backend_at(address).check()
    assert str(caught.value).startswith(f"no model server responds at {address} (")
    assert str(caught.value).endswith("; start a server there, or correct the address")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (Reply(body=HTML), r"/v1/models does not return an OpenAI-style list of models \(.* is not JSON"),
        (Reply(body=b'{"data": [5]}'), r"does not return an OpenAI-style list of models \(.*\[5\]"),
        (Reply(body=b"[]"), "does not return an OpenAI-style list of models"),
        (Reply(500, HTML), r"does not list its models \(HTTP 500"),
    ],
)
def test_check_refuses_a_server_of_another_kind(said: Reply, sentence: str) -> None:
    with CompletionServer(echo, models_reply=said) as server:
        with pytest.raises(RopewalkError, match=sentence):
            backend(server).check()
        with pytest.raises(
            RopewalkError, match=r"HTTP 404: Not Found\); name .* address usually ends in /v1"
        ):
            backend_at(server.url.removesuffix("/v1")).check()


def test_the_list_of_models_is_asked_for_once() -> None:
    with CompletionServer(echo) as server:
        asked = backend(server)
        assert list(asked.answers([])) == []
        asked.check()
        server_models = server.url
        list(asked.answers(requests_of(1)))
        assert list(asked.answers(requests_of(2)))
        assert asked.description["address"] == server_models


def test_a_server_that_keeps_reporting_errors_as_successes_is_quoted() -> None:
    body = json.dumps({"error": {"message": "the engine is dead"}}).encode()
    said = r"\(reason: HTTP 200 with an error in place of an answer: the engine is dead, in the last of 3 attempts\)"
    with CompletionServer(always(Reply(body=body))) as server, pytest.raises(RunFailure, match=said):
        list(backend(server, retries=2).answers(requests_of(1)))


SAYS_4096: dict[str, dict[str, Any]] = {
    "vLLM": {
        "models_reply": {"data": [{"id": "lora"}, {"id": "tiny", "root": "a/b", "max_model_len": 4096}]}
    },
    "llama.cpp": {"pages": {"/props": {"default_generation_settings": {"n_ctx": 4096}, "model_path": "a/b"}}},
    "SGLang": {"pages": {"/get_server_info": {"context_length": 4096, "model_path": "a/b"}}},
}


@pytest.mark.parametrize("program", SAYS_4096)
def test_a_server_is_asked_for_its_context(program: str) -> None:
    says = {"models": ["tiny"], **SAYS_4096[program]}
    if "models_reply" in says:
        says["models_reply"] = Reply(body=json.dumps(says["models_reply"]).encode())
    with CompletionServer(echo, **says) as server:
        asked = backend(server, model="tiny")
        asked.check()
        assert (asked.served.context, asked.served.root) == (4096, "a/b")
        pool = server_pool(Serving(url=server.url, model="tiny"))
        pool.check()
    pool.require_length(4096)
    with pytest.raises(
        RopewalkError, match=rf"{server.url} has a context of 4,096 tokens \(.*longest length is 4,097"
    ):
        pool.require_length(4097)


def turns_of(count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest((1, 7, index), 4, 100, (("system", "Be brief."), ("user", f"number {index}")), 2)
        for index in range(count)
    ]


def test_a_chat_endpoint_gets_turns_and_applies_its_own_template() -> None:
    with CompletionServer(lambda value, number: message(value["messages"][-1]["content"])) as server:
        chat = backend(server, endpoint="chat")
        answers = list(chat.answers(turns_of(3)))
    assert sorted((answer.index, answer.text) for answer in answers) == [
        (index, f"number {index}") for index in range(3)
    ]
    asked = min(server.requests, key=lambda each: each["messages"][-1]["content"])
    assert asked == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "number 0"}],
        "max_tokens": 4,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
    }
    assert chat.description["prompts"] == "turns"


def test_a_chat_that_was_cut_short_by_the_server_is_noticed() -> None:
    # Two of the request's three tokens are the texts' own; the server's template may be shorter than ours.
    for read, good in ((2, True), (1, False)):
        with CompletionServer(lambda value, number, read=read: message("x", read=read)) as server:  # type: ignore[misc]
            stream = backend(server, endpoint="chat").answers(turns_of(1))
            if good:
                assert [answer.text for answer in stream] == ["x"]
            else:
                (found,) = stream
                assert isinstance(found, Rejection)
                assert found.reason.startswith("the server read only 1 of the 2 tokens")


def with_keys(reply: Reply, **more: Any) -> Reply:
    """A reply with further keys."""
    return replace(reply, body=json.dumps({**json.loads(reply.body), **more}).encode())


CONTRADICTIONS: dict[str, tuple[Reply, str]] = {
    "another model": (
        with_keys(completion("x"), model="other-7b"),
        "names the model other-7b, but that to the trial request named tiny",
    ),
    "more tokens than asked for": (
        completion("x", tokens=10**15),
        "an answer of 10{15} tokens, but at most 4",
    ),
    "fewer tokens than none": (completion("x", tokens=-7), "an answer of -7 tokens"),
    "a number too long to print": (completion("x", tokens=10**400), "an answer of 10{298}… tokens"),
    "a longer prompt than sent": (completion("x", read=10**6), "a prompt of 1000000 tokens, but 3 were sent"),
    "a prompt of fewer tokens than none": (completion("x", read=-1), "a prompt of -1 tokens"),
    "a longer text than the tokens": (
        completion("x" * 1000),
        "has 1,000 characters, more than 4 tokens can have",
    ),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_response_that_contradicts_its_request_is_no_answer(what: str) -> None:
    reply, reason = CONTRADICTIONS[what]

    def reads(prompt: Any) -> int:
        return len(prompt)

    with CompletionServer(first_then_echo(reply), reads=reads, named="tiny") as server:
        asked = backend(server, tokenizer=text_tokenizer(True), backoff=0.0)
        # Another replica may answer the next attempt.
        assert [answer.text for answer in asked.answers(requests_of(1))] == ["answer to 0"]
    with CompletionServer(always(reply), reads=reads, named="tiny") as server:
        asked = backend(server, tokenizer=text_tokenizer(True), retries=1, backoff=0.0)
        with pytest.raises(RunFailure, match=reason):
            list(asked.answers(requests_of(2)))


def test_another_tokenizer_than_the_servers_is_found_out_by_the_trial_of_a_chat() -> None:
    tokenizer = byte_tokenizer()

    def counted(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    # A template may write any number of tokens around a text.
    for around in (0, 7, 900):
        with CompletionServer(echo, reads=lambda text, n=around: n + counted(text)) as server:
            asked = backend(server, endpoint="chat", tokenizer=tokenizer)
            asked.check()
            assert (len(server.trials), asked.notes) == (2, [])
    with (
        CompletionServer(echo, reads=lambda text: 7 + len(text.split())) as server,
        pytest.raises(
            RopewalkError, match=r"counts \d+ tokens of a text for which the local tokenizer counts \d+, so"
        ),
    ):
        backend(server, endpoint="chat", tokenizer=tokenizer).check()
    # Of a server that counts nothing, nothing is known, and that is said.
    with CompletionServer(echo, reads=lambda text: None) as server:
        asked = backend(server, endpoint="chat", tokenizer=tokenizer)
        asked.check()
    assert [note[:40] for note in asked.notes] == ["The server does not report how many toke"]


def test_a_trial_that_contradicts_its_request_is_refused() -> None:
    with (
        CompletionServer(echo, reads=lambda prompt: 10**6) as server,
        pytest.raises(
            RopewalkError, match=r"request for one token \(.* a prompt of 1000000 tokens, but 20 were"
        ),
    ):
        backend(server, tokenizer=text_tokenizer(True), retries=0).check()


def test_a_trial_may_have_more_than_its_one_token() -> None:
    with CompletionServer(echo, trial_reply=completion("The sky is", tokens=3)) as server:
        assert len(list(backend(server, tokenizer=text_tokenizer(True)).answers(requests_of(1)))) == 1


def test_what_honest_servers_count_otherwise_is_accepted() -> None:
    # Some count the token that ends the answer, or a BOS of their own.
    for reply in (completion("x", tokens=5), completion("x", read=4), completion("x", tokens=0, read=0)):
        with CompletionServer(always(reply)) as server:
            (found,) = backend(server, tokenizer=text_tokenizer(True)).answers(requests_of(1))
        assert isinstance(found, Answer)


def test_a_chat_server_may_write_a_template_of_its_own_around_the_prompt() -> None:
    turns = GenerationRequest((1, 2, 3), 4, 100, (("user", "abc"),), 1)
    for read, good in ((50, True), (53, True), (10**6, False)):
        with CompletionServer(always(message("x", read=read)), reads=lambda prompt: 50) as server:
            asked = backend(server, endpoint="chat", retries=0)
            if good:
                assert len(list(asked.answers([turns]))) == 1
            else:
                with pytest.raises(RunFailure, match="a prompt of 1000000 tokens"):
                    list(asked.answers([turns]))


def test_a_server_that_answers_as_another_model_is_refused_and_one_with_an_alias_noted() -> None:
    with (
        CompletionServer(echo, models=["m", "other"], named="other") as server,
        pytest.raises(
            RopewalkError, match=r"answers requests for m as other, which is another model; name the"
        ),
    ):
        backend(server, model="m").check()
    with CompletionServer(
        echo, models=["llama"], unlisted=["deployment"], named="gpt-4o-2024-08-06"
    ) as server:
        asked = backend(server, model="deployment")
        asked.check()
        assert "answers requests for deployment as gpt-4o-2024-08-06; check that" in asked.notes[0]
    with CompletionServer(echo, models=["gpt-4o"], named="gpt-4o-2024-08-06") as server:
        asked = backend(server)
        asked.check()
        assert asked.notes == []


@pytest.mark.parametrize("status", [404, 405])
def test_a_server_without_the_endpoint_is_said_with_the_other_one(status: int) -> None:
    def refuses(value: dict[str, Any]) -> Reply | None:
        return None if "messages" in value else refusal(status, "no such endpoint")

    with CompletionServer(echo, refuses=refuses) as server:
        with pytest.raises(
            RopewalkError,
            match=rf"serves tiny, but has no endpoint /completions \(HTTP {status}: no .*\); give --endpoint chat",
        ):
            backend(server).check()
        backend(server, endpoint="chat").check()


def test_a_server_that_asks_for_a_key_is_said_with_the_variable() -> None:
    with CompletionServer(echo, key="another") as server:
        for settings in ({}, {"model": "tiny"}):
            with pytest.raises(
                RopewalkError, match=r"HTTP 401: .*; set the environment variable OPENAI_API_KEY"
            ):
                backend(server, **settings).check()
    # The key may end while the evaluation runs.
    with (
        CompletionServer(always(refusal(401, "expired"))) as server,
        pytest.raises(RunFailure, match=r"HTTP 401: expired\); set .*OPENAI_API_KEY .* again to resume"),
    ):
        list(backend(server).answers(requests_of(1)))


SECRET = "pässwörd/of-mine"


def test_credentials_that_a_server_echoes_are_kept_nowhere() -> None:
    header = base64.b64encode(f"someone-else:{SECRET}".encode()).decode()
    echoed = f"got Basic {header}, {SECRET}, {quote(SECRET, safe='')}"
    long_one = "x" * 290 + header
    replies = [
        completion(echoed),
        Reply(body=json.dumps({"error": {"message": echoed}}).encode()),
        Reply(body=json.dumps({"choices": [{"text": None}], "said": echoed}).encode()),
        Reply(body=echoed.encode()),
        refusal(400, echoed),
        refusal(400, long_one),
        refusal(401, echoed),
        refusal(500, echoed),
    ]
    for reply in replies:
        with CompletionServer(always(reply)) as server:
            url = server.url.replace("http://", f"http://someone-else:{quote(SECRET, safe='')}@")
            asked = backend_at(url, retries=0, backoff=0.0)
            try:
                words = repr(list(asked.answers(requests_of(1))))
            except RunFailure as error:
                words = str(error)
        assert "***" in words
        for secret in (header, header[:10], SECRET, quote(SECRET, safe=""), "of-mine"):
            assert secret not in words
    with CompletionServer(echo, models_reply=Reply(body=echoed.encode())) as server:
        url = server.url.replace("http://", f"http://someone-else:{quote(SECRET, safe='')}@")
        with pytest.raises(RopewalkError) as caught:
            backend_at(url).check()
        assert "of-mine" not in str(caught.value)


def test_a_short_key_is_hidden_in_messages_and_leaves_answers_alone() -> None:
    with CompletionServer(always(completion("my key is 12345"))) as server:
        (found,) = backend(server, api_key="12345").answers(requests_of(1))
        assert isinstance(found, Answer)
        assert found.text == "my key is 12345"
    with CompletionServer(always(refusal(400, "wrong: 12345"))) as server:
        assert rejection(server, api_key="12345") == "HTTP 400: wrong: ***"
