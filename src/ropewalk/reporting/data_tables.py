"""Describe a corpus or packed sequences as tables and sentences for the terminal.

All functions take the values that ``ropewalk data stats --json`` prints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.data.tokens.samples import name_differs
from ropewalk.io.lengths import format_length
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import MISSING, share_text
from ropewalk.reporting.tables import ResultTable

BAR_CELLS = 30
"""Length of a histogram's longest bar, in characters."""
_EIGHTHS = " ▏▎▍▌▋▊▉"
_NAME_CHARACTERS = 60
_TEXT_CHARACTERS = 60

Report = Mapping[str, Any]


def source_table(report: Report) -> ResultTable:
    """Documents, tokens, shares and lengths by source, with columns for long documents if there are any.

    For packed sequences, the table counts whole documents; :func:`pieces_table` counts the chunks in the sequences.
    """
    sources = report["sources"]
    longest = _long_lengths(report)
    header = (
        "source",
        "documents",
        "% of documents",
        "tokens",
        "% of tokens",
        "mean",
        "median",
        "90 %",
        "longest",
    )
    rows = [_source_row(source_name(name), source, longest) for name, source in sources.items()]
    # With a single source, a total would repeat its row.
    if len(sources) != 1:
        # The report's total has no ratios: they are 1, unless there are no documents.
        one = {"mixture_ratio": 1.0, "token_ratio": 1.0} if report["documents"] else {}
        nothing = {"mixture_ratio": math.nan, "token_ratio": math.nan}
        rows.append(_source_row("all", {**nothing, **one, **report}, longest))
    title = "Documents by source; lengths in tokens"
    if report["packed"]:
        title = "Packed documents by source, before cutting; repeated documents count each time; lengths in tokens"
    over = _over(longest)
    if over:
        title += f"; {over[0]}: share of tokens in longer documents"
    if any(_untrained(source) for source in sources.values()):
        over = [*over, "trained on"]
        # Not strict: a single source has no row for the total.
        rows = [(*row, _trained(each)) for row, each in zip(rows, [*sources.values(), report], strict=False)]
    return ResultTable(title, (*header, *over), tuple(rows))


def pieces_table(report: Report) -> ResultTable:
    """Document chunks in packed sequences by source, with their tokens, shares and lengths."""
    inside = report["in_rows"]
    longest = _long_lengths(inside)
    header = (
        "source",
        "chunks",
        "share of chunks",
        "tokens",
        "share",
        "trained on",
        "mean",
        "median",
        "longest",
    )
    rows = [_piece_row(source_name(name), each, longest) for name, each in inside["sources"].items()]
    if len(rows) != 1:
        rows.append(_piece_row("all", inside, longest))
    over = _over(longest)
    return ResultTable(
        "Document chunks in packed sequences, by source; lengths in tokens"
        + (f"; {over[0]}: share of tokens in longer chunks" if longest else ""),
        (*header, *over),
        tuple(rows),
        notes=(
            "A chunk is the part of a document in one sequence. Tokens include BOS, tags and EOS.",
            "Trained on: share of these tokens that are targets of the loss.",
        ),
    )


def _piece_row(name: str, each: Report, longest: Sequence[str]) -> tuple[str, ...]:
    quantiles = each["length_quantiles"]
    return (
        name,
        f"{each['pieces']:,}",
        share_text(each["piece_ratio"]),
        f"{each['tokens']:,}",
        share_text(each["token_ratio"]),
        _trained(each),
        *(_length(length) for length in (each["mean_length"], quantiles["0.5"], quantiles["1"])),
        *(share_text(each["long_shares"][key]) for key in longest),
    )


def _trained(each: Report) -> str:
    """Share of a source's tokens that are trained on."""
    trained = each["trained_tokens"]
    return MISSING if trained is None or not each["tokens"] else share_text(trained / each["tokens"])


def _untrained(source: Report) -> bool:
    """Whether some tokens of a source are known not to be trained on."""
    return source.get("trained_tokens") not in (None, source["tokens"])


def _long_lengths(report: Report) -> list[str]:
    return [name for name, share in report["long_shares"].items() if share and share > 0]


def _over(longest: Sequence[str]) -> list[str]:
    return [f"> {format_length(int(name)).upper()}" for name in longest]


def _length(length: float | None) -> str:
    return MISSING if length is None or math.isnan(length) else f"{length:,.0f}"


def _source_row(name: str, source: Report, longest: Sequence[str]) -> tuple[str, ...]:
    quantiles = source["length_quantiles"]
    lengths = (source["mean_length"], *(quantiles[key] for key in ("0.5", "0.9", "1")))
    return (
        name,
        f"{source['documents']:,}",
        share_text(source["mixture_ratio"]),
        f"{source['tokens']:,}",
        share_text(source["token_ratio"]),
        *map(_length, lengths),
        *(share_text(source["long_shares"][key]) for key in longest),
    )


_COMPARED = {"same": "the same ids", "different": "other ids", "lossy": "another text"}


def samples_table(report: Report) -> ResultTable:
    """Sampled documents of token files: their decoded beginnings, and what tokenising them again gives."""
    rows = [
        (
            shown(each["origin"]),
            f"{each['tokens']:,}",
            _COMPARED[each["comparison"]],
            shown(each["text"], _TEXT_CHARACTERS),
        )
        for each in report["samples"]
    ]
    header = ("document", "tokens", "tokenised again", "beginning")
    return ResultTable("Samples of token files, decoded", header, tuple(rows), text_columns=4)


def samples_sentence(report: Report) -> str:
    """What speaks against the tokenizer of token files; empty if nothing does."""
    samples = report.get("samples") or ()
    different = sum(each["comparison"] == "different" for each in samples)
    sentences = []
    if different:
        sentences.append(
            f"The tokenizer makes other ids of {different} of {len(samples)} sampled texts; they were cut, tokenised "
            "in pieces, or come from another tokenizer."
        )
    others = {each["stated_tokenizer"]: None for each in samples}
    for name in others:
        if name_differs(name, report["tokenizer"]):
            sentences.append(
                f"The metadata name the tokenizer {shown(name)}, but you gave {shown(report['tokenizer'])}."
            )
    return " ".join(sentences)


def histogram_table(report: Report) -> ResultTable:
    """Documents and tokens by length in bins that double in width, with bars for the share of tokens."""
    bins, tokens = report["histogram"], report["tokens"]
    # Bars are relative to the fullest bin, while the share column is relative to all tokens.
    most = max((each["tokens"] for each in bins), default=0)
    rows = [
        (
            f"{each['start']:,} to {each['end'] - 1:,}",
            f"{each['documents']:,}",
            f"{each['tokens']:,}",
            share_text(each["tokens"] / tokens if tokens else math.nan),
            bar(each["tokens"] / most if most else 0.0),
        )
        for each in bins
    ]
    header = ("length in tokens", "documents", "tokens", "share", "")
    return ResultTable(
        "Distribution of document lengths; bars: share of tokens",
        header,
        tuple(rows),
        text_columns=0,
        bars=True,
    )


_TOTALS = {
    "tokens": "requested",
    "weights": "implied by the weights",
    "shares": "implied by the shares",
    "corpus": "in the corpus",
}


def mixture_table(mixture: Report) -> ResultTable:
    """Shares of tokens by source: before the mixture, requested, and achieved."""
    long_from = mixture["long_from"]
    header = ["source", "before", "requested", "achieved"]
    if long_from is not None:
        header += [f"{state}, {format_length(long_from)} or longer" for state in header[1:]]
    rows = [_mixture_row(source_name(each["source"]), each, long_from) for each in mixture["sources"]]
    if len(rows) != 1:
        rows.append(_mixture_row("all", mixture["total"], long_from))
    notes = [
        f"{mixture['tokens_achieved']:,} tokens of {mixture['tokens_asked']:,} {_TOTALS[mixture['total_from']]}; "
        f"{mixture['tokens_available']:,} available"
    ]
    if long_from is not None:
        notes.append("The last three columns are shares of the source's tokens, the others of all tokens.")
    # These sentences quote names of sources, which are untrusted text.
    notes += [shown(sentence) for sentence in mixture["shortages"]]
    return ResultTable(
        "Mixture: shares of tokens, without BOS, tags and EOS", tuple(header), tuple(rows), notes=tuple(notes)
    )


def _mixture_row(name: str, each: Report, long_from: int | None) -> tuple[str, ...]:
    kinds = ("share", "long") if long_from is not None else ("share",)
    values = [each[f"{kind}_{state}"] for kind in kinds for state in ("before", "asked", "achieved")]
    return (name, *(MISSING if value is None else f"{value:.2%}".replace("%", " %") for value in values))


def attention_sentence(report: Report) -> str:
    """Share of full attention that each attention pattern computes, as a sentence; empty if it was not counted."""
    share = report["attention_share"]
    if not share or math.isnan(share["full"]):
        return ""
    faster = report["attention_ideal_speedup"]
    how = "" if report["packed"] else " packed with these documents in order"
    return (
        f"In sequences of {report['row_length']:,} tokens{how}, the pattern intra_document computes "
        f"{share_text(share['intra_document'])} of the query-key pairs of full attention, and anchor "
        f"{share_text(share['anchor'])}. Attention is at best {faster['intra_document']:,.3g} and "
        f"{faster['anchor']:,.3g} times faster; the rest of a training step is not affected."
    )


def repeats_sentence(report: Report) -> str:
    """Number of repeated documents, as a sentence; empty if there are none."""
    repeats = report["repeats"]
    if not repeats or not repeats["documents"]:
        return ""
    # A corpus holds copies of a text; in packed sequences, one document was read several times.
    count, thing = repeats["documents"], "document" if report["packed"] else "text"
    share = repeats["tokens"] / report["tokens"] if report["tokens"] else math.nan
    there = "were read" if report["packed"] else "occur"
    if count == 1:
        there = "was read" if report["packed"] else "occurs"
    return (
        f"{count:,} {thing}{'' if count == 1 else 's'} {there} more than once, at most {repeats['most']:,} times; the "
        f"repeated copies have {repeats['tokens']:,} tokens ({share_text(share)} of all)"
    )


def rows_sentence(report: Report) -> str:
    """Number of packed sequences and of documents in each, in words; empty for documents that are not packed."""
    if report["rows"] is None:
        return ""
    sentence = f"{report['rows']:,} {'sequence' if report['rows'] == 1 else 'sequences'}"
    if "kind" in report:
        sentence += f" of {report['kind']}"
    if report["documents_per_row"] is None:
        return sentence
    quantiles = report["documents_per_row_quantiles"]
    few, most = (f"{quantiles[key]:,.0f}" for key in ("0", "1"))
    spread = f" ({few} to {most})" if few != most else ""
    return f"{sentence}, {report['documents_per_row']:,.1f} documents per sequence{spread}"


def bar(part: float) -> str:
    """Draw a bar for a share from 0 to 1 of ``BAR_CELLS`` characters. A positive share is always visible."""
    # Block characters come in eighths of a cell.
    eighths = max(1, round(part * BAR_CELLS * 8)) if part else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def source_name(name: str) -> str:
    """Make a source's name, which is untrusted text, safe to show."""
    return shown(name, _NAME_CHARACTERS)
