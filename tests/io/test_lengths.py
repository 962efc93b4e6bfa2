import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import duration, format_length, parse_length


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("131072", 131072),
        ("128k", 131072),
        ("128K", 131072),
        (" 32 k ", 32768),
        ("1M", 1048576),
        ("1m", 1048576),
        ("1.5k", 1536),
        ("0.25M", 262144),
        ("1", 1),
        ("131,072", 131072),
        ("131_072", 131072),
        ("1,048,576", 1048576),
    ],
)
def test_lengths_as_people_write_them(text: str, tokens: int) -> None:
    assert parse_length(text) == tokens


MANY_DIGITS = ("9" * 400, "9" * 5000, "9" * 400 + ".5", "1." + "0" * 5000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "k",
        "-1",
        "0",
        "0k",
        "1.5",
        "0.1k",
        "128kb",
        "1g",
        "1e5",
        "1,048_576",
        "1,0000",
        "1000,000",
        "128,",
        "1,000.5",
        "nan",
        "１k",
        "12 8k",
        "9" * 400,
        "9" * 5000,
        "1." + "0" * 400,
    ],
)
def test_anything_else_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(RopewalkError) as caught:
        parse_length(text)
    assert repr(text) in str(caught.value)


@given(st.integers(1, 10**12))
def test_format_is_exact(tokens: int) -> None:
    assert parse_length(format_length(tokens)) == tokens


def test_format_is_short() -> None:
    assert [format_length(tokens) for tokens in (1023, 1024, 131072, 1536, 1 << 20)] == [
        "1023",
        "1k",
        "128k",
        "1536",
        "1M",
    ]


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.034, "0.034 seconds"),
        (9.3, "9.3 seconds"),
        (40.4, "40 seconds"),
        (119, "119 seconds"),
        (120, "2 minutes"),
        (5400, "90 minutes"),
        (7200, "2.0 hours"),
        (4_000_000, "1,111.1 hours"),
    ],
)
def test_durations_have_the_unit_that_people_would_use(seconds: float, written: str) -> None:
    assert duration(seconds) == written
