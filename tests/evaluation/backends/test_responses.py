"""Responses are read as what they are, and what is no answer is never taken for one."""

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from ropewalk.evaluation.backends.responses import (
    FaultError,
    named_fields,
    one_line,
    read_chat,
    read_completion,
    read_models,
    retry_after,
)
from tests.completion_server import (
    CompletionServer,
    Reply,
    completion,
    message,
)
from tests.evaluation.backends.server_cases import (
    HTML,
    always,
    rejection,
)


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
    ("body", "words"),
    [
        (b'{"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}', "too long"),
        (b'{"detail": "Not allowed"}', "Not allowed"),
        (b'{"error": "Input is too long"}', "Input is too long"),
        (b'{"detail": [{"loc": ["body"], "msg": "extra field"}]}', "extra field"),
        (HTML, r"an HTML page \(502 Bad Gateway\)"),
        (
            b"<!DOCTYPE html><html><head><title>Oops</title></head><h1>no</h1></html>",
            r"an HTML page \(Oops\)",
        ),
        (b"<html><p>gone</p></html>", "HTTP 400: an HTML page"),
        (b"", "status 400 without a message"),
        (b"null", "without a message|null"),
    ],
)
def test_servers_put_their_words_in_different_places(body: bytes, words: str) -> None:
    with CompletionServer(always(Reply(400, body))) as server:
        assert re.search(words, rejection(server))


@pytest.mark.parametrize(
    "said",
    [
        {"error": {"message": "out of memory", "code": 500}},
        {"error": "out of memory", "choices": []},
        {"object": "error", "message": "out of memory", "code": 400},
    ],
)
@pytest.mark.parametrize("read", [read_completion, read_chat])
def test_an_error_in_a_successful_response_is_called_one(said: Any, read: Callable[[bytes], Any]) -> None:
    with pytest.raises(FaultError, match=r"^HTTP 200 with an error in place of an answer: out of memory$"):
        read(json.dumps(said).encode())


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
    with pytest.raises(FaultError, match="the response is not JSON: it is an HTML page"):
        read_models(b" <!DOCTYPE html><html></html>")
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
