"""The page is one file that needs no other, and nothing in it is taken for markup."""

import base64
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.reporting import (
    Examples,
    Page,
    Picture,
    draw,
    evaluation_tables,
    perplexity_figure,
    score_rows,
    write_page,
)
from ropewalk.reporting.figures.drawing import draw_for_page
from ropewalk.reporting.tables import ResultTable
from ropewalk.versions import software_versions
from tests.reporting.reporting_cases import AFTER, BEFORE

NASTY = "<script>alert('x')</script> & \"quotes\""


class Reader(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_holds_everything_and_asks_for_nothing(tmp_path: Path) -> None:
    figures = [tmp_path / "perplexity_by_position.png", tmp_path / "same.svg"]
    for figure in figures:
        draw(perplexity_figure(score_rows({"before": [BEFORE], "after": [AFTER]}), 512), figure)
    tables = evaluation_tables({"before": [BEFORE], "after": [AFTER]})
    page = tmp_path / "report" / "report.html"
    pictures = [Picture(figures[0]), Picture(figures[1], 'what "it" shows <b>')]
    facts = {"model": "stories", "steps": 60}
    write_page(Page("stories to 2,048", facts, pictures, tables, details={"recipe": "a: 1"}), page)
    read = Reader(page.read_text(encoding="utf-8"))
    assert not read.open
    assert "script" not in read.tags
    assert "link" not in read.tags
    sources = [value for name, value in read.attributes if name in ("src", "href")]
    kinds = ("image/png", "image/svg+xml")
    for source, figure, kind in zip(sources, figures, kinds, strict=True):
        head, _, content = str(source).partition(",")
        assert head == f"data:{kind};base64"
        assert base64.b64decode(content) == figure.read_bytes()
    assert ("alt", "perplexity by position") in read.attributes
    assert ("alt", 'what "it" shows <b>') in read.attributes
    for text in ("stories to 2,048", "model", "60", "512 to 1,023", "2.51 to 3.07", "recipe", "a: 1"):
        assert text in read.text


def test_a_page_has_the_caption_as_text_and_the_picture_without_it(tmp_path: Path) -> None:
    figure = replace(perplexity_figure(score_rows({"before": [BEFORE]})), caption="Words of <b> the caption.")
    picture = draw_for_page(figure, tmp_path / "a.png")
    write_page(Page("a", pictures=[picture]), tmp_path / "report.html")
    read = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert read.tags.count("figcaption") == 1
    assert figure.caption in read.text
    assert ("alt", figure.alternative()) in read.attributes
    (source,) = [str(value) for name, value in read.attributes if name == "src"]
    head, _, content = source.partition(",")
    assert head == "data:image/svg+xml;base64"
    assert b"Words of" not in base64.b64decode(content)
    draw(figure, tmp_path / "a.svg")
    # matplotlib writes every text as a comment before its outlines.
    assert b"<!-- Words of" in (tmp_path / "a.svg").read_bytes()


def test_all_text_is_escaped(tmp_path: Path) -> None:
    figure = tmp_path / 'a" onload="x.png'
    draw(perplexity_figure(score_rows({"a": [BEFORE]})), figure)
    tables = [replace(t, notes=(NASTY,)) for t in evaluation_tables({NASTY: [BEFORE], "after": [AFTER]})]
    page = tmp_path / "report.html"
    examples = [Examples(NASTY, ({NASTY: NASTY},))]
    pictures = [Picture(figure), Picture(figure, NASTY, NASTY)]
    write_page(Page(NASTY, {NASTY: NASTY}, pictures, tables, examples, {NASTY: NASTY}), page)
    read = Reader(page.read_text(encoding="utf-8"))
    assert "script" not in read.tags
    assert "onload" not in dict(read.attributes)
    # Title and heading, a fact's name and value, a picture's caption, a table's heading and note, an example's heading,
    # name and value, a fold's heading and text.
    assert read.text.count(NASTY) == 12


def test_what_hides_or_turns_text_is_written_out(tmp_path: Path) -> None:
    page, evil = tmp_path / "page.html", "a\x1b[31m\u202eb\udcff"
    table = ResultTable(evil, (evil,), ((evil,),), notes=(evil,))
    details = {evil: f"{evil}\nsecond line"}
    write_page(Page(evil, {evil: evil}, tables=[table], details=details), page)
    text = page.read_text()
    assert not set(text) & set("\x1b\u202e")
    # Twice the title, both sides of a fact, the table's four texts, both of the details.
    assert text.count(r"a\x1b[31m\u202eb\udcff") == 10
    assert "\nsecond line" in text


def test_page_without_figures_tables_and_details(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_page(Page("empty"), page)
    read = Reader(page.read_text(encoding="utf-8"))
    assert not {"h2", "img", "table", "details", "dl"} & set(read.tags)


def test_missing_figures_leave_the_old_page(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")
    with pytest.raises(RopewalkError, match="cannot read the figure"):
        write_page(Page("new", pictures=[Picture(tmp_path / "missing.png")]), page)
    with pytest.raises(RopewalkError, match=r"\.png and \.svg figures, got a\.pdf"):
        write_page(Page("new", pictures=[Picture(tmp_path / "a.pdf")]), page)
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_versions_name_what_results_depend_on() -> None:
    assert {"ropewalk", "python", "torch", "transformers"} <= set(software_versions())
