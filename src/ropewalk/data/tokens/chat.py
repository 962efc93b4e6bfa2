"""Conversations and texts with loss on some spans only: the assistant's turns, or spans that a record names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, normalizers

from ropewalk.data.tokens.render import render
from ropewalk.errors import RopewalkError
from ropewalk.io.digests import digest

_BREAK = "\uffff"
"""A noncharacter of Unicode: it marks where the spelling of a special token in a message is broken up."""

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Noncharacters that stand around the assistant's text in a rendered conversation."""

_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
DATE = "26 Jul 2024"
"""Date for Llama's own templates; their default. The date of the day would give other bytes every day."""

_ENCODING = 2
"""Version of how conversations become tokens. Stored tokens of another version are not used again."""


@dataclass(frozen=True)
class Conversation:
    """One conversation, before its template is applied.

    Attributes:
        content: JSON object with ``messages`` and ``tools``.
        origin: file and line or row, for error messages.
    """

    content: str
    origin: str


@dataclass(frozen=True)
class SpannedText:
    """A text of which only some spans count in the loss, as in :func:`encode_spans`."""

    content: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and its special tokens, as plain values that can be sent to a worker process.

    Attributes:
        template: the Jinja template.
        names: special tokens by the names that templates use (``bos_token``).
        spellings: texts of the special tokens in the vocabulary.
    """

    template: str
    names: Mapping[str, str]
    spellings: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Digest of everything that the tokens of a conversation depend on, beside the tokenizer."""
        return digest([self.template, dict(self.names), self.spellings, DATE, _ENCODING])


def chat_template(tokenizer: Any) -> ChatTemplate | None:
    """The chat template of a transformers tokenizer; None if it has none.

    Raises:
        RopewalkError: if it has several, and none is the default.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    names = {
        name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)
    }
    # Longest first: in a pattern of alternatives, a spelling that begins another would hide it.
    spellings = tuple(sorted((each.content for each in added if each.special), key=len, reverse=True))
    try:
        return ChatTemplate(tokenizer.get_chat_template(), names, spellings)
    except ValueError as error:
        raise RopewalkError(
            f"the tokenizer {tokenizer.name_or_path!r} has several chat templates, and none with the name default; "
            "give the one to use this name"
        ) from error


def required_template(tokenizer: Any) -> ChatTemplate:
    """The chat template of a tokenizer that is to render conversations.

    Raises:
        RopewalkError: if it has none, or one that depends on the day.
    """
    found = chat_template(tokenizer)
    if found is None:
        raise RopewalkError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template to render messages with; give the "
            "tokenizer of an instruction-tuned model"
        )
    if "strftime_now" in found.template and "date_string" not in found.template:
        raise RopewalkError(
            f"the chat template of {tokenizer.name_or_path!r} writes today's date (strftime_now), so rows would "
            "differ from day to day; give a template with a fixed date"
        )
    return found


def encode_conversation(
    conversation: Conversation, template: ChatTemplate | None, backend: Tokenizer
) -> NDArray[np.int32]:
    """Render a conversation and encode it.

    A template with ``{% generation %}`` states itself which text the assistant wrote. For any other, a turn of the
    assistant is what the conversation up to this turn adds to the conversation before it with a generation prompt. It
    includes the token that ends the turn, but no white space after that token. Text of a message that spells a special
    token gets the tokens of any other text, so that no message can end its own turn.

    Returns:
        int32 ``[tokens]``. A token outside the assistant's turns is stored as ``~id``, which is negative;
        :func:`token_ids` returns the ids.

    Raises:
        RopewalkError: if there is no template, the template rejects the conversation, or it renders earlier turns
            differently once another turn follows, so that turns cannot be found.
    """
    if template is None:
        raise RopewalkError(
            f"{conversation.origin}: the tokenizer has no chat template to render messages with"
        )
    record = _guarded(json.loads(conversation.content), template.spellings, conversation.origin)
    text, turns = _turns(record, template, conversation.origin)
    return encode_spans(text, turns, _message_backend(backend))


def encode_spans(text: str, spans: Sequence[tuple[int, int]], backend: Tokenizer) -> NDArray[np.int32]:
    """Encode a text of which only some spans count in the loss.

    Args:
        text: the text.
        spans: start and stop in characters of each span, at least one, ascending and apart.
        backend: the tokenizer, which maps each token to the characters that it stands for.

    Returns:
        int32 ``[tokens]``. A token without a character in a span is stored as ``~id``, which is negative. A token that
        a span cuts, so that some of its characters lie outside, is a target.
    """
    encoding = backend.encode(text, add_special_tokens=False)
    found = np.array(encoding.ids, np.int32)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    starts, stops = np.array(spans, np.int64).reshape(-1, 2).T
    # Offsets of white space may be empty, so a token also belongs to a span in which it starts.
    ends = np.maximum(offsets[:, 1], offsets[:, 0] + 1)
    # The first span that stops behind the token's start is the only one that may begin before its end.
    first = np.searchsorted(stops, offsets[:, 0], side="right")
    trained = np.append(starts, np.iinfo(np.int64).max)[first] < ends
    return np.where(trained, found, ~found)


# One, because a process encodes the conversations of one tokenizer.
@lru_cache(maxsize=1)
def _message_backend(backend: Tokenizer) -> Tokenizer:
    """A copy of a backend that finds special tokens first, and then removes the breaks that hide spellings from it."""
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        # Found after the normalizer otherwise, where the breaks are gone.
        token["normalized"] = token["normalized"] and not token["special"]  # codespell:ignore normalized
    found = Tokenizer.from_str(json.dumps(state))
    own = [] if found.normalizer is None else [found.normalizer]
    found.normalizer = normalizers.Sequence([normalizers.Replace(_BREAK, ""), *own])
    return found


def token_ids(stored: NDArray[np.int32]) -> NDArray[np.int32]:
    """Token ids of stored tokens, of which those that are never targets are stored as ``~id``."""
    return np.where(stored < 0, ~stored, stored)


def _turns(record: dict[str, Any], template: ChatTemplate, origin: str) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and the start and stop of each of the assistant's turns in it."""
    messages = record["messages"]
    assistant = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and not _GENERATION.search(template.template)
    ]
    # The whole conversation, then before and after each turn of the assistant that the template does not mark.
    stops = [(len(messages), False)]
    for number in assistant:
        stops += [(number, True), (number + 1, False)]
    try:
        text, *parts = render(
            _GENERATION.sub(_mark, template.template),
            {"date_string": DATE, **template.names},
            messages,
            stops,
            record.get("tools") or None,
        )
    except RopewalkError as error:
        raise RopewalkError(f"{origin}: the chat template rejects the conversation: {error}") from error
    if _GENERATION.search(template.template):
        text, turns = _marked(text)
    else:
        turns = []
        for number, before, after in zip(assistant, parts[::2], parts[1::2], strict=True):
            if not after.startswith(before) or not text.startswith(after):
                raise RopewalkError(
                    f"{origin}: the chat template renders message {number + 1} differently either after a generation "
                    "prompt or before other messages, so the assistant's turns cannot be found; use a template with "
                    "{% generation %}"
                )
            bare = after.rstrip()
            ended = len(bare) > len(before) and bare.endswith(template.spellings)
            turns.append((len(before), len(bare) if ended else len(after)))
    if not any(start < stop for start, stop in turns):
        raise RopewalkError(
            f"{origin}: the chat template renders no text of the assistant to train on; leave the record out, or "
            "change the template"
        )
    return text, turns


def _mark(tag: re.Match[str]) -> str:
    """Write a noncharacter where a template marks the assistant's text, with the white space control of the tag."""
    return f"{{%{tag[1]} if true %}}{{{{ '{_END if tag[2] else _BEGIN}' }}}}{{% endif {tag[3]}%}}"


def _marked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without its marks, and the start and stop of each marked part."""
    # The parts lie outside and inside the marks by turns.
    parts = re.split(f"[{_BEGIN}{_END}]", text)
    ends = list(accumulate(map(len, parts)))
    return "".join(parts), list(zip(ends[0:-1:2], ends[1::2], strict=True))


def _guarded(value: Any, spellings: tuple[str, ...], origin: str) -> Any:
    """Break up special tokens that the strings of a record spell."""
    if isinstance(value, str):
        if found := {_BREAK, _BEGIN, _END}.intersection(value):
            raise RopewalkError(
                f"{origin}: a message contains the noncharacter U+{ord(min(found)):04X}; remove it"
            )
        if not any(each in value for each in spellings):
            return value
        pattern = "|".join(map(re.escape, spellings))
        # Between all characters, so that no part of the spelling is a special token either.
        return re.sub(pattern, lambda match: f"{_BREAK}{_BREAK.join(match[0])}{_BREAK}", value)
    if isinstance(value, list):
        return [_guarded(each, spellings, origin) for each in value]
    if isinstance(value, dict):
        return {
            _guarded(key, spellings, origin): _guarded(each, spellings, origin) for key, each in value.items()
        }
    return value
