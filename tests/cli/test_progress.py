"""Progress: a line stays one line, and a bar moves the cursor while its texts do not."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given

from ropewalk.cli import output, progress
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


PATH = "/a/folder/" + "with-a-long-name" * 8
SENTENCE = f"The rows packed so far are in {PATH}, and every word of this sentence is whole."


@pytest.mark.parametrize(
    "print_in",
    [lambda console: console.prose(SENTENCE), lambda console: ConsoleReporter(console).note(SENTENCE)],
)
def test_a_terminal_breaks_lines_between_words_and_cuts_no_path(print_in: Callable[[Terminal], None]) -> None:
    lines = printed_by(print_in, force_terminal=True, width=40).splitlines()
    assert len(lines) > 2
    assert " ".join(line.strip() for line in lines) == SENTENCE
    assert PATH + "," in [line.strip() for line in lines]
    assert all(len(line) <= 40 for line in lines if PATH not in line)
    # Whoever reads a file or a pipe searches whole lines.
    assert printed_by(print_in, width=40) == SENTENCE + "\n"


def test_sentences_of_a_result_are_broken_and_its_paths_and_commands_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = f"next     ropewalk extend {PATH} --set stages.0.steps=1000 --resume"

    remarks = [f"{begin}{command}" for begin in ("note: ", "warning: ", "stage 1: ", "- ")]

    def draw(console: Terminal) -> None:
        monkeypatch.setattr(output, "results", lambda: console)
        output.show([SENTENCE, *remarks, command])

    lines = printed_by(draw, force_terminal=True, width=40).splitlines()
    assert lines[0].strip() == "The rows packed so far are in"
    assert not set(remarks) & set(lines)
    assert lines[-1] == command


def test_a_spinner_ends_with_its_work_and_leaves_nothing_above_an_error() -> None:
    def draw(console: Terminal) -> None:
        with ConsoleReporter(console).bar("packing", None) as advance:
            advance(3, "3 documents")

    def broken(console: Terminal) -> None:
        with ConsoleReporter(console).bar("packing", None) as advance:
            advance(3, "3 documents")
            raise ZeroDivisionError

    def fail(console: Terminal) -> None:
        with pytest.raises(ZeroDivisionError):
            broken(console)

    def last_frame(drawn: str) -> str:
        return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", drawn.rpartition("\x1b[2K")[2]).strip()

    assert last_frame(printed_by(draw, force_terminal=True, width=80)) == "packing done 0:00:00 3 documents"
    assert last_frame(printed_by(fail, force_terminal=True, width=80)) == ""
