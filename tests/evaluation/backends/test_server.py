"""A server answers prompts, or fails in every way that servers fail; nothing is scored that it did not say."""

import gzip
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import Answer, GenerationRequest, ServerBackend
from ropewalk.evaluation.backends.server import (
    FaultError,
    Serving,
    named_fields,
    one_line,
    public_address,
    read_chat,
    read_completion,
    retry_after,
    server_pool,
)
from ropewalk.io.settings import explain
from tests.completion_server import (
    CompletionServer,
    Reply,
    completion,
    few_certificates,
    free_port,
    message,
    refusal,
    until,
)
from tests.marks import slow_after

KEY = "sk-secret-123"
HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    few_certificates(monkeypatch, tmp_path)


def backend(server: CompletionServer, **settings: Any) -> ServerBackend:
    return backend_at(server.url, **{"backoff": 0.01, "timeout": 10.0, **settings})


def backend_at(url: str, **settings: Any) -> ServerBackend:
    own = {name: settings.pop(name) for name in ("tokenizer", "api_key", "backoff") if name in settings}
    return ServerBackend(Serving(url=url, **settings), **own)


def requests_of(count: int) -> list[GenerationRequest]:
    """Prompts that name themselves."""
    return [GenerationRequest((1, 7, index), 4, 100) for index in range(count)]


def echo(value: dict[str, Any], number: int) -> Reply:
    return completion(f"answer to {value['prompt'][-1]}")


def echo_slowly(value: dict[str, Any], number: int) -> Reply:
    return completion(f"answer to {value['prompt'][-1]}", delay=0.01)


def always(reply: Reply) -> Callable[[dict[str, Any], int], Reply]:
    return lambda value, number: reply


def first_then_echo(*replies: Reply) -> Callable[[dict[str, Any], int], Reply]:
    """What goes wrong first, one request after the other; then good answers."""
    return lambda value, number: replies[number] if number < len(replies) else echo(value, number)


def test_answers_map_to_their_requests_under_concurrency_and_random_delays() -> None:
    rng = random.Random(0)
    delays = [rng.uniform(0, 0.03) for _ in range(60)]

    def reply(value: dict[str, Any], number: int) -> Reply:
        return completion(f"answer to {value['prompt'][-1]}", delay=delays[number])

    with CompletionServer(reply) as server:
        answers = list(backend(server).answers(requests_of(60)))
    assert sorted(answer.index for answer in answers) == list(range(60))
    assert all(answer.text == f"answer to {answer.index}" for answer in answers)
    assert [answer.index for answer in answers] != list(range(60))
    assert 2 <= server.most_under_way <= 8


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_are_under_way_than_were_asked_for(concurrency: int) -> None:
    with CompletionServer(lambda value, number: completion("x", delay=0.01)) as server:
        assert len(list(backend(server, concurrency=concurrency).answers(requests_of(9)))) == 9
    assert server.most_under_way == concurrency


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
            with pytest.raises(
                RunFailure, match=rf"of {len(ids)} tokens cannot be sent as text.*\({len(ids) + 1} of"
            ):
                list(asked.answers([GenerationRequest(ids, 4, 100)]))
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
        stream = backend(server, tokenizer=tokenizer, send="text").answers(
            [GenerationRequest((0, 1, 0), 4, 100)]
        )
        with pytest.raises(RunFailure, match=r"a prompt of 3 tokens cannot be sent as text.*\(2 of them\)"):
            list(stream)
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
    assert message.endswith(f"; answers depend on {name}, so the model cannot be measured on this server")
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


def test_fields_are_named_by_their_place_or_as_whole_words() -> None:
    fields = ("model", "prompt", "max_tokens", "temperature", "top_k")
    for said, names in (
        ("This model's maximum length is 4, the prompt has 9", ()),
        ("unknown field `prompt`", ("prompt",)),
        ("top_k_max and my-top_k are unknown", ()),
        ("max_tokens: unknown; so is top_k.", ("max_tokens", "top_k")),
        ({"detail": [{"loc": ["query"], "input": {"top_k": 1}}]}, ()),
        ({"message": "bad top_k", "param": "temperature"}, ("temperature",)),
        ({"message": "bad top_k", "param": "400"}, ("top_k",)),
        ({"message": 5, "detail": {"top_k": "unknown"}}, ("top_k",)),
        ({"detail": [5, {"loc": 5}, {"loc": [5, ["top_k"]]}]}, ("top_k",)),
        (None, ()),
        ([["top_k"]], ("top_k",)),
    ):
        assert named_fields(said, fields) == names, said


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
            RunFailure, match=r"stopped responding \(.+\) after 0 of 2 answers; run the same"
        ) as caught:
            next(stream)
    assert len(server.requests) == 2
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_a_rate_limit_takes_no_attempts_while_the_time_out_lasts() -> None:
    slow_down = refusal(429, "slow down", {"Retry-After": "0.01"})
    with CompletionServer(first_then_echo(*[slow_down] * 6)) as server:
        (answer,) = backend(server, retries=0, concurrency=1).answers(requests_of(1))
    assert (answer.text, len(server.requests)) == ("answer to 0", 7)
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


def test_several_servers_share_the_prompts() -> None:
    with (
        CompletionServer(
            lambda value, number: completion(f"answer to {value['prompt'][-1]}", delay=0.01)
        ) as first,
        CompletionServer(echo) as second,
    ):
        pool = server_pool(Serving(url=f"{first.url}, {second.url}", concurrency=2))
        answers = list(pool.answers(requests_of(40)))
    assert sorted((answer.index, answer.text) for answer in answers) == sorted(
        (index, f"answer to {index}") for index in range(40)
    )
    # The quick one takes more, and the slow one some.
    assert len(second.requests) > len(first.requests) > 0
    assert pool.description["addresses"] == [first.url, second.url]


def test_the_prompts_of_a_server_that_dies_go_to_the_others() -> None:
    def reply(value: dict[str, Any], number: int) -> Reply:
        if number == 3:
            dying.die()
        return echo_slowly(value, number)

    told: list[str] = []
    with CompletionServer(reply) as dying, CompletionServer(echo_slowly) as living:
        serving = Serving(url=f"{dying.url},{living.url}", concurrency=2, retries=0)
        answers = list(server_pool(serving, report=told.append).answers(requests_of(30)))
    assert sorted(answer.index for answer in answers) == list(range(30))
    assert all(answer.text == f"answer to {answer.index}" for answer in answers)
    (note,) = told
    assert dying.url in note
    assert note.endswith("1 of 2 servers go on")


def test_servers_that_all_die_end_the_run() -> None:
    broken = always(Reply(500, b"out of memory"))
    with CompletionServer(broken) as first, CompletionServer(broken) as second:
        serving = Serving(url=f"{first.url},{second.url}", concurrency=2, retries=0)
        with pytest.raises(RunFailure, match=r"stopped responding \(HTTP 500: out of memory\) after 0 of 4"):
            list(server_pool(serving).answers(requests_of(4)))


def test_servers_of_different_models_or_programs_are_refused() -> None:
    with CompletionServer(echo, models=["a"]) as first, CompletionServer(echo, models=["b"]) as second:
        with pytest.raises(RopewalkError, match=f"servers at {first.url} and {second.url} differ"):
            server_pool(Serving(url=f"{first.url},{second.url}")).check()
        with pytest.raises(RopewalkError, match="is given twice"):
            server_pool(Serving(url=f"{first.url},{first.url}/"))


def test_a_compressed_answer_is_an_answer() -> None:
    good = completion("x")
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with CompletionServer(always(Reply(body=gzip.compress(good.body), headers=headers))) as server:
        assert [answer.text for answer in backend(server).answers(requests_of(1))] == ["x"]


def test_a_server_that_dies_ends_the_run_after_the_good_answers() -> None:
    def reply(value: dict[str, Any], number: int) -> Reply:
        if number == 5:
            server.die()
        return echo(value, number)

    with CompletionServer(reply) as server:
        stream = backend(server, retries=2, concurrency=2).answers(requests_of(40))
        got = []
        with pytest.raises(RunFailure) as caught:
            got.extend(answer.index for answer in stream)
    # The one that was under way when it died may have come through or not.
    assert 5 <= len(server.requests) <= 7
    assert len(got) == len(set(got)) == len(server.requests)
    message = str(caught.value)
    assert message.startswith(f"the server at {server.url} stopped responding (")
    assert message.endswith(f") after {len(got)} of 40 answers; run the same command again to resume")
    assert "refused" in message


def test_answers_under_way_are_waited_for_when_another_request_fails() -> None:
    failed = threading.Event()

    def reply(value: dict[str, Any], number: int) -> Reply:
        if value["prompt"][-1] == 0:
            # All are under way before the first fails.
            until(lambda: server.under_way == 3)
            failed.set()
            return refusal(400, "no")
        failed.wait(5)
        return completion("late", delay=0.05)

    with CompletionServer(reply) as server:
        got = []
        with pytest.raises(RunFailure, match=r"rejected a prompt after 2 of 9 answers \(HTTP 400: no\)$"):
            got.extend(backend(server, concurrency=3).answers(requests_of(9)))
    assert sorted(answer.index for answer in got) == [1, 2]
    assert len(server.requests) == 3


def test_a_failure_ends_the_retries_of_the_others() -> None:
    def reply(value: dict[str, Any], number: int) -> Reply:
        if value["prompt"][-1] == 0:
            return refusal(503, "busy")
        until(lambda: server.under_way >= 1 and len(server.requests) == 2)
        return Reply(400, b'{"error": {"message": "no"}}', delay=0.05)

    with CompletionServer(reply) as server:
        start = time.monotonic()
        with pytest.raises(RunFailure, match="HTTP 400: no"):
            list(backend(server, concurrency=2, backoff=5.0).answers(requests_of(2)))
        assert time.monotonic() - start < 3.0
    assert len(server.requests) == 2


def test_a_server_that_hangs_is_given_up_after_the_timeout_and_the_retries() -> None:
    with CompletionServer(always(completion("late", delay=30.0))) as server:
        asked = backend(server, retries=1, concurrency=1)
        asked.check()
        # A busy machine may need longer than this for the list of models.
        asked.timeout = 0.1
        stream = asked.answers(requests_of(3))
        with pytest.raises(RunFailure, match=r"\(no response within 0\.1 s\) after 0 of 3 answers"):
            next(stream)
    assert len(server.requests) == 2
    hangs_once = first_then_echo(completion("late", delay=30.0))
    with CompletionServer(hangs_once) as server:
        asked = backend(server, retries=1)
        asked.check()
        asked.timeout = 1.0
        assert len(list(asked.answers(requests_of(1)))) == 1


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422])
def test_a_refusal_fails_at_once_with_the_servers_own_words(status: int) -> None:
    said = "This model's maximum context length is 4096 tokens.\nHowever, you requested \x1b[1m5000\x1b[0m tokens."
    with CompletionServer(always(refusal(status, said))) as server, pytest.raises(RunFailure) as caught:
        list(backend(server, concurrency=1).answers(requests_of(5)))
    assert str(caught.value) == (
        f"the server at {server.url} rejected a prompt after 0 of 5 answers (HTTP {status}: This model's maximum "
        "context length is 4096 tokens. However, you requested [1m5000 [0m tokens.)"
    )
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}', "too long"),
        (b'{"detail": "Not allowed"}', "Not allowed"),
        (b'{"error": "Input is too long"}', "Input is too long"),
        (b'{"detail": [{"loc": ["body"], "msg": "extra field"}]}', "extra field"),
        (HTML, "502 Bad Gateway"),
        (b"", "status 400 without a message"),
        (b"null", "without a message|null"),
    ],
)
def test_servers_put_their_words_in_different_places(body: bytes, words: str) -> None:
    with CompletionServer(always(Reply(400, body))) as server, pytest.raises(RunFailure, match=words):
        list(backend(server).answers(requests_of(1)))


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


def test_an_interrupted_run_leaves_the_rest_unasked() -> None:
    with CompletionServer(echo) as server:
        stream = backend(server, concurrency=2).answers(requests_of(10_000))
        next(stream)
        stream.close()
        time.sleep(0.1)
        # Two were under way, and each thread may have begun one more.
        assert len(server.requests) < 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_nobody_thought_of_is_no_answer_either(monkeypatch: pytest.MonkeyPatch) -> None:
    with CompletionServer(echo) as server:
        asked = backend(server, concurrency=2)
        asked.check()
        monkeypatch.setattr(asked, "_request", lambda client, request: 1 // 0)
        with pytest.raises(RunFailure, match=r"\(an unexpected error, shown above\) after 0 of 3 answers"):
            list(asked.answers(requests_of(3)))


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
            assert len(server.trials) == 1
    with CompletionServer(echo, models=[]) as server, pytest.raises(RopewalkError, match="serves nothing"):
        backend(server).check()
    assert not server.requests


def test_check_says_in_one_sentence_that_nobody_is_there() -> None:
    address = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(RopewalkError) as caught:
        backend_at(address).check()
    assert str(caught.value).startswith(f"no model server responds at {address} (")
    assert str(caught.value).endswith("; start it, or give another address")


@pytest.mark.parametrize(
    "said", [Reply(body=HTML), Reply(body=b'{"data": [5]}'), Reply(body=b"[]"), Reply(500, HTML)]
)
def test_check_refuses_a_server_of_another_kind(said: Reply) -> None:
    with CompletionServer(echo, models_reply=said) as server:
        with pytest.raises(RopewalkError, match="no model server responds at"):
            backend(server).check()
        with pytest.raises(RopewalkError, match=r"HTTP 404: Not Found\); an .* address usually ends in /v1"):
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


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host/v1",
        "http://",
        "http:///v1",
        "http://host:port/v1",
        "http://[::1/v1",
        "http://ho st/v1",
        "http://host..x/v1",
        "",
        "me:secret@host",
    ],
)
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(RopewalkError, match="is not a server address; write it like") as caught:
        backend_at(url)
    assert "secret" not in str(caught.value)


def test_addresses_with_a_query_are_refused_without_repeating_it() -> None:
    with pytest.raises(
        RopewalkError, match=r"the server address http://host/v1 has a query or fragment"
    ) as caught:
        backend_at(f"http://host/v1?key={KEY}")
    assert KEY not in str(caught.value)
    assert public_address("https://[::1]:8000/v1/") == "https://[::1]:8000/v1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": 0}, "concurrency must be 1 or more, got 0"),
        ({"retries": -1}, "retries must be 0 or more, got -1"),
        ({"timeout": 0.0}, "timeout must be more than 0, got 0.0"),
        ({"timeout": float("nan")}, "timeout must be a finite number, got nan"),
        ({"backoff": -1.0}, "backoff must be 0 or more seconds, got -1.0"),
        ({"send": "chat"}, "unknown send 'chat'; choose from auto, ids, text"),
        ({"send": "text"}, "send=text needs the model's tokenizer"),
        (
            {"extra": {"max_tokens": 1}},
            "the request field max_tokens cannot be changed, because ropewalk sets it",
        ),
        ({"extra": {"stream": True}}, "the request field stream cannot be changed, because ropewalk sets it"),
        ({"extra": {"top k": 1}}, "'top k' is not a valid name of a request field"),
        ({"extra": {"top_p": float("nan")}}, "the request field top_p must be a JSON value, got nan"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((RopewalkError, ValidationError)) as caught:
        backend_at("http://localhost:1/v1", **settings)
    error = caught.value
    assert message in (explain(error, Serving) if isinstance(error, ValidationError) else str(error))


@pytest.mark.parametrize("bad", [GenerationRequest((), 4, 100), GenerationRequest((1,), 0, 100)])
def test_bad_requests_are_refused_before_the_server_is_asked(bad: GenerationRequest) -> None:
    with pytest.raises(RopewalkError, match="request 1 has"):
        backend_at("http://localhost:1/v1").answers([*requests_of(1), bad])


def test_without_the_openai_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(RopewalkError, match=r"pip install 'ropewalk\[server\]'"):
        backend_at("http://localhost:1/v1")


def test_a_long_prompt_is_sent_without_a_look_at_each_token() -> None:
    ids = tuple(range(32_768))
    with CompletionServer(lambda value, number: completion(str(len(value["prompt"])))) as server:
        asked = backend(server)
        asked.check()
        start = time.process_time()
        assert [answer.text for answer in asked.answers([GenerationRequest(ids, 4, 40_000)])] == ["32768"]
        ours = time.process_time() - start
        with asked._client(10.0) as client:
            start = time.process_time()
            client.completions.create(model="tiny", prompt=list(ids))
            plain = time.process_time() - start
    assert ours < plain / 2


def test_halves_of_characters_are_joined_or_replaced_so_that_a_file_can_hold_them() -> None:
    for escaped, text in (("\\ud83d\\ude00", "😀"), ("a\\ud83d", "a\ufffd"), ("\\ude00b", "\ufffdb")):
        body = f'{{"choices": [{{"text": "{escaped}"}}]}}'.encode()
        said = read_completion(body).text
        assert said == text
        said.encode()


def test_only_the_first_choice_counts() -> None:
    body = json.dumps({"choices": [{"text": "a", "finish_reason": ["odd"]}, {"text": "b"}], "usage": "odd"})
    found = read_completion(body.encode())
    assert (found.text, found.new_tokens, found.finished) == ("a", None, None)


def test_words_of_others_are_one_short_line() -> None:
    assert one_line("a\n\tb\x1b[2Jc\x00 d") == "a b [2Jc d"
    assert one_line("x" * 10_000_000) == "x" * 299 + "…"
    assert len(one_line("é".encode() * 10_000)) == 300
    with pytest.raises(FaultError, match="the response is not JSON: it is empty"):
        read_completion(b"")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("2", 2.0),
        ("0.5", 0.5),
        ("99999", 60.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0),
        ("tomorrow", None),
        ("-1", None),
    ],
)
def test_a_servers_wish_to_wait_is_read_as_seconds_and_bounded(
    header: str | None, seconds: float | None
) -> None:
    assert retry_after(header) == seconds


def test_a_servers_wish_to_wait_until_a_date_is_read() -> None:
    now = datetime.now(UTC)
    for seconds, expected in ((20, 20), (-20, 0), (3600, 60)):
        header = format_datetime(now + timedelta(seconds=seconds), usegmt=True)
        # A date has whole seconds.
        assert retry_after(header) == pytest.approx(expected, abs=2)


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


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (message("7"), "7"),
        (message("7", reasoning_content="5? No."), "<think>5? No.</think>7"),
        (message("7", reasoning="5? No."), "<think>5? No.</think>7"),
        (message(None, "length", reasoning_content="5? N"), "<think>5? N"),
        (message("<think>5</think>7"), "<think>5</think>7"),
        (message("", reasoning_content=None), ""),
    ],
)
def test_thoughts_that_a_server_splits_off_stand_between_their_marks(said: Reply, text: str) -> None:
    assert read_chat(said.body).text == text


@pytest.mark.parametrize(
    "said",
    [
        message(None),
        message(["x"]),
        message("x", reasoning_content=5),
        message("x", "abort"),
        completion("x"),
        Reply(body=b'{"choices": []}'),
        Reply(body=b'{"choices": [{"message": "x"}]}'),
        Reply(body=HTML),
    ],
)
def test_what_is_no_message_is_never_an_answer(said: Reply) -> None:
    with pytest.raises(FaultError):
        read_chat(said.body)


def test_a_chat_that_was_cut_short_by_the_server_is_noticed() -> None:
    # Two of the request's three tokens are the texts' own; the server's template may be shorter than ours.
    for read, good in ((2, True), (1, False)):
        with CompletionServer(lambda value, number, read=read: message("x", read=read)) as server:  # type: ignore[misc]
            stream = backend(server, endpoint="chat").answers(turns_of(1))
            if good:
                assert [answer.text for answer in stream] == ["x"]
            else:
                with pytest.raises(RunFailure, match="it read only 1 of the 2 tokens"):
                    list(stream)
