"""From the options of ``ropewalk search`` to the rows that it measures on, and those held out from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.attention.layout import Row

CHARACTERS = 32
"""Read for a token that needle rows of both kinds hold: more than enough of any language."""
SEARCH_SEED, HELD_OUT_SEED = 0, 1
"""Of the needles; not that of the search: searches of several seeds have the same documents."""


@dataclass(frozen=True, eq=False)
class SearchText:
    """What a search measures on.

    Attributes:
        rows: of the target length.
        short_rows: beginnings of them, of the trained length; empty without a short penalty.
        held_out: rows of other documents; empty where none are wanted or the text is used up.
        joined: whether a row is several documents, since too few fill one alone.
    """

    rows: Sequence[Row]
    short_rows: Sequence[Row]
    held_out: Sequence[Row]
    joined: bool


def search_text(
    text: str,
    tokenizer: Any,
    objective: str,
    length: int,
    count: int,
    held_out: int,
    short_length: int | None,
    trained_length: int | None = None,
) -> SearchText:
    """Read the text and make rows of it.

    Args:
        text: as for ``ropewalk data pack``.
        tokenizer: the model's.
        objective: ``perplexity`` or ``needle``.
        length: tokens of a row.
        count, held_out: rows to search on, exactly; rows to judge by, at most.
        short_length: tokens of the short rows; None for none.
        trained_length: tokens that needles stand back at least, where rows are longer; half a row if None.

    Raises:
        RopewalkError: if the text does not fill the rows.
    """
    if objective == "needle":
        beyond = trained_length if trained_length is not None and trained_length < length else None
        rows, judged, joined = _needles(text, tokenizer, length, count, held_out, beyond)
    else:
        rows, judged, joined = _documents(text, tokenizer, length, count, held_out)
    short = [] if short_length is None else [beginning(row, short_length) for row in rows]
    return SearchText(rows, short, judged, joined)


def beginning(row: Row, length: int) -> Row:
    """The first ``length`` tokens of a row, with the targets of all of them."""
    import torch

    from ropewalk.attention.layout import PackedLayout, Row, next_token_labels

    ids = row.input_ids[:length].clone()
    counts: list[int] = torch.unique_consecutive(row.layout.document_ids[:length], return_counts=True)[
        1
    ].tolist()
    layout = PackedLayout.from_lengths(counts, pattern="full", anchor_length=0)
    return Row(ids, next_token_labels(ids, layout), layout)


def _documents(
    text: str, tokenizer: Any, length: int, count: int, held_out: int
) -> tuple[Sequence[Row], Sequence[Row], bool]:
    from ropewalk.evaluation.text import documents_of
    from ropewalk.search.documents import search_rows

    documents = documents_of(text, tokenizer, length, count + held_out)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows, judged = search_rows(documents, length, bos, eos if bos is None else None, count, held_out)
    return rows.rows, judged.rows if judged else [], rows.kind == "packed"


def _needles(
    text: str, tokenizer: Any, length: int, count: int, held_out: int, beyond: int | None
) -> tuple[Sequence[Row], Sequence[Row], bool]:
    from ropewalk.data import SourceSpec, read_documents
    from ropewalk.search.needles import needle_rows

    wanted = CHARACTERS * length * (count + held_out)
    texts: list[str] = []
    characters = 0
    for document in read_documents([SourceSpec(path=text)]):
        texts.append(document.text)
        characters += len(document.text)
        if characters >= wanted and len(texts) > 1:
            break
    if not texts:
        raise RopewalkError(f"{text} holds no document to hide needles in")
    # Every other document is held out, as long as there are two.
    own, other = (texts[::2], texts[1::2]) if held_out else (texts, [])
    rows = needle_rows(tokenizer, own, length, count, SEARCH_SEED, beyond)
    judged = needle_rows(tokenizer, other, length, held_out, HELD_OUT_SEED, beyond) if other else []
    return rows, judged, False
