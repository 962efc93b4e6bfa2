"""Count the documents and tokens of sources, split by split, without writing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ropewalk.data.read.files import hidden_entries
from ropewalk.data.read.input_splits import InputSplit, source_splits
from ropewalk.data.read.readers import ReadingCounts, no_documents, refuse_unused_spans, training_documents
from ropewalk.data.settings import SourceSpec
from ropewalk.data.statistics import DocumentCounts
from ropewalk.data.tokens.corpus import processes_for
from ropewalk.data.tokens.tokenise import Encoder, Progress
from ropewalk.runs.tasks import Failed


def count_splits(
    specs: Sequence[SourceSpec], tokenizer: Any, workers: int, progress: Progress
) -> DocumentCounts:
    """Count the documents of sources, in reading order.

    Args:
        specs: the sources.
        tokenizer: a transformers tokenizer with a fast backend.
        workers: number of processes at most; 0 for one per CPU core.
        progress: called after each split with the numbers of documents and tokens so far.

    Raises:
        RopewalkError: if a source has no documents, token ids do not fit the tokenizer, or reading fails.
    """
    splits = [split for spec in specs for split in source_splits(spec)]
    found: dict[int, tuple[DocumentCounts, ReadingCounts]] = {}
    documents = tokens = 0
    for (number, _), result in processes_for(splits, workers).run(
        _count_split, Encoder.of(tokenizer), enumerate(splits)
    ):
        if isinstance(result, Failed):
            raise result.error
        found[number] = result
        documents += len(result[0].lengths)
        tokens += sum(result[0].lengths)
        progress(documents, tokens)
    refuse_unused_spans(specs, ReadingCounts.total([reading for _, reading in found.values()]))
    for spec in specs:
        reading = ReadingCounts.total([found[n][1] for n, split in enumerate(splits) if split.spec == spec])
        if not reading.documents:
            raise no_documents(spec, replace(reading, hidden_entries=hidden_entries([spec])))
    counts = DocumentCounts()
    for number in range(len(splits)):
        counts.extend(found.pop(number)[0])
    return counts


def _count_split(encoder: Encoder, item: tuple[int, InputSplit]) -> tuple[DocumentCounts, ReadingCounts]:
    """Count one split; a task."""
    reading = ReadingCounts()
    return DocumentCounts(encoder.tokenise(training_documents(item[1], reading))), reading
