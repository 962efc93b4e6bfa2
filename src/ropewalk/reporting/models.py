"""Show which model families are supported: all as a table, or one with every reason."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from ropewalk.models.support import COLUMNS, TESTED, ModelsSettings, Support, SupportResult
from ropewalk.reporting.tables import Part, ResultTable


def describe_support(result: SupportResult, config: ModelsSettings) -> Iterator[Part]:
    """Table of all families with a status per column, or one line per column for a single family."""
    if config.family is not None:
        for column, support in result.families[config.family].items():
            reason = f": {support.reason}" if support.reason else ""
            yield Text(f"{COLUMNS[column]}: {support.status}{reason}")
        return
    rows = tuple(
        (name, *(_word(support) for support in cells.values())) for name, cells in result.families.items()
    )
    tested = sum(cells["packed_training"].status == TESTED for cells in result.families.values())
    yield ResultTable(
        f"{len(rows)} families with RoPE in transformers {result.transformers}; {tested} train on packed sequences",
        ("family", *COLUMNS.values()),
        rows,
        text_columns=1 + len(COLUMNS),
    )
    yield ""
    yield Text(f"no RoPE: {', '.join(result.without_rope)}")
    yield Text(
        "Each family is tested with a tiny random model. `ropewalk models FAMILY` says why a feature is refused."
    )


def _word(support: Support) -> str:
    """A status, with a star if ``ropewalk models FAMILY`` adds a remark to it."""
    return f"{support.status} *" if support.status == TESTED and support.reason else support.status
