"""Showing results: figures, tables for the terminal, and one HTML page. Nothing here computes a result.

matplotlib takes a second to import, so names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ropewalk.reporting' has no attribute {name!r}")
    return getattr(import_module(f"ropewalk.reporting.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
