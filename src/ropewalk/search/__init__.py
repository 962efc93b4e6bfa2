"""LongRoPE: the search for rescale factors, from a checkpoint and text to a factor table.

Names are imported on first use: reading a table or naming an algorithm needs no model. Its files::

    run, settings             one search on a model, from its settings to the table
    goal, space, algorithms   what is searched for, where, and how candidates are proposed
    loop, objective           race candidates within a budget; the loss of one on a row
    data, needle_rows         rows of text, and rows that ask for numbers hidden in it
    factor_table              the table as a file, and what to know of its factors
    imported_table            tables from a CSV or a published config
    fitted_table              a table applied to a checkpoint, and its export
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import make_callable, on_first_use

if TYPE_CHECKING:
    from ropewalk.search.algorithms import (
        Algorithm as Algorithm,
        Ask as Ask,
        Evaluator as Evaluator,
        EvolutionSettings as EvolutionSettings,
        Job as Job,
        Measured as Measured,
        algorithm_named as algorithm_named,
        crossover as crossover,
        evolve as evolve,
        mutate as mutate,
    )
    from ropewalk.search.factor_table import (
        Factors as Factors,
        read_factors as read_factors,
        write_factors as write_factors,
    )
    from ropewalk.search.goal import Goal as Goal, goal_of as goal_of, rescale_factors as rescale_factors
    from ropewalk.search.imported_table import import_factors as import_factors
    from ropewalk.search.loop import (
        Ledger as Ledger,
        Minimum as Minimum,
        Strategy as Strategy,
        minimise as minimise,
    )
    from ropewalk.search.objective import (
        Forwards as Forwards,
        ModelEvaluator as ModelEvaluator,
        ShortPenalty as ShortPenalty,
    )
    from ropewalk.search.run import SearchResult as SearchResult, search as search
    from ropewalk.search.settings import (
        ALGORITHMS as ALGORITHMS,
        DEFAULT_ALGORITHM as DEFAULT_ALGORITHM,
        SearchConfig as SearchConfig,
        SearchSettings as SearchSettings,
    )
    from ropewalk.search.space import START_TOKENS as START_TOKENS, Candidate as Candidate, Space as Space
else:
    __getattr__, __dir__ = on_first_use(__name__)

# `from ropewalk import search` may bind this package or its function, whichever was imported first.
make_callable(__name__, "ropewalk.jobs")
