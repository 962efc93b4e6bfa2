"""From what a user names as text to documents and rows of tokens to measure on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropewalk.attention.layout import Row


def documents_of(text: str, tokenizer: Any, length: int, rows: int) -> list[Any]:
    """As many tokenised documents as rows of a length need."""
    from ropewalk.data import SourceSpec, read_documents
    from ropewalk.data.tokens.tokenise import tokenise
    from ropewalk.evaluation import take_documents

    stream = tokenise(read_documents([SourceSpec(path=text)]), tokenizer)
    return take_documents((document.input_ids for document in stream), length, rows)


def rows_of(text: str, tokenizer: Any, length: int, limit: int) -> list[Row]:
    """Rows of exactly ``length`` tokens, at most ``limit`` of them."""
    from ropewalk.evaluation import evaluation_rows

    documents = documents_of(text, tokenizer, length, limit)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return evaluation_rows(documents, length, bos, eos if bos is None else None, limit).rows
