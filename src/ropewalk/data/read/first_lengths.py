"""Lengths of the first documents of some sources, estimated from the tokens of a few."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from ropewalk.data.read.readers import read_documents
from ropewalk.data.settings import SourceSpec
from ropewalk.io.progress import counted
from ropewalk.parallel.context import RunContext

TOKENISED = 200
"""Documents of which the tokens are counted, drawn at random from those read."""
SAMPLED = 20_000
"""Characters of each of these that are tokenised: a corpus of books would take minutes."""
CHARACTERS_PER_TOKEN = 4
"""Characters that a token of English text has on average, where there is no tokenizer to count with."""
READ = 20_000
"""Documents whose characters are counted, and taken for tokens at the rate of those that are drawn."""


def first_lengths(
    specs: Sequence[SourceSpec], tokenizer: Any, context: RunContext
) -> tuple[list[float], bool]:
    """Estimated tokens of each of the first documents, and whether these are all.

    Args:
        specs: the documents.
        tokenizer: counts the tokens of some of them; None if there is none.
        context: reporter of progress.

    Raises:
        RopewalkError: as for :func:`ropewalk.data.read_documents`.
    """
    drawn: list[str] = []
    characters: list[int] = []
    complete = True
    # A fixed seed, so that a recipe is planned in the same way twice.
    draw = Random(0)
    with counted(context.rank_0_reporter, "documents", None, "documents") as progress:
        for document in read_documents(specs):
            if len(characters) == READ:
                complete = False
                break
            if len(drawn) < TOKENISED:
                drawn.append(document.text[:SAMPLED])
            elif (place := draw.randrange(len(characters) + 1)) < TOKENISED:
                drawn[place] = document.text[:SAMPLED]
            characters.append(len(document.text))
            progress(len(characters), len(characters))
    if tokenizer is None:
        return [length / CHARACTERS_PER_TOKEN for length in characters], complete
    # Without special tokens, which packing adds per row or document as the pattern needs them.
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(drawn, add_special_tokens=False)
    # Tokenising all of them would take minutes, and texts of one corpus have nearly the same rate of tokens per
    # character.
    rate = sum(map(len, encoded)) / max(1, sum(map(len, drawn)))
    return [length * rate for length in characters], complete
