"""Showing results: figures, tables for the terminal, and one HTML page. Nothing here computes a result.

matplotlib takes a second to import, so names are imported on first use.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.reporting.figures import passkey_figure, perplexity_figure, training_figure
    from ropewalk.reporting.page import write_report
    from ropewalk.reporting.tables import ResultTable, result_tables

_HOMES = {
    "ResultTable": "tables",
    "passkey_figure": "figures",
    "perplexity_figure": "figures",
    "result_tables": "tables",
    "training_figure": "figures",
    "write_report": "page",
}

__all__ = [
    "ResultTable",
    "passkey_figure",
    "perplexity_figure",
    "result_tables",
    "training_figure",
    "write_report",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
