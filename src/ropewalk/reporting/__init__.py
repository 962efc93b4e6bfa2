"""Show results as figures, terminal tables and HTML pages. Nothing here computes a result.

Each module named after a package (``audit``, ``search``, ...) shows that package's results: its ``describe_...``
functions yield the terminal output, and its ``..._figure`` functions build figures. The functions in ``figures`` build
a :class:`~ropewalk.reporting.figures.primitives.Figure` from plain values, and ``draw`` writes it to a file.
matplotlib takes a second to import, so names are imported on first use.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.reporting.evaluation import evaluation_figures, evaluation_tables, write_evaluation_report
    from ropewalk.reporting.figures.data import length_figure
    from ropewalk.reporting.figures.drawing import draw
    from ropewalk.reporting.figures.evaluation import (
        difference_figure,
        needle_figure,
        passkey_figure,
        perplexity_figure,
        retention_figure,
        score_figure,
        tasks_figure,
    )
    from ropewalk.reporting.figures.primitives import Figure
    from ropewalk.reporting.figures.search import search_figure
    from ropewalk.reporting.figures.training import training_figure
    from ropewalk.reporting.page import Examples, Page, Picture, write_page
    from ropewalk.reporting.score_tables import comparison_table, result_tables
    from ropewalk.reporting.shown_text import shown
    from ropewalk.reporting.tables import ResultTable

_HOMES = {
    "Examples": "page",
    "Figure": "figures.primitives",
    "Page": "page",
    "Picture": "page",
    "ResultTable": "tables",
    "comparison_table": "score_tables",
    "difference_figure": "figures.evaluation",
    "draw": "figures.drawing",
    "evaluation_figures": "evaluation",
    "evaluation_tables": "evaluation",
    "length_figure": "figures.data",
    "needle_figure": "figures.evaluation",
    "passkey_figure": "figures.evaluation",
    "perplexity_figure": "figures.evaluation",
    "result_tables": "score_tables",
    "retention_figure": "figures.evaluation",
    "score_figure": "figures.evaluation",
    "search_figure": "figures.search",
    "shown": "shown_text",
    "tasks_figure": "figures.evaluation",
    "training_figure": "figures.training",
    "write_evaluation_report": "evaluation",
    "write_page": "page",
}

__all__ = [
    "Examples",
    "Figure",
    "Page",
    "Picture",
    "ResultTable",
    "comparison_table",
    "difference_figure",
    "draw",
    "evaluation_figures",
    "evaluation_tables",
    "length_figure",
    "needle_figure",
    "passkey_figure",
    "perplexity_figure",
    "result_tables",
    "retention_figure",
    "score_figure",
    "search_figure",
    "shown",
    "tasks_figure",
    "training_figure",
    "write_evaluation_report",
    "write_page",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
