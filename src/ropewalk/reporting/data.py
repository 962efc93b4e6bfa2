"""Show packed sequences, statistics of documents and sequences, and previews."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ropewalk.data.mixture.gzip_ratio import explain_gzip
from ropewalk.data.mixture.report import mixture_sentences
from ropewalk.data.mixture.synthetic import explain_synthetic
from ropewalk.data.row_preview import Chunk, RowPreview, Span
from ropewalk.data.rows.manifest import token_account
from ropewalk.data.run import DataPreview, PackResult
from ropewalk.data.settings import LIMITS
from ropewalk.reporting.data_tables import (
    attention_sentence,
    histogram_table,
    mixture_table,
    pieces_table,
    repeats_sentence,
    rows_sentence,
    samples_sentence,
    samples_table,
    source_table,
)
from ropewalk.reporting.figures.data import length_figure, source_lengths
from ropewalk.reporting.figures.drawing import Figure
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.tables import Part

COLOURS = ("cyan", "magenta", "green", "yellow", "bright_blue")
"""Colours of successive documents in a sequence. Each document also has a header, so no meaning depends on colour."""
LEGEND = (
    ("■", "document or chunk of one; □ padding"),
    (
        "⟦ ⟧",
        "not trained on: anchor, tag, all of a chat but the assistant's turns, or text outside spans of loss",
    ),
    ("« »", "special token"),
    ("↵", "newline; codes such as \\x1b: control characters"),
)


def describe_packed(result: PackResult) -> Iterator[Part]:
    """Counts of the packed data and its folder."""
    yield from _packed(result.manifest)
    yield ""
    yield str(result.folder)


def _packed(manifest: Mapping[str, Any]) -> Iterator[Part]:
    counts, context = manifest["counts"], manifest["settings"]["context"]
    account, packing, split, reading = (
        token_account(counts),
        counts["packing"],
        counts["split"],
        counts["reading"],
    )
    facts = [
        (f"sequences of {context:,} tokens", packing["rows"]),
        ("documents read", reading["documents"]),
        ("documents held out", split["validation_documents"]),
        ("documents packed, counting repeats", packing["documents"]),
        ("tokens of these documents", account["tokens_in"]),
        ("of which packed or left over at the end", account["own"]),
        ("BOS tokens added", account["bos"]),
        ("EOS tokens added", account["eos"]),
        ("tokens in sequences", account["tokens_packed"]),
        ("tokens of the incomplete last sequence, dropped", account["tokens_remainder"]),
        ("documents cut at the end of a sequence", packing["cut_documents"]),
    ]
    repeats = manifest["corpus"]["repeats"] or {"documents": 0, "tokens": 0}
    remarks = [
        ("documents that occur more than once in the input", repeats["documents"]),
        ("tokens of the repeated copies", repeats["tokens"]),
        ("tag tokens added, not trained on", account["tags"]),
        ("padding tokens added, not trained on", account["padding"]),
        (_left_out_by(manifest), counts["mixture"]["unread_documents"]),
        ("documents repeated by the mixture", counts["mixture"]["repeated_documents"]),
        ("tokens of synthetic tasks added", account.get("synthetic", 0)),
        ("documents longer than a sequence, truncated or skipped", packing["long_documents"]),
        ("tokens dropped with them", account["dropped"]),
        ("BOS tokens of documents replaced by the one added", account["own_bos"]),
        ("empty documents skipped", reading["empty_documents"] + packing["empty_documents"]),
        ("copies of held-out documents left out", split["withheld_duplicates"]),
        ("binary files skipped", reading["binary_files"]),
        ("hidden files and folders skipped", reading["hidden_entries"]),
        ("documents of which only spans count in the loss", reading.get("span_documents", 0)),
        (
            "null tool arguments, defaults and constants left out of chats; give JSON Lines to keep them",
            reading.get("dropped_nulls", 0),
        ),
    ]
    # Facts always appear; remarks only if their count is not 0.
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for fact, count in facts + [remark for remark in remarks if remark[1]]:
        table.add_row(fact, f"{count:,}")
    yield table
    sentences = mixture_sentences(manifest)
    if sentences:
        yield ""
        yield from sentences


def _left_out_by(manifest: Mapping[str, Any]) -> str:
    causes = ["the mixture"] if manifest["mixture"] is not None else []
    if any(manifest["settings"].get(name) is not None for name in LIMITS):
        causes.append("their lengths")
    return f"documents left out by {' and '.join(causes) or 'the mixture'}"


def describe_stats(report: Mapping[str, Any]) -> Iterator[Part]:
    """Tables of sources, lengths, mixture and chunks, with a summary in sentences.

    Args:
        report: JSON values of :class:`~ropewalk.data.run.DataStats`.
    """
    yield source_table(report)
    if report["histogram"]:
        yield ""
        yield histogram_table(report)
    if _is_mixed(report):
        yield ""
        yield mixture_table(report["mixture"])
    if report["packed"]:
        yield ""
        yield pieces_table(report)
    if report.get("samples"):
        yield ""
        yield samples_table(report)
    sentences = [
        rows_sentence(report),
        attention_sentence(report),
        repeats_sentence(report),
        samples_sentence(report),
        *explain_gzip(report.get("gzip_ratios")),
        *explain_synthetic(report.get("synthetic")),
    ]
    for sentence in filter(None, sentences):
        yield ""
        yield sentence


def _is_mixed(report: Mapping[str, Any]) -> bool:
    """Whether a mixture changed the data, so that before and after differ."""
    return report["mixture"] is not None and not report["mixture"]["as_is"]


def stats_figure(report: Mapping[str, Any]) -> Figure:
    """Draw document lengths by source, before and after a mixture if it changed them.

    Args:
        report: JSON values of :class:`~ropewalk.data.run.DataStats`.
    """
    caption = (
        "Bins extend from one power of two to the next. Bars of one style add up to 100 % in each panel."
    )
    if _is_mixed(report):
        states = {"before": source_lengths(report["corpus"]), "after": source_lengths(report)}
        title = "Document lengths before and after the mixture"
        caption += " Repeated documents count each time."
    else:
        states = {"documents": source_lengths(report)}
        title = "Document lengths"
    if report["packed"]:
        caption += (
            f" Lengths are of whole documents, before sequences of {report['row_length']:,} tokens cut them."
        )
    return length_figure(states, title, caption)


def preview_lines(result: DataPreview) -> Iterator[Text]:
    """Lines of a preview below a legend. The terminal folds long lines."""
    yield _legend()
    if result.kind is not None:
        yield Text(f"packed: {result.kind}")
    if result.tokens:
        yield Text(f"tokens added to documents: {', '.join(map(str, result.tokens))}")
    for number, row in enumerate(result.rows):
        yield from _row_lines(result, number, row)


def _legend() -> Text:
    legend = Text()
    for mark, meaning in LEGEND:
        # An empty Text is false.
        legend.append("   " if legend else "").append(mark, "bold").append(f" {meaning}", "dim")
    return legend


def _row_lines(result: DataPreview, number: int, row: RowPreview) -> list[Text]:
    documents = f"{row.documents:,} {'document' if row.documents == 1 else 'documents'}"
    lines = [
        Text(),
        Text(
            f"sequence {number} of {result.total:,}: {result.context:,} tokens, {documents}, pattern {result.pattern}",
            "bold",
        ),
    ]
    if row.anchor is not None:
        lines.append(_body([row.anchor], "").append("  anchor, token 0", "dim"))
    for chunk in row.chunks:
        colour = "" if chunk.is_padding else COLOURS[chunk.document % len(COLOURS)]
        lines.append(_header(chunk, colour, number))
        if not chunk.is_padding:
            lines.append(_body(chunk.spans, colour))
    return lines


def _header(chunk: Chunk, colour: str, row: int) -> Text:
    count = chunk.stop - chunk.start
    where = f"tokens {chunk.start:,}..{chunk.stop - 1:,} ({count:,})"
    if chunk.is_padding:
        return Text(f"□ padding, {where}, not trained on", "dim")
    header = Text(f"■ document {chunk.number:,}, ", f"bold {colour}")
    header.append(f"{shown(chunk.source, 60)}, {where}")
    if chunk.parts > 1:
        header.append(f", chunk {chunk.part} of {chunk.parts}")
    if chunk.continues:
        header.append(f", continued from sequence {row - 1:,}")
    return header


def _body(spans: Sequence[Span], colour: str) -> Text:
    """Join spans in one line with their marks. No meaning depends on style alone."""
    line = Text("  ")
    for span in spans:
        if span.kind == "left_out":
            line.append(f" … {span.stop - span.start:,} tokens … ", "bold")
            continue
        text = span.text or ""
        # The limit is the text's own length, and at least the 2 that `shown` demands, so nothing is cut.
        words = "".join(f"«{shown(each)}»" for each in span.each) or shown(text, max(2, len(text)))
        style = f"{colour} reverse" if span.each else colour
        if span.masked:
            line.append(f"⟦{words}⟧", f"{style} dim strike")
        else:
            line.append(words, style)
    return line
