"""Text of others is shown in one line that can do no harm, and loses nothing unsaid."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.reporting import shown
from ropewalk.reporting.shown_text import harmless

ANY = st.text(st.characters(codec=None) | st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"]))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("plain [bold]text[/bold]", "plain [bold]text[/bold]"),
        ("Grüße, 北京 🚀", "Grüße, 北京 🚀"),
        ("one\ntwo\r\n", "one↵two\\x0d↵"),
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("\x00\t\x7f\x9b31m", "\\x00\\x09\\x7f\\x9b31m"),
        ("abc\u202edcba\u2066", "abc\\u202edcba\\u2066"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("\U000e0041tag", "\\U000e0041tag"),
        ("half \ud83d of a pair", "half \\ud83d of a pair"),
        ("क\u200dष 👩\u200d🚀", "क\u200dष 👩\u200d🚀"),
        ("line\u2028break", "line\\u2028break"),
    ],
)
def test_what_cannot_be_seen_is_written_out(text: str, line: str) -> None:
    assert shown(text) == line


@given(ANY, st.integers(2, 30))
def test_every_line_is_safe_and_can_be_written(text: str, most: int) -> None:
    line = shown(text, most)
    line.encode("utf-8")
    allowed = {"\u200c", "\u200d"}
    assert not [
        c for c in line if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in allowed
    ]
    assert len(line.splitlines()) <= 1


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"])), st.integers(2, 30))
def test_the_middle_is_left_out_and_counted(text: str, most: int) -> None:
    line = shown(text, most)
    if len(text) <= most:
        assert line == text
        return
    found = re.fullmatch(r"(.*) … \(([\d,]+) characters left out\) … (.*)", line)
    assert found is not None
    head, left_out, tail = found[1], int(found[2].replace(",", "")), found[3]
    assert len(head) + len(tail) == most
    assert 0 <= len(head) - len(tail) <= 1
    assert len(text) == most + left_out
    assert text.startswith(head)
    assert text.endswith(tail)


def test_a_line_of_a_megabyte_becomes_a_short_one() -> None:
    line = shown("\x1b" * 2**20)
    assert len(line) < 1300
    assert "(1,048,276 characters left out)" in line


@given(ANY)
def test_harmless_text_keeps_its_line_breaks_and_tabs_and_no_other_control_character(text: str) -> None:
    found = harmless(text)
    assert harmless(found) == found
    assert re.sub(r"\\x0[9a]|↵", "", shown(text, max(2, len(text)))) == re.sub(
        r"[\n\t]|\\x0[9a]|↵", "", found
    )
    assert [each for each in found if each in "\n\t"] == [each for each in text if each in "\n\t"]


@pytest.mark.parametrize("most", [1, 0, -3])
def test_too_little_room_is_refused(most: int) -> None:
    with pytest.raises(RopewalkError, match=f"must be 2 or more, got {most}"):
        shown("text", most)
