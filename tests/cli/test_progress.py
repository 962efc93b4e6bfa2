"""Progress: a line stays one line, and a bar moves the cursor while its texts do not."""

import pytest
from hypothesis import given

from ropewalk.cli import progress
from ropewalk.cli.output import Terminal
from ropewalk.cli.progress import ConsoleReporter
from tests.cli.output_cases import ANY, EVIL, acting, printed_by


@given(ANY)
def test_a_line_stays_one_line_and_its_text_is_no_markup(text: str) -> None:
    for show in (
        lambda console: console.say(text),
        lambda console: ConsoleReporter(console).note(text),
    ):
        printed = printed_by(show)
        assert printed.endswith("\n")
        assert printed.count("\n") == 1
    plain = "".join(each for each in text if each.isalnum() or each in "[]:/")
    assert printed_by(lambda console: console.say(plain)) == plain + "\n"


def test_a_bar_moves_the_cursor_and_its_texts_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(console: Terminal) -> None:
        with ConsoleReporter(console).bar(f"stage {EVIL}", 2) as advance:
            advance(1, EVIL)

    drawn = printed_by(draw, force_terminal=True)
    # The bar's own: it hides the cursor.
    assert "\x1b[?25l" in drawn
    for command in ("\x1b[2J", "\x1b]", "\x9b", "\u202e", "\x07"):
        assert command not in drawn
    assert "[red]x[/red] :bomb: \\udcff" in drawn
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    assert acting(printed_by(draw)) == []
