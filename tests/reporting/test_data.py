"""How packed rows are shown: every token of a preview, and histograms of what was counted."""

from pathlib import Path

from ropewalk.data.row_preview import Chunk, RowPreview, Span
from ropewalk.data.run import DataPreview
from ropewalk.reporting.data import describe_stats, preview_lines, stats_figure
from ropewalk.reporting.tables import ResultTable
from tests.reporting.data_reports import AFTER, BEFORE, EVIL


def test_a_report_is_shown_by_source_and_a_mixture_only_where_it_changed_something():
    unmixed = {**BEFORE, "mixture": None}
    tables = [part for part in describe_stats(unmixed) if isinstance(part, ResultTable)]
    assert {row[0] for row in tables[0].rows} == {"web", "books", "all"}
    still = {**unmixed, "mixture": {"as_is": True}}
    assert len(list(describe_stats(still))) == len(list(describe_stats(unmixed)))


def test_a_figure_has_what_was_before_only_where_a_mixture_changed_something():
    assert stats_figure({**BEFORE, "mixture": None}).title == "Document lengths"
    mixed = {**AFTER, "corpus": BEFORE, "mixture": {"as_is": False}}
    assert stats_figure(mixed).title == "Document lengths before and after the mixture"


def test_a_preview_shows_each_span_once_with_its_mark_and_no_text_commands_the_terminal():
    spans = (
        Span("special", 1, 2, "<s>", True, ("<s>",)),
        Span("text", 2, 5, "one \x1b[2J", False, ()),
        Span("left_out", 5, 90, None, False, ()),
    )
    chunk = Chunk(
        document=0, number=7, source=EVIL, start=1, stop=90, part=2, parts=3, continues=True, spans=spans
    )
    row = RowPreview(anchor=None, chunks=(chunk,))
    result = DataPreview(Path("out"), "a tokenizer", context=96, pattern="full", total=12, rows=(row,))
    said = "\n".join(line.plain for line in preview_lines(result))
    assert "sequence 0 of 12: 96 tokens, 1 document, pattern full" in said
    assert "chunk 2 of 3" in said
    assert "⟦«<s>»⟧" in said
    assert " … 85 tokens … " in said
    assert "\x1b" not in said
