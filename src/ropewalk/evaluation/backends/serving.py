"""Address of a model server and the format of its requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.protocol import Endpoint, Send
from ropewalk.io.settings import COMMON, Option, Settings, pairs
from ropewalk.io.urls import masked

RESERVED = ("model", "prompt", "messages", "max_tokens", "temperature")
"""Fields of every request that determine the answer."""

UNREADABLE = ("stream", "n", "best_of", "echo", "suffix")
"""Fields that change the format of a response so that it can no longer be read as one answer."""


def json_values(value: Any) -> Any:
    """Parse additional request fields, given as a mapping or as ``KEY=VALUE`` texts with JSON values."""
    if isinstance(value, Mapping):
        check_extra(value)
    if not isinstance(value, list | tuple):
        return value
    found: dict[str, Any] = {}
    for name, text in pairs(value, example="top_k=1").items():
        try:
            found[name] = json.loads(text)
        # Thousands of nested brackets exceed Python's recursion limit inside json.
        except (ValueError, RecursionError):
            raise ValueError(
                f"{name}={text}: {text!r} is not a JSON value; write a string as {name}='{json.dumps(text)}'"
            ) from None
    check_extra(found)
    return found


OF_SERVER, OF_WORDS = "server", "words"
"""Values of --tokenizer that are no folder and no Hub id."""


class Serving(Settings):
    """Address of a model server and the format of its requests.

    Attributes:
        url: address of the server, including its path; several servers of one model are separated by commas.
        model: name of the model on the server; None if it serves only one.
        tokenizer: ``server``, ``words``, or a folder or Hub id; None to look for one.
        concurrency: maximum number of concurrent requests.
        timeout: seconds after which an attempt without a complete response fails.
        retries: additional attempts per prompt after a lost connection, a timeout, HTTP 408 or 5xx, or a response that
            is unreadable or an error. A wait for a rate limit (HTTP 429, or 503 with Retry-After) uses none, while the
            waits for a prompt add up to at most ``timeout``.
        send: ``ids`` sends token ids, including BOS. ``text``, for servers that reject ids, sends a text that the
            tokenizer encodes as the same ids: without BOS if the tokenizer adds it, otherwise with BOS written out.
            ``auto`` sends ids, or text if the server rejects ids.
        extra: additional fields of every request, JSON values.
        endpoint: ``completions`` sends whole prompts. ``chat``, for servers that have no other, sends turns, to which
            the server applies its own template.
        same_model: whether a server at another address may continue an evaluation.
    """

    group: ClassVar[str | None] = "Server"

    url: Annotated[str, Option(name="--server", metavar="URL", group=COMMON.group)] = Field(
        description="Measure the model that runs on this OpenAI-compatible server: http://localhost:8000/v1. Tasks "
        "that need losses, such as perplexity, do not run. Several servers, separated by commas, share the prompts. "
        "The API key is read from OPENAI_API_KEY."
    )
    model: Annotated[str | None, Option(name="--server-model")] = Field(
        default=None, description="Name of the model on the server. Default: the server's only model."
    )
    tokenizer: Annotated[str | None, Option(metavar="SOURCE")] = Field(
        default=None,
        description="What counts the tokens of prompts: a folder or Hub id with the model's tokenizer, server (the "
        "server's own /tokenize), or words (an estimate; lengths are then approximate). Default: the tokenizer of "
        "MODEL, of the checkpoint that the server names, or of the model's name on the Hub; otherwise the server.",
    )
    concurrency: int = Field(default=8, ge=1, description="Maximum number of concurrent requests.")
    timeout: float = Field(
        default=600.0,
        gt=0,
        description="Number of seconds after which a request without a complete response fails.",
    )
    retries: int = Field(default=4, ge=0, description="Number of retries of a failed request.")
    send: Send = Field(
        default="auto",
        description="Format in which prompts are sent: ids (token ids), text, or auto (ids if the server accepts them, "
        "otherwise text).",
    )
    endpoint: Endpoint = Field(
        default="completions",
        description="Endpoint of the server: completions, or chat for servers without a completions endpoint. With "
        "chat, the server applies the chat template; --chat is still required, so that ropewalk counts the "
        "template's tokens.",
    )
    extra: Annotated[
        dict[str, Any],
        BeforeValidator(json_values),
        Option(name="--server-extra", metavar="KEY=VALUE", repeated=True),
    ] = Field(
        default={},
        description="Field to add to every request, with its value as JSON: top_k=1.",
    )
    same_model: bool = Field(
        default=False,
        description="Continue the evaluation in --out on a server at another address, because the same model runs "
        "there. Without it, another address is refused.",
    )


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise for additional request fields that cannot be sent.

    Raises:
        RopewalkError: for an invalid name, a field that ropewalk sets itself or that changes the response format, or a
            value that is not JSON.
    """
    for name, value in extra.items():
        if not name.isidentifier():
            raise RopewalkError(f"{name!r} is not a valid name of a request field; write a name like top_k")
        if name in RESERVED or name in UNREADABLE:
            why = "sets it" if name in RESERVED else "cannot read the responses that it causes"
            raise RopewalkError(
                f"the request field {name} cannot be set, because ropewalk {why}; remove the field"
            )
        try:
            # By default, json.dumps writes NaN, which is not JSON.
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RopewalkError(f"the request field {name} must be a JSON value, got {value!r}") from error


def public_address(base_url: str) -> str:
    """Return a server's address without user and password, for the record.

    Raises:
        RopewalkError: if it is not the address of an HTTP server, or has a query or fragment.
    """
    try:
        parts = urlsplit(base_url)
        # Invalid host names (no IDNA form), ports and brackets all raise ValueError here.
        named = bool((parts.hostname or "").encode("idna")) and parts.port != 0
        good = named and parts.scheme in ("http", "https") and base_url.isprintable() and " " not in base_url
    except ValueError:
        good = False
    if not good:
        # Print neither the part before an @ nor a query: they may contain credentials.
        shown = masked(base_url.rpartition("@")[2].partition("?")[0])
        raise RopewalkError(
            f"{shown!r} is not a server address; write an address like http://localhost:8000/v1"
        )
    # Without a final slash, so that one server has one name.
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
    if parts.query or parts.fragment:
        raise RopewalkError(
            f"the server address {address} has a query or fragment; remove everything from ? or # on"
        )
    return address
