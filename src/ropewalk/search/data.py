"""Data of a search: rows of text, held-out rows, and needle rows in which only the answers are scored.

The mean loss of long text hardly depends on distant context: nearby tokens suffice to predict most tokens. Needle rows
ask for what is far away (:mod:`ropewalk.search.needle_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.data import SourceSpec
from ropewalk.data.read.draw import draw_documents
from ropewalk.errors import RopewalkError
from ropewalk.evaluation import EvaluationRows, evaluation_rows
from ropewalk.evaluation.rows import Ids, documents_of
from ropewalk.io.digests import digest
from ropewalk.io.lengths import counted
from ropewalk.search.goal import Goal
from ropewalk.search.needle_rows import Needles, needle_rows
from ropewalk.search.settings import SearchSettings


def search_rows(
    documents: Sequence[Ids], length: int, bos_id: int | None, eos_id: int | None, count: int, held_out: int
) -> tuple[EvaluationRows, EvaluationRows | None]:
    """Rows to search on, and rows of other documents to evaluate the result on.

    Args:
        documents: token ids of each document, int ``[tokens]``, without special tokens.
        length: tokens per row.
        bos_id, eos_id: special tokens, see :func:`~ropewalk.evaluation.evaluation_rows`.
        count: exact number of rows to search on; they do not depend on ``held_out``.
        held_out: maximum number of held-out rows; 0 for none.

    Returns:
        Search rows and held-out rows, which share no document; ``documents`` of the search rows are indices of those
        given. Held-out rows are None if none were requested or the text is used up.

    Raises:
        RopewalkError: if the text does not fill ``count`` rows.
    """
    fill = length - (bos_id is not None)
    long = [number for number, document in enumerate(documents) if len(document) >= fill]
    if len(long) >= count:
        # A row of one long document needs its distant tokens to predict; joined short documents reward no long range.
        chosen = long[:count]
    else:
        # Too few documents fill a row alone, so rows join documents. Each document, and each continuation of one in
        # another row, starts with its own BOS, so the number of documents needed is found by trying.
        # Plus BOS and EOS. A lower bound from which _that_fill starts trying.
        sums = list(accumulate(len(document) + 2 for document in documents))
        end = next((number for number, total in enumerate(sums, start=1) if total >= count * length), None)
        end = _that_fill(documents, end or len(documents), length, bos_id, eos_id, count)
        chosen = list(range(end))
    rows = evaluation_rows([documents[number] for number in chosen], length, bos_id, eos_id, count)
    if len(rows.rows) < count:
        raise RopewalkError(
            f"the text fills {counted(len(rows.rows), 'row')} of {length} tokens, but the search needs {count} rows "
            "(the setting documents, --documents); give more text, set fewer documents, or choose a shorter "
            "target length"
        )
    rows = replace(rows, documents=tuple(chosen[number] for number in rows.documents))
    if not held_out:
        return rows, None
    used = set(chosen)
    rest = [document for number, document in enumerate(documents) if number not in used]
    try:
        return rows, evaluation_rows(rest, length, bos_id, eos_id, held_out)
    except RopewalkError:
        # The remaining text does not fill a row; held-out rows are optional.
        return rows, None


def rows_digest(rows: Sequence[Row]) -> str:
    """SHA-256 of the tokens and labels of rows."""
    return digest([[row.input_ids.tolist(), row.labels.tolist()] for row in rows])


def _that_fill(
    documents: Sequence[Ids], start: int, length: int, bos_id: int | None, eos_id: int | None, count: int
) -> int:
    """Smallest number of first documents, from ``start`` on, that fill ``count`` rows; all documents if none does."""
    for end in range(start, len(documents)):
        try:
            if len(evaluation_rows(documents[:end], length, bos_id, eos_id, count).rows) == count:
                return end
        except RopewalkError:
            continue
    return len(documents)


CHARACTERS = 32
"""Characters read per token of all needle rows: more than enough in any language."""
SEARCH_SEED, HELD_OUT_SEED = 0, 1
"""Random seeds of the needles; independent of the search's seed, so that searches with other seeds share rows."""


@dataclass(frozen=True, eq=False)
class SearchData:
    """Rows of a search.

    Attributes:
        rows: rows of the target length that candidates are measured on.
        held_out: rows of other documents to evaluate the result on; may be empty.
        short_rows: rows of at most the trained length for the short penalty; empty without a penalty.
        source: description of the text.
        joined: whether rows join several documents because too few documents fill a row alone.
        documents: hashes of the documents in the rows that candidates are measured on; empty if nobody has to avoid
            them.
    """

    rows: Sequence[Row]
    held_out: Sequence[Row] = ()
    short_rows: Sequence[Row] = ()
    source: str = ""
    joined: bool = False
    documents: frozenset[int] = frozenset()

    @property
    def measured(self) -> list[Row]:
        """All rows that a candidate is measured on, including those of the penalty."""
        return [*self.rows, *self.short_rows]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the rows that candidates are measured on."""
        return rows_digest(self.measured)

    @cached_property
    def held_out_sha256(self) -> str:
        """SHA-256 of the held-out rows."""
        return rows_digest(self.held_out)


def search_data(source: str, tokenizer: Any, goal: Goal, settings: SearchSettings) -> SearchData:
    """Read text and make the rows of a search from it.

    Args:
        source: source of the text, given like the sources of ``ropewalk data pack``.
        tokenizer: tokenizer of the model.
        goal: rows have its target length. If that exceeds the trained length, needles are at least the trained length
            away from their answers.
        settings: objective and number of rows. With a short penalty, the beginnings of the rows are its rows.

    Raises:
        RopewalkError: if the text does not fill the rows.
    """
    length, trained = goal.target_length, goal.trained_length
    make = _needles if settings.objective == "needle" else _documents
    spec = SourceSpec(path=source)
    rows, held_out, joined = make(spec, tokenizer, goal, settings)
    short = [beginning(row, min(trained, length)) for row in rows] if settings.short_penalty else []
    return SearchData(rows, held_out, short, source, joined)


def beginning(row: Row, length: int) -> Row:
    """The first ``length`` tokens of a row, with the targets of all of them."""
    ids = row.input_ids[:length].clone()
    counts: list[int] = torch.unique_consecutive(row.layout.document_ids[:length], return_counts=True)[
        1
    ].tolist()
    layout = PackedLayout.from_lengths(counts, pattern="full", anchor_length=0)
    return Row(ids, next_token_labels(ids, layout), layout)


def _documents(
    text: SourceSpec, tokenizer: Any, goal: Goal, settings: SearchSettings
) -> tuple[Sequence[Row], Sequence[Row], bool]:
    length, count, held_out = goal.target_length, settings.documents, settings.held_out
    documents = documents_of([text], tokenizer, length, count + held_out, settings.seed)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows, judged = search_rows(documents, length, bos, eos if bos is None else None, count, held_out)
    return rows.rows, judged.rows if judged else [], rows.kind == "packed"


def _needles(
    text: SourceSpec, tokenizer: Any, goal: Goal, settings: SearchSettings
) -> tuple[Sequence[Row], Sequence[Row], bool]:
    texts = (document.text for document in draw_documents([text], settings.seed))
    rows, judged, used = search_needles(
        texts, tokenizer, goal.target_length, goal.trained_length, settings.documents, settings.held_out
    )
    if not used:
        raise RopewalkError(f"{text.path} contains no document to hide needles in; give another text")
    return rows, judged, False


def search_needles(
    documents: Iterable[str], tokenizer: Any, length: int, trained_length: int, count: int, held_out: int
) -> tuple[Sequence[Row], Sequence[Row], int]:
    """Needle rows to search on, needle rows in other documents, and the number of documents of the first.

    Args:
        documents: texts, of which only as many are read as the rows may need.
        tokenizer: tokenizer of the model.
        length: tokens per row.
        trained_length: if it is shorter, needles are at least so many tokens away from their answers.
        count, held_out: number of rows to search on, and of others.

    Raises:
        RopewalkError: see :func:`~ropewalk.search.needle_rows.needle_rows`. Without any document there are no rows.
    """
    # At or below the trained length no needle can be beyond it; half of the row is then the default.
    needles = Needles(trained_length if trained_length < length else None)
    # Reading stops early: a corpus may have millions of documents, and needles need only the first few.
    wanted = CHARACTERS * length * (count + held_out)
    texts: list[str] = []
    characters = 0
    for text in documents:
        texts.append(text)
        characters += len(text)
        if characters >= wanted and len(texts) > 1:
            break
    if not texts:
        return [], [], 0
    # In halves, if there are at least two: sources take turns, so every other document may be of one source.
    half = (len(texts) + 1) // 2 if held_out else len(texts)
    own, other = texts[:half], texts[half:]
    rows = needle_rows(tokenizer, own, length, count, SEARCH_SEED, needles)
    judged = needle_rows(tokenizer, other, length, held_out, HELD_OUT_SEED, needles) if other else []
    return rows, judged, half
