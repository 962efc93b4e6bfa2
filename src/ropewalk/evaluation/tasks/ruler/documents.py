"""Which documents stand beside a question's own: drawn in order, the last ones chosen by their size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from ropewalk.evaluation.prompt import PromptEncoder

CHOICE = 64
"""Documents that are looked at together; of so many the last ones are chosen."""
MOST_DROPPED = 2
"""Documents that are taken out again where no choice of more fills the room."""
HEADING = "Document 99:\n"
AFTER = "\n\n"

Sizes = Callable[[Sequence[int]], list[int]]
"""From indices of documents to the tokens that each adds to a prompt, 1 or more."""

Measured = tuple[int, int]
"""Index of a document, and its tokens."""


def others_in_order(
    own: Sequence[int], nearest: Sequence[int], documents: int, draw: random.Random
) -> Iterator[int]:
    """Documents that are not a question's own: those of its article, then all others; then the same again.

    Args:
        own: the question's documents.
        nearest: documents of its article, its own perhaps among them.
        documents: how many there are.
        draw: decides the order.

    Yields:
        Indices, without end; nothing where there are no others.
    """
    seen = set(own)
    passed: list[int] = []
    first = [index for index in dict.fromkeys(nearest) if index not in seen]
    draw.shuffle(first)
    # A shuffle of all documents would cost more than the few that a short prompt needs.
    while len(seen) < documents:
        index = first.pop() if first else draw.randrange(documents)
        if index not in seen:
            seen.add(index)
            passed.append(index)
            yield index
    while passed:
        yield from passed


def filling(others: Iterator[int], sizes: Sizes, room: int, slack: int) -> list[int]:
    """As many of the first documents as fit, and such last ones as fill the room.

    Args:
        others: documents, in order.
        sizes: their tokens.
        room: tokens.
        slack: tokens that may stay free; only where more would, the last documents are chosen by their size.

    Returns:
        Documents that take ``room`` tokens at most.
    """
    chosen: list[Measured] = []
    ahead: list[Measured] = []
    while not ahead and (group := _measured(others, sizes, CHOICE)):
        for at, (document, tokens) in enumerate(group):
            if tokens > room:
                ahead = group[at:]
                break
            chosen.append((document, tokens))
            room -= tokens
    if room > slack and ahead:
        ahead += _measured(others, sizes, CHOICE - len(ahead))
        chosen = _with_last(chosen, ahead, room, slack)
    return [document for document, _ in chosen]


def _measured(others: Iterator[int], sizes: Sizes, count: int) -> list[Measured]:
    group = list(islice(others, count))
    return list(zip(group, sizes(group), strict=True))


def _with_last(
    chosen: Sequence[Measured], ahead: Sequence[Measured], room: int, slack: int
) -> list[Measured]:
    """The chosen ones and more of those ahead, a few of the last ones taken out again where that leaves less free."""
    best, least = list(chosen), room
    by_size = sorted(ahead, key=lambda each: each[1], reverse=True)
    for dropped in range(min(MOST_DROPPED, len(chosen)) + 1):
        kept = list(chosen[: len(chosen) - dropped])
        free = room + sum(tokens for _, tokens in chosen[len(kept) :])
        for document, tokens in by_size:
            if tokens <= free:
                kept.append((document, tokens))
                free -= tokens
        if free < least:
            best, least = kept, free
        if least <= slack:
            break
    return best


# By tokenizer, since each length has an encoder of its own; forgotten with the tokenizer.
_KNOWN: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


def document_sizes(encoder: PromptEncoder, documents: Sequence[str]) -> Sizes:
    """Tokens that documents add to a prompt, each with its heading and the empty line after it.

    Each is read alone, once a tokenizer: in a prompt it may have a few more or less.

    Args:
        encoder: whose tokenizer counts.
        documents: all there are.
    """
    known = _KNOWN.setdefault(encoder.tokenizer, {})

    def sizes(indices: Sequence[int]) -> list[int]:
        texts = [documents[index] for index in indices]
        unknown = [text for text in dict.fromkeys(texts) if text not in known]
        read = encoder.backend().encode_batch_fast(
            [HEADING + text + AFTER for text in unknown], add_special_tokens=False
        )
        known.update((text, len(found)) for text, found in zip(unknown, read, strict=True))
        return [known[text] for text in texts]

    return sizes
