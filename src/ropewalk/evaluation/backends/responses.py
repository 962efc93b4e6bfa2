"""Read the responses of an OpenAI-compatible server: answers, lists of models, rejections and faults."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from ropewalk.evaluation.backends.protocol import END_OF_THOUGHTS, THOUGHTS

LONGEST_REMARK = 300
"""Maximum number of characters of a server's message that an error message quotes."""

LONGEST_WAIT = 60.0
"""Maximum seconds to wait for a server's Retry-After header."""

# Any other reason leaves open how the answer ended.
_FINISHED = {"stop": True, "length": False}
# Answers that the server gave up, such as vLLM's after an abort.
_BROKEN_OFF = ("abort", "error")


class RefusalError(Exception):
    """The server rejects a request permanently; retrying would not help.

    Attributes:
        status: HTTP status; None if the response was successful but not usable.
        named: fields of the request that the server's message names.
    """

    @property
    def of_one_prompt(self) -> bool:
        """Whether it may be about the prompt, such as its length; other prompts may be accepted then."""
        return self.status in (None, 400, 413, 422)

    def __init__(self, reason: str, status: int | None = None, named: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.status, self.named = status, named


class FaultError(Exception):
    """An attempt failed temporarily; a retry may succeed.

    Attributes:
        reason: the reason, on one line.
        wait: seconds that the server asks to wait, or None.
        status: HTTP status; None if there was no response, or an unreadable one.
    """

    def __init__(self, reason: str, wait: float | None = None, status: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.wait, self.status = reason, wait, status


@dataclass(frozen=True)
class Completion:
    """A server's completion of a prompt; the fields have the meaning of those of :class:`Answer`.

    Attributes:
        prompt_tokens: tokens of the prompt by the server's count; None if it does not report it.
        model: name that the server gives its model; None if it gives none.
    """

    text: str
    new_tokens: int | None
    finished: bool | None
    prompt_tokens: int | None = None
    model: str | None = None


def read_completion(body: bytes) -> Completion:
    """Read the first choice in a response of ``/completions``.

    Raises:
        FaultError: if the response is not JSON, has no choice with a text, or was aborted by the server.
    """
    value = _answer(body)
    match value:
        case {"choices": [{"text": str(text)} as choice, *_]}:
            pass
        case _:
            raise FaultError(f"the response has no text: {one_line(body)}")
    reason = choice.get("finish_reason")
    if reason in _BROKEN_OFF:
        raise FaultError(f"the server aborted an answer ({reason})")
    usage = value.get("usage")
    tokens = _whole(usage, "completion_tokens")
    model = value.get("model")
    return Completion(
        _whole_characters(text),
        tokens,
        _FINISHED.get(reason) if isinstance(reason, str) else None,
        _whole(usage, "prompt_tokens"),
        model if isinstance(model, str) and model else None,
    )


def read_chat(body: bytes) -> Completion:
    """Read the first choice in a response of ``/chat/completions``.

    Thoughts that the server has split off are put back between their marks, so that all answers are read alike.

    Raises:
        FaultError: as for :func:`read_completion`.
    """
    value = _answer(body)
    match value:
        case {"choices": [{"message": dict(message)}, *_]}:
            pass
        case _:
            raise FaultError(f"a response without a message: {one_line(body)}")
    content = message.get("content")
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(content, str | None) or not isinstance(thoughts, str | None):
        raise FaultError(f"the response has no text: {one_line(body)}")
    if content is None and thoughts is None:
        raise FaultError(f"the response has no text: {one_line(body)}")
    text = content or ""
    if thoughts:
        text = f"{THOUGHTS}{thoughts}{END_OF_THOUGHTS if text else ''}{text}"
    return read_completion(json.dumps({**value, "choices": [{**value["choices"][0], "text": text}]}).encode())


def _answer(body: bytes) -> Any:
    """The JSON value of a successful response, unless it is an error: some servers and proxies report them so."""
    value = read_json(body)
    if isinstance(value, Mapping) and not value.get("choices"):
        error = value.get("error") or (value if value.get("object") == "error" else None)
        if error:
            raise FaultError(f"HTTP 200 with an error in place of an answer: {server_message(error, 200)}")
    return value


def _whole(usage: object, key: str) -> int | None:
    value = usage.get(key) if isinstance(usage, dict) else None
    # Not isinstance, because True is an int too.
    return value if type(value) is int else None


def read_models(body: bytes) -> list[str]:
    """Read the names of the models in a response of ``/models``.

    Raises:
        FaultError: if the response is not a list of models.
    """
    match read_json(body):
        case {"data": list(entries)}:
            names = [entry.get("id") if isinstance(entry, dict) else None for entry in entries]
            if all(isinstance(name, str) for name in names):
                return [str(name) for name in names]
    raise FaultError(f"the response is not a list of models: {one_line(body)}")


def error_value(body: bytes) -> Any:
    """The JSON value under ``error`` in a response that is not a success, or else the whole value, or its text."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        if _HTML.match(body):
            title = _TITLE.search(body[:_MOST_WORDS])
            named = one_line(title[1]) if title else ""
            return f"an HTML page ({named})" if named else "an HTML page"
        return body.decode("utf-8", "replace").strip()
    return value.get("error", value) if isinstance(value, Mapping) else value


def server_message(body: object, status: int) -> str:
    """Return a server's message about a rejected request, on one line.

    Args:
        body: the JSON value under ``error``, or the whole response, depending on the server.
        status: HTTP status, used if there is no message.
    """
    if isinstance(body, Mapping):
        message = body.get("message") or body.get("detail") or body.get("error") or dict(body)
    else:
        message = body
    return one_line(
        message if isinstance(message, str) else json.dumps(message, default=str) if message else ""
    ) or (f"status {status} without a message")


def named_fields(body: object, fields: Collection[str]) -> tuple[str, ...]:
    """Find the request fields that a server's rejection names.

    FastAPI lists errors with their location in the request, OpenAI sends a ``param``, and older vLLM writes FastAPI's
    list into the message. If a location is given, only locations count, because the message may quote the whole
    request. Otherwise a field counts if its name occurs as a word in the message; ``model`` and ``prompt``, which are
    ordinary words too, count only in quotes.

    Args:
        body: the JSON value under ``error``, or the whole response.
        fields: names of the fields that were sent.

    Returns:
        The named fields in the order of ``fields``; empty if the rejection has another reason.

    Example:
        >>> named_fields({"detail": "Unexpected fields in the request: {'best_of'}"}, ["prompt", "best_of"])
        ('best_of',)
    """
    value = body if isinstance(body, Mapping) else {}
    messages = [value.get(key) for key in ("message", "detail", "error")] if value else [body]
    words = "\n".join(
        each if isinstance(each, str) else json.dumps(each, default=str) for each in messages if each
    )
    # A server may quote a prompt of a million tokens, and the searches below must stay quick.
    words = words[:_MOST_WORDS]
    # Where the error says which field it means, other fields that its text merely mentions are not blamed.
    places = set(_PLACE.findall(words))
    # FastAPI's list of errors, each with its location.
    for errors in messages:
        for error in errors if isinstance(errors, list) else ():
            place = error.get("loc") if isinstance(error, Mapping) else None
            places |= {each for each in place if isinstance(each, str)} if isinstance(place, list) else set()
    # OpenAI names a single field here.
    if not places and value.get("param") in fields:
        places = {value["param"]}
    return tuple(
        name for name in fields if (name in places if places else re.search(_word(name), words) is not None)
    )


_MOST_WORDS = 100_000
_PLACE = re.compile(r"'loc': \('body', '(\w+)'")


def _word(name: str) -> str:
    quoted = rf"""["'`]{re.escape(name)}["'`]"""
    return quoted if name in ("model", "prompt") else rf"(?<![\w-]){re.escape(name)}(?![\w-])"


def one_line(message: str | bytes) -> str:
    """Make foreign text fit for an error message: one line, without control characters, and short."""
    # A character has at most four bytes, so the rest of a megabyte of HTML need not be decoded.
    text = message[: 4 * LONGEST_REMARK].decode("utf-8", "replace") if isinstance(message, bytes) else message
    text = text[: 4 * LONGEST_REMARK]
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= LONGEST_REMARK else line[: LONGEST_REMARK - 1] + "…"


def retry_after(header: str | None) -> float | None:
    """Return the seconds in a Retry-After header, a number or a date, at most a minute; None if it is neither."""
    if header is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", header.strip()):
        return min(float(header), LONGEST_WAIT)
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return None
    # A date without a zone is one of HTTP's older forms, which mean UTC.
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return min(max((at - datetime.now(UTC)).total_seconds(), 0.0), LONGEST_WAIT)


_HTML = re.compile(rb"\s*<(!doctype html|html)\b", re.IGNORECASE)
_TITLE = re.compile(rb"<(?:title|h1)>([^<]*)</", re.IGNORECASE)


def read_json(body: bytes) -> Any:
    """The JSON value of a response.

    Raises:
        FaultError: if it is not JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        what = "it is an HTML page" if _HTML.match(body) else one_line(body) or "it is empty"
        raise FaultError(f"the response is not JSON: {what}") from None


def _whole_characters(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates: JSON may contain them, but files cannot."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
