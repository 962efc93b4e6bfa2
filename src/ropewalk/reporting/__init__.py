"""Show results as figures, terminal tables and HTML pages. Nothing here computes a result.

Each module named after a package (``audit``, ``search``, ...) shows that package's results: its ``describe_...``
functions yield the terminal output, and its ``..._figure`` functions build figures. The functions in ``figures`` build
a :class:`~ropewalk.reporting.figures.drawing.Figure` from plain values, and ``draw`` writes it to a file.
matplotlib takes a second to import, so names are imported on first use.

Its files::

    audit, data, dry_run, models, planning, compatibility, recipes, rope, search, verification
                  each shows the results of its room: tables, sentences, figures
    run           pages of a training run, and the card beside its model
    data_tables   a corpus or packed rows as tables and sentences
    scores        tables of scores, and the pages of an evaluation and of a comparison of recipes
    figures       figures from plain results
    style         their colours, markers, sizes and number formats
    tables        tables as text, in the terminal and on pages
    page          self-contained HTML pages, from ``templates``
    answers       a folder of pages with all answers of one model or two
    inspect_logs  all answers of an evaluation as logs of inspect_ai
    shown_text    text from elsewhere, made safe to show
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.reporting.scores.evaluation import (
        evaluation_figures as evaluation_figures,
        write_evaluation_report as write_evaluation_report,
    )
    from ropewalk.reporting.figures.data import length_figure as length_figure
    from ropewalk.reporting.figures.drawing import draw as draw
    from ropewalk.reporting.figures.evaluation import (
        difference_figure as difference_figure,
        needle_figure as needle_figure,
        perplexity_figure as perplexity_figure,
        retention_figure as retention_figure,
        score_figure as score_figure,
        tasks_figure as tasks_figure,
    )
    from ropewalk.reporting.figures.drawing import Figure as Figure
    from ropewalk.reporting.figures.search import search_figure as search_figure
    from ropewalk.reporting.figures.training import training_figure as training_figure
    from ropewalk.reporting.page import (
        Examples as Examples,
        Page as Page,
        Picture as Picture,
        write_page as write_page,
    )
    from ropewalk.evaluation.score_rows import ScoreRow as ScoreRow, score_rows as score_rows
    from ropewalk.reporting.scores.tables import (
        comparison_table as comparison_table,
        evaluation_tables as evaluation_tables,
    )
    from ropewalk.reporting.shown_text import shown as shown
    from ropewalk.reporting.tables import ResultTable as ResultTable
else:
    __getattr__, __dir__ = on_first_use(__name__)
