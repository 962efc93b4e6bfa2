"""Documents of numbered tokens, and rows packed from them in memory."""

from dataclasses import fields

import numpy as np
from hypothesis import strategies as st

from ropewalk.data.read.documents import TokenisedDocument
from ropewalk.data.rows.assemble import PackedRow, assemble_rows, pack_documents
from ropewalk.data.rows.special_tokens import DocumentEnds, PackingCounts
from ropewalk.data.settings import PackingSettings
from ropewalk.data.tokens.tokenise import SpecialTokens

BOS, EOS = 1, 2
SPECIAL = SpecialTokens(BOS, EOS, BOS)
contexts = st.integers(2, 24)
lengths = contexts.flatmap(
    lambda context: st.tuples(st.just(context), st.lists(st.integers(0, 10 * context), max_size=12))
)


def numbered(lengths: list[int]) -> list[TokenisedDocument]:
    """Documents whose tokens are all different, so that every one can be found again."""
    starts = np.cumsum([10, *lengths])
    return [
        TokenisedDocument(np.arange(start, start + length, dtype=np.int32), f"source {n}")
        for n, (start, length) in enumerate(zip(starts, lengths, strict=False))
    ]


class InMemory:
    """Documents as the corpus hands them out."""

    def __init__(self, documents: list[TokenisedDocument]) -> None:
        self._documents = documents
        self.sources = list(dict.fromkeys(document.source for document in documents))
        ids = [document.input_ids for document in documents]
        self.ends = DocumentEnds(
            np.array([len(each) for each in ids], np.int64),
            np.array([each[0] if len(each) else -1 for each in ids], np.int32),
            np.array([each[-1] if len(each) else -1 for each in ids], np.int32),
            np.array([self.sources.index(document.source) for document in documents], np.int32),
        )

    def read_tokens(self, number: int, first: int, out: np.ndarray) -> None:
        out[:] = self._documents[number].input_ids[first : first + len(out)]


def packed(
    documents: list[TokenisedDocument],
    settings: PackingSettings,
    special: SpecialTokens = SPECIAL,
    tags: list[np.ndarray] | None = None,
) -> tuple[list[PackedRow], PackingCounts]:
    corpus = InMemory(documents)
    plan = pack_documents(np.arange(len(documents)), corpus.ends, corpus.sources, settings, special, tags)
    rows = assemble_rows(plan, corpus, 0, plan.num_rows)
    for number in range(plan.num_rows):
        (alone,) = assemble_rows(plan, corpus, number, number + 1)
        assert alone.input_ids.tolist() == rows[number].input_ids.tolist(), "a row is the same by itself"
        assert alone.masked == rows[number].masked
        (apart,) = assemble_rows(plan.rows(number, number + 1), corpus, 0, 1)
        for field in fields(apart):
            of_both = (getattr(row, field.name) for row in (apart, rows[number]))
            np.testing.assert_array_equal(*of_both, err_msg=f"{field.name} of a row cut out of the plan")
    counts = plan.counts(corpus.ends)
    added = counts.bos_tokens + counts.eos_tokens + counts.tag_tokens + counts.padding_tokens
    assert counts.document_tokens + added == counts.row_tokens + counts.remainder_tokens
    assert counts.tokens_in == counts.document_tokens + counts.dropped_tokens + counts.own_bos_tokens
    return rows, counts
