"""The documents of a search and those held out from it: rows of text with nothing in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ropewalk.attention.layout import Row
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import EvaluationRows, evaluation_rows
from ropewalk.evaluation.rows import Ids
from ropewalk.io.digests import digest


def search_rows(
    documents: Sequence[Ids], length: int, bos_id: int | None, eos_id: int | None, count: int, held_out: int
) -> tuple[EvaluationRows, EvaluationRows | None]:
    """Rows to search on, and rows of other documents to judge the result by.

    Args:
        documents: int ``[tokens]`` each, without special tokens.
        length: tokens of a row.
        bos_id, eos_id: as for :func:`~ropewalk.evaluation.evaluation_rows`.
        count: rows to search on, exactly; the same whatever ``held_out`` is.
        held_out: rows to judge by, at most; 0 for none.

    Returns:
        The two; the second is None where none are wanted, or the text is used up. No document is in both.

    Raises:
        RopewalkError: if the text does not fill ``count`` rows.
    """
    fill = length - (bos_id is not None)
    long = [number for number, document in enumerate(documents) if len(document) >= fill]
    if len(long) >= count:
        chosen = set(long[:count])
        first = [documents[number] for number in long[:count]]
        rest = [document for number, document in enumerate(documents) if number not in chosen]
    else:
        # Joined documents: the first that fill the rows, every piece of which begins with a BOS of its own.
        sums = list(accumulate(len(document) + 2 for document in documents))
        end = next((number for number, total in enumerate(sums, start=1) if total >= count * length), None)
        end = _that_fill(documents, end or len(documents), length, bos_id, eos_id, count)
        first, rest = list(documents[:end]), list(documents[end:])
    rows = evaluation_rows(first, length, bos_id, eos_id, count)
    if len(rows.rows) < count:
        raise RopewalkError(
            f"the text fills {len(rows.rows)} rows of {length} tokens, and the search wants {count}; give more text, a "
            "shorter length or fewer documents"
        )
    if not held_out:
        return rows, None
    try:
        return rows, evaluation_rows(rest, length, bos_id, eos_id, held_out)
    except RopewalkError:
        # What is left does not fill a row: the search can go on without.
        return rows, None


def rows_digest(rows: Sequence[Row]) -> str:
    """sha256 of the tokens and labels of rows: what a search was measured on."""
    return digest([[row.input_ids.tolist(), row.labels.tolist()] for row in rows])


def _that_fill(
    documents: Sequence[Ids], start: int, length: int, bos_id: int | None, eos_id: int | None, count: int
) -> int:
    """The fewest first documents, at least ``start``, that fill so many rows; all of them if they do not."""
    for end in range(start, len(documents)):
        try:
            if len(evaluation_rows(documents[:end], length, bos_id, eos_id, count).rows) == count:
                return end
        except RopewalkError:
            continue
    return len(documents)
