"""What a server says of the model that it serves: the length of its context, and the checkpoint that it loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ropewalk.errors import RopewalkError


@dataclass(frozen=True)
class Served:
    """A server's words about its model; None where it says nothing.

    Attributes:
        context: tokens of prompt and answer together.
        root: folder, file or Hub id of the checkpoint that it loaded.
        source: field and path that state the context.
    """

    context: int | None = None
    root: str | None = None
    source: str | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON values without those that are not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def require(self, length: int, address: str) -> None:
        """Raise if the server's context is shorter than this many tokens.

        Raises:
            RopewalkError: names the server, both lengths and the options that make its context longer.
        """
        if self.context is not None and self.context < length:
            raise RopewalkError(
                f"the server at {address} has a context of {self.context:,} tokens ({self.source}), but the longest "
                f"length is {length:,}; start the server with a longer context (vLLM: --max-model-len {length}, "
                f"SGLang: --context-length {length}, llama.cpp: --ctx-size {length} for each slot), or give "
                "shorter --lengths"
            )


def from_models(body: bytes, model: str) -> Served:
    """Read the entry of a model in a response of ``/v1/models``, as vLLM and SGLang write it."""
    entries = _mapping(body).get("data")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and entry.get("id") == model:
            context = _tokens(entry.get("max_model_len"))
            return Served(
                context, _text(entry.get("root")), "max_model_len in /v1/models" if context else None
            )
    return Served()


def from_props(body: bytes) -> Served:
    """Read a response of ``/props``, llama.cpp's: the context of one slot, whatever the number of slots."""
    value = _mapping(body)
    settings = value.get("default_generation_settings")
    context = _tokens(settings.get("n_ctx")) if isinstance(settings, Mapping) else None
    return Served(context, _text(value.get("model_path")), "n_ctx in /props" if context else None)


def from_server_info(body: bytes) -> Served:
    """Read a response of ``/get_server_info``, SGLang's; it states only a context that an option has set."""
    value = _mapping(body)
    context = _tokens(value.get("context_length"))
    return Served(
        context, _text(value.get("model_path")), "context_length in /get_server_info" if context else None
    )


def names_model(models: bytes, asked: str, answered: str) -> bool:
    """Whether a response that names the model ``answered`` can be one of the model ``asked``.

    Servers name a model by its alias, its date or revision (``gpt-4o-2024-08-06``, ``org/model@main``), its file, the
    checkpoint that they loaded (``root`` in the list of models), or the first of several names of one checkpoint.

    Args:
        models: response of ``/v1/models``; empty if there is none.
        asked: name in the request.
        answered: name in the response.
    """
    roots = {}
    entries = _mapping(models).get("data")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), str):
            roots[entry["id"]] = _text(entry.get("root"))
    root = roots.get(asked)
    if _same_name(asked, answered):
        return True
    return root is not None and (_same_name(root, answered) or roots.get(answered) == root)


_VERSION = re.compile(r"[@:].*|-[0-9]{3,8}|-[0-9]{4}-[0-9]{2}-[0-9]{2}")
"""What a more exact name appends: a revision, a tag, or a date."""


def _same_name(asked: str, answered: str) -> bool:
    asked, answered = (
        re.sub(r"(\.gguf|[-:]latest)$", "", name.rstrip("/").rpartition("/")[2].lower())
        for name in (asked, answered)
    )
    more = answered.removeprefix(asked)
    return answered == asked or (answered.startswith(asked) and _VERSION.fullmatch(more) is not None)


PLACES = (("/props", from_props), ("/get_server_info", from_server_info))
"""Paths of servers whose list of models states no length, below the root of the server, and how they are read."""


def _mapping(body: bytes) -> Mapping[str, Any]:
    # A server of another kind may say anything here; nothing depends on it.
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, Mapping) else {}


def _tokens(value: object) -> int | None:
    # Not isinstance, because True is an int too. llama.cpp's router has no context of its own and says 0.
    return value if type(value) is int and value > 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
