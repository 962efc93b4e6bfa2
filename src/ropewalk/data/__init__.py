"""From documents to packed training rows: reading, tokenising, packing, storing, counting.

Names are imported on first use: a tokenisation worker imports this package and must not load torch.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.data.mixture.mixture import mix
    from ropewalk.data.read.documents import Document, TokenisedDocument
    from ropewalk.data.read.readers import ReadingCounts, read_documents
    from ropewalk.data.rows.assemble import PackedRow, assemble_rows, pack_documents
    from ropewalk.data.rows.special_tokens import PackingCounts
    from ropewalk.data.rows.store import pack_rows, prepare_rows
    from ropewalk.data.rows.stored import PackedRows, ValidationDocuments, open_rows
    from ropewalk.data.rows.training_rows import row_order, rows_for_step, training_row
    from ropewalk.data.run import DataPreview, DataStats, PackResult, pack, preview, stats
    from ropewalk.data.settings import (
        InterleaveSettings,
        MixtureSettings,
        PackingSettings,
        SourceSpec,
        ValidationSettings,
    )
    from ropewalk.data.statistics import DataStatistics, packed_statistics, tokenised_statistics
    from ropewalk.data.tokens.corpus import Corpus, tokenise_splits
    from ropewalk.data.tokens.tokenise import SpecialTokens, load_tokenizer, special_ids, tokenizer_identity

_HOMES = {
    "DataPreview": "run",
    "DataStats": "run",
    "pack": "run",
    "preview": "run",
    "stats": "run",
    "StatsConfig": "settings",
    "PreviewConfig": "settings",
    "PackResult": "run",
    "PackConfig": "settings",
    "Corpus": "tokens.corpus",
    "DataStatistics": "statistics",
    "Document": "read.documents",
    "InterleaveSettings": "settings",
    "MixtureSettings": "settings",
    "PackedRow": "rows.assemble",
    "PackedRows": "rows.stored",
    "PackingCounts": "rows.special_tokens",
    "PackingSettings": "settings",
    "ReadingCounts": "read.readers",
    "SourceSpec": "settings",
    "SpecialTokens": "tokens.tokenise",
    "TokenisedDocument": "read.documents",
    "ValidationDocuments": "rows.stored",
    "ValidationSettings": "settings",
    "assemble_rows": "rows.assemble",
    "load_tokenizer": "tokens.tokenise",
    "mix": "mixture.mixture",
    "open_rows": "rows.stored",
    "pack_documents": "rows.assemble",
    "pack_rows": "rows.store",
    "packed_statistics": "statistics",
    "prepare_rows": "rows.store",
    "read_documents": "read.readers",
    "row_order": "rows.training_rows",
    "rows_for_step": "rows.training_rows",
    "special_ids": "tokens.tokenise",
    "tokenise_splits": "tokens.corpus",
    "tokenised_statistics": "statistics",
    "tokenizer_identity": "tokens.tokenise",
    "training_row": "rows.training_rows",
}

__all__ = [
    "Corpus",
    "DataPreview",
    "DataStatistics",
    "DataStats",
    "Document",
    "InterleaveSettings",
    "MixtureSettings",
    "PackConfig",
    "PackResult",
    "PackedRow",
    "PackedRows",
    "PackingCounts",
    "PackingSettings",
    "PreviewConfig",
    "ReadingCounts",
    "SourceSpec",
    "SpecialTokens",
    "StatsConfig",
    "TokenisedDocument",
    "ValidationDocuments",
    "ValidationSettings",
    "assemble_rows",
    "load_tokenizer",
    "mix",
    "open_rows",
    "pack",
    "pack_documents",
    "pack_rows",
    "packed_statistics",
    "prepare_rows",
    "preview",
    "read_documents",
    "row_order",
    "rows_for_step",
    "special_ids",
    "stats",
    "tokenise_splits",
    "tokenised_statistics",
    "tokenizer_identity",
    "training_row",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
