"""The table of programs that read a checkpoint."""

from ropewalk.compatibility import Reading
from ropewalk.reporting.compatibility import readers_parts


def test_each_program_has_a_line_with_the_command_that_is_right() -> None:
    found = [
        Reading("a", "A", "same", served=4096, launch="a serve"),
        Reading("b", "B", "with an option", "attention factor 2, not 1", 16384, "b serve", "b serve --right"),
        Reading("c", "C", "refuses", "it does not know the rope type 'x'"),
    ]
    table, first, second, commands = readers_parts(found, "Programs that read it")
    assert table.title == "Programs that read it"
    assert table.rows == (
        ("A", "same", "4,096"),
        ("B", "with an option", "16,384"),
        ("C", "refuses", "–"),
    )
    assert str(first) == "- B: attention factor 2, not 1"
    assert str(second) == "- C: it does not know the rope type 'x'"
    assert commands.rows == (("A", "a serve"), ("B", "b serve --right"))


def test_a_program_that_is_right_for_long_inputs_alone_has_a_line_for_each() -> None:
    two = Reading("a", "A", "long inputs only", "differs at", 64, "a --long", None, 64, "a --short")
    one = Reading("b", "B", "with an option", "no factors", 64, "b --long", "b first", 64)
    table, *_, commands = readers_parts([two, one], "Programs")
    assert [row[1] for row in table.rows] == ["differs up to 64", "with an option, then differs up to 64"]
    assert any("short_factor equals long_factor" in note for note in table.notes)
    assert commands.rows == (
        ("A, inputs above 64 tokens", "a --long"),
        ("A, inputs up to 64 tokens", "a --short"),
        ("B, first", "b first"),
        ("B, inputs above 64 tokens", "b --long"),
    )


def test_programs_without_a_command_have_no_table_of_commands() -> None:
    _, *details = readers_parts([Reading("c", "C", "refuses", "it stops")], "Programs")
    assert [str(each) for each in details] == ["- C: it stops"]


def test_programs_that_differ_alike_share_a_sentence() -> None:
    found = [Reading(key, key.upper(), "differs", "no factors") for key in "ab"]
    _, *details = readers_parts([*found, Reading("c", "C", "differs", "other")], "Programs")
    assert [str(each) for each in details] == ["- A, B: no factors", "- C: other"]
