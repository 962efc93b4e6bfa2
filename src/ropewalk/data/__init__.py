"""From documents to packed training rows: reading, tokenising, packing, storing, counting.

Names are imported on first use: a worker process imports this package and must not load torch.

Its files::

    settings         sources, mixture, row policies, validation split, work
    run              the jobs: pack documents, count them, preview rows
    read             files, records and data sets as one stream of documents
    tokens           tokenised documents on disk, and their index
    mixture          which documents are read, how often, in which order
    rows             packed rows: planned from lengths, filled, kept on disk
    collator         packed rows for other people's trainers
    statistics       sources, lengths, repeats, skipped attention
    attention_share  the share of full attention that a pattern computes
    row_preview      a packed row as text with its tags
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.data.read.documents import Document as Document, TokenisedDocument as TokenisedDocument
    from ropewalk.data.read.readers import ReadingCounts as ReadingCounts, read_documents as read_documents
    from ropewalk.data.rows.assemble import PackedRow as PackedRow
    from ropewalk.data.rows.pack import pack_rows as pack_rows, prepare_rows as prepare_rows
    from ropewalk.data.rows.packed_rows import (
        PackedRows as PackedRows,
        ValidationDocuments as ValidationDocuments,
        open_rows as open_rows,
    )
    from ropewalk.data.rows.step_rows import StepRow as StepRow, TrainingRows as TrainingRows
    from ropewalk.data.rows.training_rows import (
        row_order as row_order,
        rows_for_step as rows_for_step,
        training_row as training_row,
    )
    from ropewalk.data.run import (
        DataPreview as DataPreview,
        DataStats as DataStats,
        PackResult as PackResult,
        pack as pack,
        preview as preview,
        stats as stats,
    )
    from ropewalk.data.mixture.settings import MixtureSettings as MixtureSettings
    from ropewalk.data.settings import (
        InterleaveSettings as InterleaveSettings,
        PackConfig as PackConfig,
        PackingSettings as PackingSettings,
        PreviewConfig as PreviewConfig,
        SourceSpec as SourceSpec,
        StatsConfig as StatsConfig,
        ValidationSettings as ValidationSettings,
    )
    from ropewalk.data.statistics import (
        DataStatistics as DataStatistics,
        packed_statistics as packed_statistics,
    )
    from ropewalk.data.tokens.special_ids import special_ids as special_ids
    from ropewalk.data.tokens.tokenise import (
        load_tokenizer as load_tokenizer,
        tokenizer_identity as tokenizer_identity,
    )
else:
    __getattr__, __dir__ = on_first_use(__name__)
