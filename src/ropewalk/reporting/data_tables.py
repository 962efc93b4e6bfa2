"""What a corpus or packed rows consist of, as tables and sentences for the terminal.

Every function takes plain values as ``ropewalk data stats --json`` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.io.lengths import format_length
from ropewalk.reporting.shown_text import shown
from ropewalk.reporting.style import MISSING, share_text
from ropewalk.reporting.tables import ResultTable

BAR_CELLS = 30
"""Width of the longest bar of a histogram, in characters."""
_EIGHTHS = " ▏▎▍▌▋▊▉"
_NAME_CHARACTERS = 60

Report = Mapping[str, Any]


def source_table(report: Report) -> ResultTable:
    """Documents, tokens, shares and lengths by source; columns of long documents only where there are any.

    Of packed rows these are the documents that were packed, whole; :func:`pieces_table` has what lies in rows.
    """
    sources = report["sources"]
    longest = _long_lengths(report)
    header = (
        "source",
        "documents",
        "mixture ratio",
        "tokens",
        "token ratio",
        "mean",
        "median",
        "90 %",
        "longest",
    )
    rows = [_source_row(source_name(name), source, longest) for name, source in sources.items()]
    if len(sources) != 1:
        one = {"mixture_ratio": 1.0, "token_ratio": 1.0} if report["documents"] else {}
        nothing = {"mixture_ratio": math.nan, "token_ratio": math.nan}
        rows.append(_source_row("all", {**nothing, **one, **report}, longest))
    over = _over(longest)
    if report["packed"]:
        title = "Documents packed, by source: whole, repeated ones each time, their own tokens"
    else:
        title = "Documents by source; lengths in tokens"
    return ResultTable(
        title + (f"; {over[0]}: share of tokens in documents longer than that" if longest else ""),
        (*header, *over),
        tuple(rows),
    )


def pieces_table(report: Report) -> ResultTable:
    """Pieces of documents in packed rows by source, with their tokens, shares and lengths."""
    inside = report["in_rows"]
    longest = _long_lengths(inside)
    header = ("source", "pieces", "share of pieces", "tokens in rows", "share", "mean", "median", "longest")
    rows = [_piece_row(source_name(name), each, longest) for name, each in inside["sources"].items()]
    if len(rows) != 1:
        rows.append(_piece_row("all", inside, longest))
    over = _over(longest)
    return ResultTable(
        "In rows: pieces of documents, by source"
        + (f"; {over[0]}: share of tokens in pieces longer than that" if longest else ""),
        (*header, *over),
        tuple(rows),
        notes=("A piece is a document in a row, or what a row holds of it; tokens with BOS, tags and EOS.",),
    )


def _piece_row(name: str, each: Report, longest: Sequence[str]) -> tuple[str, ...]:
    quantiles = each["length_quantiles"]
    return (
        name,
        f"{each['pieces']:,}",
        share_text(each["piece_ratio"]),
        f"{each['tokens']:,}",
        share_text(each["token_ratio"]),
        *(_length(length) for length in (each["mean_length"], quantiles["0.5"], quantiles["1"])),
        *(share_text(each["long_shares"][key]) for key in longest),
    )


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


def histogram_table(report: Report) -> ResultTable:
    """Documents and tokens by length, each bin twice as long as the one before, with bars for the tokens."""
    bins, tokens = report["histogram"], report["tokens"]
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
    return ResultTable("Length distribution: share of tokens", header, tuple(rows), text_columns=0, bars=True)


_TOTALS = {
    "tokens": "asked for",
    "weights": "that follow from the weights",
    "shares": "that follow from the shares",
    "corpus": "that the corpus has",
}


def mixture_table(mixture: Report) -> ResultTable:
    """Shares of tokens before the mixture, as asked for, and as achieved, by source."""
    long_from = mixture["long_from"]
    header = ["source", "before", "asked", "achieved"]
    if long_from is not None:
        header += [f"{state}, {format_length(long_from)} or longer" for state in header[1:]]
    rows = [_mixture_row(source_name(each["source"]), each, long_from) for each in mixture["sources"]]
    if len(rows) != 1:
        rows.append(_mixture_row("all", mixture["total"], long_from))
    notes = [
        f"{mixture['tokens_achieved']:,} tokens of {mixture['tokens_asked']:,} {_TOTALS[mixture['total_from']]}; "
        f"{mixture['tokens_available']:,} before"
    ]
    if long_from is not None:
        notes.append("The last three columns are of the tokens of the source, the others of all tokens.")
    notes += [shown(sentence) for sentence in mixture["shortages"]]
    return ResultTable(
        "Mixture: shares of documents' own tokens", tuple(header), tuple(rows), notes=tuple(notes)
    )


def _mixture_row(name: str, each: Report, long_from: int | None) -> tuple[str, ...]:
    kinds = ("share", "long") if long_from is not None else ("share",)
    values = [each[f"{kind}_{state}"] for kind in kinds for state in ("before", "asked", "achieved")]
    return (name, *(MISSING if value is None else f"{value:.2%}".replace("%", " %") for value in values))


def attention_sentence(report: Report) -> str:
    """What the patterns compute of full attention, in words; empty where it was not counted."""
    share = report["attention_share"]
    if not share or math.isnan(share["full"]):
        return ""
    faster = report["attention_ideal_speedup"]
    how = "" if report["packed"] else " filled with these documents in order"
    return (
        f"rows of {report['row_length']:,} tokens{how}: intra_document computes "
        f"{share_text(share['intra_document'])} of full attention's pairs, anchor {share_text(share['anchor'])}; "
        f"attention alone is at best {faster['intra_document']:,.3g} and {faster['anchor']:,.3g} times faster, the "
        "rest of a step costs the same"
    )


def repeats_sentence(report: Report) -> str:
    """How many documents are there more than once, in words; empty where none is."""
    repeats = report["repeats"]
    if not repeats or not repeats["documents"]:
        return ""
    count, thing = repeats["documents"], "document" if report["packed"] else "text"
    share = repeats["tokens"] / report["tokens"] if report["tokens"] else math.nan
    there = "read" if report["packed"] else "there"
    return (
        f"{count:,} {thing}{' is' if count == 1 else 's are'} {there} more than once, {repeats['most']:,} times at "
        f"most; further copies have {repeats['tokens']:,} tokens ({share_text(share)} of all)"
    )


def rows_sentence(report: Report) -> str:
    """How many rows there are, in words; empty for documents that are not packed."""
    if report["rows"] is None:
        return ""
    sentence = f"{report['rows']:,} {'row' if report['rows'] == 1 else 'rows'}"
    if report["documents_per_row"] is None:
        return sentence
    quantiles = report["documents_per_row_quantiles"]
    few, most = (f"{quantiles[key]:,.0f}" for key in ("0", "1"))
    spread = f" ({few} to {most})" if few != most else ""
    return f"{sentence}, {report['documents_per_row']:,.1f} documents a row{spread}"


def bar(part: float) -> str:
    """A bar for a part from 0 to 1 of ``BAR_CELLS``; what is more than nothing can be seen."""
    eighths = max(1, round(part * BAR_CELLS * 8)) if part else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def source_name(name: str) -> str:
    """A source's name as it is shown: somebody else wrote it."""
    return shown(name, _NAME_CHARACTERS)
