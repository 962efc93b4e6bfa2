"""How the table of supported families is shown."""

from rich.text import Text

from ropewalk.models.support import COLUMNS, ModelsSettings, Support, SupportResult
from ropewalk.reporting.models import describe_support
from ropewalk.reporting.tables import ResultTable

TESTED = dict.fromkeys(COLUMNS, Support("tested"))
RESULT = SupportResult(
    "5.0",
    {
        "a": TESTED,
        "b": {**TESTED, "packed_training": Support("tested", "with care"), "audit": Support("refused", "so")},
    },
    ("c", "d"),
)


def test_all_families_in_a_table_with_a_star_where_there_is_more_to_say():
    table, _, *lines = describe_support(RESULT, ModelsSettings())
    assert isinstance(table, ResultTable)
    assert table.rows[1] == ("b", "tested *", "tested", "tested", "refused", "tested", "tested")
    assert "2 families" in table.title
    assert str(lines[0]) == "no RoPE: c, d"


def test_one_family_says_its_reasons():
    lines = [
        str(part) for part in describe_support(RESULT, ModelsSettings(family="b")) if isinstance(part, Text)
    ]
    assert lines[0] == "packed training: tested: with care"
    assert "audit: refused: so" in lines
    assert len(lines) == len(COLUMNS)
