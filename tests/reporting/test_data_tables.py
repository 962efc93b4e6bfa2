"""Tables of a corpus say what was counted, whoever named the sources."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ropewalk.reporting import data_tables
from tests.reporting.data_reports import AFTER, BEFORE, report


def test_columns_of_long_documents_are_those_that_say_something() -> None:
    table = data_tables.source_table(report({"web": [5000, 10], "books": [70_000]}))
    assert table.header[-3:] == ("> 4K", "> 16K", "> 64K")
    assert table.rows[0] == (
        "books",
        "1",
        "33.3 %",
        "70,000",
        "93.3 %",
        *(["70,000"] * 4),
        *(["100.0 %"] * 3),
    )
    assert table.rows[1][-3:] == ("99.8 %", "0.0 %", "0.0 %")
    assert table.rows[2][:5] == ("all", "3", "100.0 %", "75,010", "100.0 %")
    short = data_tables.source_table(BEFORE)
    assert short.header[-1] == "longest"
    assert ">" not in short.title


def test_documents_that_are_trained_on_in_part_get_a_column() -> None:
    some = report({"chats": [5000, 10], "books": [70]})
    some["sources"]["chats"]["trained_tokens"], some["sources"]["books"]["trained_tokens"] = 501, 70
    some["trained_tokens"] = 571
    table = data_tables.source_table(some)
    assert table.header[-2:] == ("> 4K", "trained on")
    assert [row[-1] for row in table.rows] == ["10.0 %", "100.0 %", "11.2 %"]
    del some["sources"]["chats"]["trained_tokens"]
    assert data_tables.source_table(some).header[-1] == "> 4K"


def test_pieces_stand_in_a_table_of_their_own() -> None:
    pieces = report({"web": [3], "books": [63, 63, 17_000]})
    inside = {
        "pieces": 4,
        "piece_ratio": 1.0,
        "token_ratio": 1.0,
        "trained_tokens": 8000,
        **{key: pieces[key] for key in ("tokens", "mean_length", "length_quantiles", "long_shares")},
        "sources": {
            name: {
                **each,
                "pieces": each["documents"],
                "piece_ratio": each["mixture_ratio"],
                "trained_tokens": trained,
            }
            for (name, each), trained in zip(pieces["sources"].items(), (7998, 2), strict=True)
        },
    }
    table = data_tables.pieces_table({**BEFORE, "packed": True, "in_rows": inside})
    assert table.title.startswith("Document chunks in packed sequences")
    assert table.header == (
        *(
            "source",
            "chunks",
            "share of chunks",
            "tokens",
            "share",
            "trained on",
            "mean",
            "median",
            "longest",
        ),
        *("> 4K", "> 16K"),
    )
    assert table.rows == (
        ("books", "3", "75.0 %", "17,126", "100.0 %", "46.7 %", "5,709", "63", "17,000", "99.3 %", "99.3 %"),
        ("web", "1", "25.0 %", "3", "< 0.1 %", "66.7 %", "3", "3", "3", "0.0 %", "0.0 %"),
        ("all", "4", "100.0 %", "17,129", "100.0 %", "46.7 %", "4,282", "63", "17,000", "99.2 %", "99.2 %"),
    )


def test_a_table_of_packed_documents_says_that_they_are_whole() -> None:
    plain, packed = (data_tables.source_table({**BEFORE, "packed": each}) for each in (False, True))
    assert packed.title.startswith(
        "Packed documents by source, before cutting; repeated documents count each time"
    )
    assert "packed" not in plain.title
    assert packed.header == plain.header
    assert packed.header[1] == "documents"


def test_names_of_sources_are_made_visible() -> None:
    assert data_tables.source_table(AFTER).rows[2][0] == "ev[red]il\\x1b[31m $x$"


def test_nothing_reads_as_a_dash() -> None:
    (row,) = data_tables.source_table(report({})).rows
    assert row == ("all", "0", "–", "0", "–", "–", "–", "–", "–")
    assert data_tables.attention_sentence(report({})) == ""


@given(st.floats(0, 1))
def test_a_bar_is_as_long_as_its_part_to_an_eighth(part: float) -> None:
    drawn = data_tables.bar(part)
    partial = " ▏▎▍▌▋▊▉█"
    eighths = sum(partial.index(cell) for cell in drawn)
    assert abs(eighths - 240 * part) <= (0.5 if part > 1 / 240 else 1)
    assert (eighths > 0) == (part > 0)
    assert set(drawn[:-1]) <= {"█"}


def test_attention_in_words() -> None:
    told = data_tables.attention_sentence(report({"a": [32] * 6}))
    # Two documents a row: 2 * 528 of 2080 pairs. The anchor's rows take 63: two documents, then three pieces.
    assert told.startswith(
        "In sequences of 64 tokens packed with these documents in order, the pattern intra_document computes 50.8 % of "
        "the query-key pairs of full attention, and anchor "
    )
    assert "Attention is at best 1.97 and " in told
    assert data_tables.attention_sentence({**BEFORE, "attention_share": {}}) == ""


def test_repeats_in_words() -> None:
    none = {"documents": 0, "tokens": 0, "most": 1}
    one = {"documents": 1, "tokens": 20, "most": 3}
    assert data_tables.repeats_sentence({**BEFORE, "repeats": none}) == ""
    assert data_tables.repeats_sentence({**BEFORE, "repeats": None}) == ""
    assert data_tables.repeats_sentence({**BEFORE, "repeats": one}) == (
        "1 text occurs more than once, at most 3 times; the repeated copies have 20 tokens (10.0 % of all)"
    )
    two = {**BEFORE, "packed": True, "repeats": {"documents": 2, "tokens": 100, "most": 4}}
    assert data_tables.repeats_sentence(two).startswith(
        "2 documents were read more than once, at most 4 times"
    )


def test_rows_in_words() -> None:
    packed = {**BEFORE, "rows": 1, "documents_per_row": 2.0, "documents_per_row_quantiles": {"0": 2, "1": 2}}
    assert data_tables.rows_sentence(BEFORE) == ""
    assert data_tables.rows_sentence(packed) == "1 sequence, 2.0 documents per sequence"
    packed |= {"rows": 1200, "documents_per_row": 2.25, "documents_per_row_quantiles": {"0": 1, "1": 8}}
    assert data_tables.rows_sentence(packed) == "1,200 sequences, 2.2 documents per sequence (1 to 8)"


def test_a_mixture_shows_before_asked_and_achieved() -> None:
    def proportions(source: str | None, *shares: float | None) -> dict[str, Any]:
        keys = [f"{kind}_{state}" for kind in ("share", "long") for state in ("before", "asked", "achieved")]
        return {"source": source, **dict(zip(keys, shares, strict=True))}

    mixture = {
        "tokens_asked": 1000,
        "tokens_achieved": 998,
        "tokens_available": 2000,
        "total_from": "tokens",
        "long_from": 4096,
        "total": proportions(None, 1.0, 1.0, 1.0, 0.3, 0.5, 0.49),
        "sources": [
            proportions("web", 0.9, 0.5, 0.501, 0.1, 0.3, 0.3),
            proportions("books", 0.1, 0.5, 0.499, None, None, None),
        ],
        "shortages": ["books\x1b is short"],
    }
    table = data_tables.mixture_table(mixture)
    assert table.rows[0] == ("web", "90.00 %", "50.00 %", "50.10 %", "10.00 %", "30.00 %", "30.00 %")
    assert table.rows[1][-3:] == ("–", "–", "–")
    assert table.rows[2][0] == "all"
    assert table.header[4] == "before, 4k or longer"
    assert table.notes[0] == "998 tokens of 1,000 requested; 2,000 available"
    assert table.notes[-1] == "books\\x1b is short"
    short = data_tables.mixture_table({**mixture, "long_from": None})
    assert short.header == ("source", "before", "requested", "achieved")
    assert len(short.notes) == 2


def test_a_histogram_has_bars_that_begin_at_the_left() -> None:
    table = data_tables.histogram_table(BEFORE)
    assert table.header[:2] == ("length in tokens", "documents")
    assert table.rows[0][:4] == ("2 to 3", "1", "3", "1.5 %")
    assert [table.is_text(column) for column in range(5)] == [False] * 4 + [True]
    # The longest bar is that of the most tokens.
    assert max(table.rows, key=lambda row: len(row[4]))[0] == "64 to 127"
