"""From documents to packed training rows: reading, tokenising, packing, storing, counting.

Names are imported on first use: a tokenisation worker imports this package and must not load torch. The
functions ``pack`` and ``tokenise`` bear the names of their modules, and are imported from there.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.data.documents import Document, SourceSpec
    from ropewalk.data.order import row_order, rows_for_step
    from ropewalk.data.pack import PackedRow, PackingCounts, PackingSettings, row_from_arrays
    from ropewalk.data.readers import ReadingCounts, read_documents
    from ropewalk.data.rows import PackedRows, ValidationDocuments, open_rows
    from ropewalk.data.split import ValidationSettings
    from ropewalk.data.stats import DataStatistics, packed_statistics, tokenised_statistics
    from ropewalk.data.store import prepare_rows
    from ropewalk.data.tokenise import (
        SpecialTokens,
        TokenisedDocument,
        load_tokenizer,
        special_ids,
        tokenizer_identity,
    )

_HOMES = {
    "DataStatistics": "stats",
    "Document": "documents",
    "PackedRow": "pack",
    "PackedRows": "rows",
    "PackingCounts": "pack",
    "PackingSettings": "pack",
    "ReadingCounts": "readers",
    "SourceSpec": "documents",
    "SpecialTokens": "tokenise",
    "TokenisedDocument": "tokenise",
    "ValidationDocuments": "rows",
    "ValidationSettings": "split",
    "load_tokenizer": "tokenise",
    "open_rows": "rows",
    "packed_statistics": "stats",
    "prepare_rows": "store",
    "read_documents": "readers",
    "row_from_arrays": "pack",
    "row_order": "order",
    "rows_for_step": "order",
    "special_ids": "tokenise",
    "tokenised_statistics": "stats",
    "tokenizer_identity": "tokenise",
}

__all__ = [
    "DataStatistics",
    "Document",
    "PackedRow",
    "PackedRows",
    "PackingCounts",
    "PackingSettings",
    "ReadingCounts",
    "SourceSpec",
    "SpecialTokens",
    "TokenisedDocument",
    "ValidationDocuments",
    "ValidationSettings",
    "load_tokenizer",
    "open_rows",
    "packed_statistics",
    "prepare_rows",
    "read_documents",
    "row_from_arrays",
    "row_order",
    "rows_for_step",
    "special_ids",
    "tokenised_statistics",
    "tokenizer_identity",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
