"""From documents to packed training rows: reading, tokenising, packing, storing, counting.

Names are imported on first use: a tokenisation worker imports this package and must not load torch. The
functions ``pack`` and ``tokenise`` bear the names of their modules, and are imported from there.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.data.assemble import PackedRow, assemble_rows, pack_documents
    from ropewalk.data.corpus import Corpus, tokenise_portions
    from ropewalk.data.documents import Document, SourceSpec, TokenisedDocument
    from ropewalk.data.framing import PackingCounts
    from ropewalk.data.mixture import MixtureSettings, mix
    from ropewalk.data.order import row_order, rows_for_step
    from ropewalk.data.publish import merge_parts
    from ropewalk.data.readers import ReadingCounts, read_documents
    from ropewalk.data.rows import PackedRows, ValidationDocuments, open_rows
    from ropewalk.data.settings import InterleaveSettings, PackingSettings
    from ropewalk.data.split import ValidationSettings
    from ropewalk.data.stats import DataStatistics, packed_statistics, tokenised_statistics
    from ropewalk.data.store import Job, pack_rows, prepare_rows
    from ropewalk.data.tokenise import (
        SpecialTokens,
        load_tokenizer,
        special_ids,
        tokenizer_identity,
    )
    from ropewalk.data.training_row import training_row

_HOMES = {
    "Corpus": "corpus",
    "DataStatistics": "stats",
    "Document": "documents",
    "InterleaveSettings": "settings",
    "Job": "store",
    "MixtureSettings": "mixture",
    "PackedRow": "assemble",
    "PackedRows": "rows",
    "PackingCounts": "framing",
    "PackingSettings": "settings",
    "ReadingCounts": "readers",
    "SourceSpec": "documents",
    "SpecialTokens": "tokenise",
    "TokenisedDocument": "documents",
    "ValidationDocuments": "rows",
    "ValidationSettings": "split",
    "assemble_rows": "assemble",
    "load_tokenizer": "tokenise",
    "merge_parts": "publish",
    "mix": "mixture",
    "open_rows": "rows",
    "pack_documents": "assemble",
    "pack_rows": "store",
    "packed_statistics": "stats",
    "prepare_rows": "store",
    "read_documents": "readers",
    "row_order": "order",
    "rows_for_step": "order",
    "special_ids": "tokenise",
    "tokenise_portions": "corpus",
    "tokenised_statistics": "stats",
    "tokenizer_identity": "tokenise",
    "training_row": "training_row",
}

__all__ = [
    "Corpus",
    "DataStatistics",
    "Document",
    "InterleaveSettings",
    "Job",
    "MixtureSettings",
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
    "assemble_rows",
    "load_tokenizer",
    "merge_parts",
    "mix",
    "open_rows",
    "pack_documents",
    "pack_rows",
    "packed_statistics",
    "prepare_rows",
    "read_documents",
    "row_order",
    "rows_for_step",
    "special_ids",
    "tokenise_portions",
    "tokenised_statistics",
    "tokenizer_identity",
    "training_row",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
