"""Showing results: figures, tables for the terminal, and one HTML page. Nothing here computes a result.

matplotlib takes a second to import, so names are imported on first use.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.reporting.comparison_tables import comparison_table
    from ropewalk.reporting.evaluation_bars import difference_figure, retention_figure
    from ropewalk.reporting.evaluation_figures import score_figure, tasks_figure
    from ropewalk.reporting.evaluation_page import write_evaluation_report
    from ropewalk.reporting.figures import passkey_figure, perplexity_figure, training_figure
    from ropewalk.reporting.needle_grid import needle_figure
    from ropewalk.reporting.page import Examples, Page, Picture, write_page
    from ropewalk.reporting.shown_text import shown
    from ropewalk.reporting.tables import ResultTable, result_tables

# The function evaluation_tables bears its module's name and is imported from there.
_HOMES = {
    "Examples": "page",
    "Page": "page",
    "Picture": "page",
    "ResultTable": "tables",
    "comparison_table": "comparison_tables",
    "difference_figure": "evaluation_bars",
    "needle_figure": "needle_grid",
    "passkey_figure": "figures",
    "perplexity_figure": "figures",
    "result_tables": "tables",
    "retention_figure": "evaluation_bars",
    "score_figure": "evaluation_figures",
    "shown": "shown_text",
    "tasks_figure": "evaluation_figures",
    "training_figure": "figures",
    "write_evaluation_report": "evaluation_page",
    "write_page": "page",
}

__all__ = [
    "Examples",
    "Page",
    "Picture",
    "ResultTable",
    "comparison_table",
    "difference_figure",
    "needle_figure",
    "passkey_figure",
    "perplexity_figure",
    "result_tables",
    "retention_figure",
    "score_figure",
    "shown",
    "tasks_figure",
    "training_figure",
    "write_evaluation_report",
    "write_page",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
