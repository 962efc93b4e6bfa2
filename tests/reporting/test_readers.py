"""The table of programs that read a checkpoint."""

from ropewalk.readers import Reading
from ropewalk.reporting.readers import readers_table


def test_each_program_has_a_line_with_the_command_that_is_right() -> None:
    found = [
        Reading("a", "A", "same", served=4096, launch="a serve"),
        Reading("b", "B", "with an option", "attention factor 2, not 1", 16384, "b serve", "b serve --right"),
        Reading("c", "C", "refuses", "it does not know the rope type 'x'"),
    ]
    table = readers_table(found, "Programs that read it")
    assert table.title == "Programs that read it"
    assert [row[:4] for row in table.rows] == [
        ("A", "same", "4,096", "a serve"),
        ("B", "with an option", "16,384", "b serve --right"),
        ("C", "refuses", "–", "–"),
    ]
    assert [row[4] for row in table.rows] == ["–", found[1].detail, found[2].detail]
