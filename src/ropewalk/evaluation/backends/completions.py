"""What servers say, read with suspicion: pure functions from bytes and words to values."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ropewalk.errors import RopewalkError

LONGEST_REMARK = 300
"""Characters of a server's own words that an error message repeats."""

LONGEST_WAIT = 60.0
"""Seconds that a server's Retry-After is taken at its word."""

_FINISHED = {"stop": True, "length": False}
_BROKEN_OFF = ("abort", "error")


class FaultError(Exception):
    """One attempt failed in a way that another may not.

    Attributes:
        reason: in words, on one line.
        wait: seconds that the server asks to wait, or None.
        status: of HTTP; None where no answer came, or one that makes no sense.
    """

    def __init__(self, reason: str, wait: float | None = None, status: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.wait, self.status = reason, wait, status


@dataclass(frozen=True)
class Completion:
    """What a server added to a prompt; the fields are those of an Answer."""

    text: str
    new_tokens: int | None
    finished: bool | None
    prompt_tokens: int | None = None


def read_completion(body: bytes) -> Completion:
    """The first choice of an answer of ``/completions``.

    Raises:
        FaultError: if it is not JSON, has no choice with a text, or was broken off by the server.
    """
    value = _json(body)
    match value:
        case {"choices": [{"text": str(text)} as choice, *_]}:
            pass
        case _:
            raise FaultError(f"an answer without a text: {one_line(body)}")
    reason = choice.get("finish_reason")
    if reason in _BROKEN_OFF:
        raise FaultError(f"the server broke an answer off ({reason})")
    usage = value.get("usage")
    tokens = _whole(usage, "completion_tokens")
    return Completion(
        _whole_characters(text),
        tokens,
        _FINISHED.get(reason) if isinstance(reason, str) else None,
        _whole(usage, "prompt_tokens"),
    )


def _whole(usage: object, key: str) -> int | None:
    value = usage.get(key) if isinstance(usage, dict) else None
    return value if type(value) is int else None


def read_models(body: bytes) -> list[str]:
    """Names of the models that an answer of ``/models`` lists.

    Raises:
        FaultError: if it is not such a list.
    """
    match _json(body):
        case {"data": list(entries)}:
            names = [entry.get("id") if isinstance(entry, dict) else None for entry in entries]
            if all(isinstance(name, str) for name in names):
                return [str(name) for name in names]
    raise FaultError(f"no list of models: {one_line(body)}")


def server_message(body: object, status: int) -> str:
    """What a server says of a request that it refused, on one line.

    Args:
        body: the JSON value under ``error``, or the whole answer: servers differ.
        status: HTTP status, said where there are no words.
    """
    if isinstance(body, Mapping):
        said = body.get("message") or body.get("detail") or body.get("error") or dict(body)
    else:
        said = body
    return one_line(said if isinstance(said, str) else json.dumps(said, default=str) if said else "") or (
        f"status {status} without a word"
    )


def named_fields(body: object, fields: Collection[str]) -> tuple[str, ...]:
    """The fields of a request that a server's refusal of it names.

    FastAPI lists errors with their place in the request, OpenAI has a ``param``, and older vLLM writes FastAPI's list
    into the message. Where a place is given, the words count no more: they may repeat the whole request. Else a name
    counts where it stands as a word; ``model`` and ``prompt``, which are words of the language too, only in quotes.

    Args:
        body: the JSON value under ``error``, or the whole answer.
        fields: names of the fields that were sent.

    Returns:
        In the order of ``fields``; none where the refusal is about something else.

    Example:
        >>> named_fields({"detail": "Unexpected fields in the request: {'best_of'}"}, ["prompt", "best_of"])
        ('best_of',)
    """
    value = body if isinstance(body, Mapping) else {}
    said = [value.get(key) for key in ("message", "detail", "error")] if value else [body]
    words = "\n".join(
        each if isinstance(each, str) else json.dumps(each, default=str) for each in said if each
    )
    words = words[:_MOST_WORDS]
    places = set(_PLACE.findall(words))
    for errors in said:
        for error in errors if isinstance(errors, list) else ():
            place = error.get("loc") if isinstance(error, Mapping) else None
            places |= {each for each in place if isinstance(each, str)} if isinstance(place, list) else set()
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


def one_line(said: str | bytes) -> str:
    """Somebody else's words, fit for an error message: one line, nothing that moves a terminal, not long."""
    # Four bytes a character at most; the rest of a megabyte of HTML need not be read.
    text = said[: 4 * LONGEST_REMARK].decode("utf-8", "replace") if isinstance(said, bytes) else said
    text = text[: 4 * LONGEST_REMARK]
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= LONGEST_REMARK else line[: LONGEST_REMARK - 1] + "…"


def retry_after(header: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, a minute at most; None where it says no number."""
    if header is None or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", header.strip()):
        return None
    return min(float(header), LONGEST_WAIT)


def public_address(base_url: str) -> str:
    """An address without user and password, for the record.

    Raises:
        RopewalkError: if it is no address of an HTTP server, or has a query.
    """
    try:
        parts = urlsplit(base_url)
        # A name that has no IDNA form, or a port that is no number, is a ValueError like a bracket left open.
        named = bool((parts.hostname or "").encode("idna")) and parts.port != 0
        good = named and parts.scheme in ("http", "https") and base_url.isprintable() and " " not in base_url
    except ValueError:
        good = False
    if not good:
        # Not repeated here: what stands before an @ may be a password.
        shown = base_url.rpartition("@")[2]
        raise RopewalkError(f"{shown!r} is no address of a server; write it like http://localhost:8000/v1")
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
    if parts.query or parts.fragment:
        raise RopewalkError(f"the address {address} of a server goes on after its path; leave out ? and #")
    return address


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise FaultError(f"an answer that is no JSON: {one_line(body) or 'nothing at all'}") from None


def _whole_characters(text: str) -> str:
    """JSON may hold halves of characters, which no file takes: pairs are joined, and the rest replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
